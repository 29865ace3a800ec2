"""What was trained is used by the commands, without Horovod: on a model trained here."""

import json
import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from commands import command
from conftest import BIN
from safetensors.torch import load_file

from hvd_transformer.inference import predict

WORDS = {"rot": "red", "blau": "blue", "Hund": "dog", "Katze": "cat", "ein": "a", "und": "and"}
SMALL = [
    "model.num_layers=1", "model.d_model=32", "model.num_heads=2", "model.d_feedforward=64", "model.max_length=32",
    "data.sequence_length=16", "data.workers=1", "training.device=cpu", "training.batch_size=16", "optimizer.lr=0.01",
    "optimizer.schedule=constant",
]  # fmt: skip


def run(program: str, *words: object, code: int = 0, text: str = "") -> str:
    """Standard output; with another exit code than 0, the one line of standard error."""
    done = command(program, *words, text=text, hide=("horovod", "mpi4py"))
    assert done.returncode == code, done.stdout + done.stderr
    if code:
        assert done.stderr.count("\n") == 1, done.stderr
        return done.stderr
    return done.stdout


def train(folder: Path, name: str, source: Path, *words: str) -> Path:
    run("hvd-train", *settings(folder, name, source), *words)
    return folder / name


def settings(folder: Path, name: str, source: Path) -> list[str]:
    return [f"data.source={source}", f"data.cache_dir={folder / 'cache'}", f"output_dir={folder / name}", *SMALL]


def sentences(number: int) -> list[list[str]]:
    rng = random.Random(4)
    return [rng.choices(list(WORDS), k=rng.randint(1, 6)) for _ in range(number)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("using")


@pytest.fixture(scope="module")
def translation(folder: Path) -> Path:
    """From German to English, word by word."""
    (folder / "pairs").mkdir()
    for split, rows in (("train", sentences(400)), ("valid", sentences(20))):
        (folder / "pairs" / f"{split}.de").write_text("".join(" ".join(row) + "\n" for row in rows))
        targets = (" ".join(WORDS[word] for word in row) for row in rows)
        (folder / "pairs" / f"{split}.en").write_text("".join(f"{target}\n" for target in targets))
    words = ["task=translation", "data.tokenizer=basic_english", "training.epochs=12", "training.best_metric=bleu"]
    words += ["optimizer.lr=0.004", "optimizer.schedule=cosine", "optimizer.warmup_steps=40", "training.eval_every=100"]
    return train(folder, "translation", folder / "pairs", *words, "data.target_length=12")


@pytest.fixture(scope="module")
def classification(folder: Path) -> Path:
    """Whether a sentence has a dog."""
    file = folder / "dogs.csv"
    rows = (f"{'dog' if 'Hund' in row else 'none'},{' '.join(row)}" for row in sentences(400))
    file.write_text("label,text\n" + "\n".join(rows) + "\n")
    words = ["task=classification", "data.tokenizer=basic_english", "data.split=[0.9, 0.1]", "training.epochs=6"]
    return train(folder, "classification", file, *words, "training.best_metric=f1")


@pytest.fixture(scope="module")
def language_model(folder: Path) -> Path:
    """The alphabet, over and over."""
    file = folder / "abc.txt"
    file.write_text("abcdefghijklmnopqrstuvwxyz" * 300)
    words = ["data.tokenizer=char", "training.epochs=4", "data.split=[0.9, 0.1]", "model.position=rotary"]
    return train(folder, "language-model", file, *words)


def test_a_translation_is_what_was_learned(translation: Path, folder: Path) -> None:
    summary = json.loads((translation / "summary.json").read_text())
    assert summary["valid_bleu"] > 90
    rows = [*sentences(30), [], ["Hund"]]
    file = folder / "source.txt"
    file.write_text("".join(" ".join(row) + "\n" for row in rows))
    found = run("hvd-transformer", "translate", translation, "--file", file, "--batch-size", 7).splitlines()
    wanted = [" ".join(WORDS[word] for word in row) for row in rows]
    assert len(found) == len(wanted)
    right = sum(one == other for one, other in zip(found, wanted, strict=True))
    assert right >= 0.9 * len(wanted)
    assert found[-2] == ""
    # The same from standard input, one by one; and from an exported folder.
    exported = folder / "exported"
    assert run("hvd-transformer", "export", translation, exported).strip() == str(exported)
    assert sorted(path.name for path in exported.iterdir()) == [
        "config.json", "model.safetensors", "source-vocabulary.json", "target-vocabulary.json"
    ]  # fmt: skip
    assert json.loads((exported / "config.json").read_text())["target_length"] == 12
    again = run("hvd-transformer", "translate", exported, "--batch-size", 1, text=file.read_text()).splitlines()
    assert again == found
    assert f"{exported}: exists already" in run("hvd-transformer", "export", translation, exported, code=2)
    late = "Hund\n" * 600 + "Hund " * 40 + "\n"
    long = run("hvd-transformer", "translate", translation, text=late, code=2)
    assert "standard input, line 601: 40 tokens; the model has model.max_length=32 positions" in long


def test_what_only_training_needs_is_not_read(translation: Path, tmp_path: Path) -> None:
    """The optimizer's state is twice the model."""
    run_directory = shutil.copytree(translation, tmp_path / "run", symlinks=True)
    for name, code in (("optimizer.safetensors", 0), ("model.safetensors", 2)):
        file = run_directory / "checkpoints" / "best" / name
        content = bytearray(file.read_bytes())
        content[-5] ^= 1
        file.write_bytes(content)
        found = run("hvd-transformer", "translate", run_directory, text="Hund\n", code=code)
        assert found == "dog\n" if code == 0 else "model.safetensors: damaged: the checksum" in found


def test_output_is_utf_8_whatever_the_locale(classification: Path) -> None:
    words = [BIN / "hvd-transformer", "classify", classification, "--text", "Hund 狗 é"]
    found = subprocess.run(words, env={**os.environ, "PYTHONIOENCODING": "latin-1"}, stdout=subprocess.PIPE, check=True)
    assert json.loads(found.stdout.decode("utf-8"))["text"] == "Hund 狗 é"


def test_a_translation_is_one_line(translation: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a tokenizer of bytes makes of it."""
    monkeypatch.setattr(predict, "translate_texts", lambda *given: ["a\nb", "a\r\nb"])
    text = run("hvd-transformer", "translate", translation, text="Hund\nKatze\n")
    assert text == "a b\na  b\n"


def test_a_label_is_what_was_learned(classification: Path) -> None:
    summary = json.loads((classification / "summary.json").read_text())
    assert summary["valid_accuracy"] > 0.9
    rows = [*sentences(20), []]
    lines = run(
        "hvd-transformer", "classify", classification, text="".join(" ".join(row) + "\n" for row in rows)
    ).splitlines()
    found = [json.loads(line) for line in lines]
    assert [one["text"] for one in found] == [" ".join(row) for row in rows]
    assert found[-1]["label"] is None
    for one in found[:-1]:
        assert one["label"] == max(one["probabilities"], key=one["probabilities"].get)
        assert sum(one["probabilities"].values()) == pytest.approx(1, abs=1e-5)
    right = sum(
        one["label"] == ("dog" if "Hund" in row else "none") for one, row in zip(found, rows[:-1], strict=False)
    )
    assert right >= 0.9 * len(rows[:-1])
    (alone,) = run("hvd-transformer", "classify", classification, "--text", "ein Hund").splitlines()
    assert json.loads(alone)["label"] == "dog"
    assert run("hvd-transformer", "classify", classification, text="\ufeffein Hund\r\n") == alone + "\n"
    (padding,) = run("hvd-transformer", "classify", classification, "--text", "<pad>").splitlines()
    assert sum(json.loads(padding)["probabilities"].values()) == pytest.approx(1, abs=1e-5)
    wrong = run("hvd-transformer", "classify", classification, "--text", "ein Hund", "--file", __file__, code=2)
    assert wrong == "hvd-transformer: --text and --file: give one of them\n"
    wrong = run("hvd-transformer", "classify", classification, "--text", "ein \udcff", code=2)
    assert "--text" in wrong and "not valid UTF-8" in wrong


def test_a_text_goes_on_as_it_was_learned(language_model: Path, folder: Path) -> None:
    words = ["generate", language_model, "--temperature", 0, "--tokens", 12]
    assert run("hvd-transformer", *words, "--prompt", "defgh") == "defghijklmnopqrst\n"
    prompts = folder / "prompts.txt"
    prompts.write_text("x\nabcdefghij\nmnop\n")
    lines = run("hvd-transformer", *words, "--file", prompts, "--json").splitlines()
    assert [json.loads(line)["text"] for line in lines] == [
        "xyzabcdefghij",
        "abcdefghijklmnopqrstuv",
        "mnopqrstuvwxyzab",
    ]
    drawn = [
        run("hvd-transformer", "generate", language_model, "--prompt", "a", "--temperature", 3, "--seed", seed)
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(drawn[0]) == 32 + 1  # its positions are full, and a line end
    narrow = run(
        "hvd-transformer", "generate", language_model, "--prompt", "a", "--temperature", 3, "--top-k", 1, "--tokens", 5
    )
    assert narrow == "abcdef\n"
    long = run("hvd-transformer", "generate", language_model, "--prompt", "a" * 32, code=2)
    assert "32 tokens; the model has 32 positions" in long
    assert "--prompt '': has no token" in run("hvd-transformer", "generate", language_model, "--prompt", "", code=2)
    prompts.write_text("x\n\nmnop\n")
    assert f"{prompts}, line 2: has no token" in run("hvd-transformer", *words, "--file", prompts, code=2)
    wrong = run("hvd-transformer", *words, "--prompt", "a\udcff", code=2)
    assert "--prompt" in wrong and "not valid UTF-8" in wrong
    assert "give --prompt TEXT or --file FILE" in run("hvd-transformer", "generate", language_model, code=2)
    for wrong in ("nan", "inf", "-1"):
        assert "--temperature" in run("hvd-transformer", *words, "--prompt", "a", "--temperature", wrong, code=2)


def test_rows_of_a_model_without_a_token_are_not_written(folder: Path) -> None:
    """`model.vocab_size` may be above the number of tokens; hardly trained, each row is as likely as a token."""
    (folder / "ab.txt").write_text("ab" * 300)
    more = ["data.tokenizer=char", "model.vocab_size=512", "data.split=[0.9, 0.1]", "training.text_samples=1"]
    model = train(folder, "rows", folder / "ab.txt", *more, "training.max_steps=1")
    words = ["generate", model, "--prompt", "a", "--tokens", 20]
    for text in (run("hvd-transformer", *words).strip(), json.loads(run("hvd-transformer", *words, "--json"))["text"]):
        assert len(text.replace("<unk>", "?")) == 21


def test_a_model_that_has_diverged_is_told(folder: Path) -> None:
    """The checkpoint of the step that spoilt it is there: only the next step finds out."""
    (folder / "few.tsv").write_text("a b c\tc b a\nb c a\ta c b\n" * 20)
    more = ["task=translation", "data.tokenizer=basic_english", "data.split=[0.8, 0.2]", "optimizer.warmup_steps=0"]
    more += ["optimizer.lr=1e38", "optimizer.clip_norm=none", "training.max_steps=2", "training.eval_every=2"]
    given = settings(folder, "diverged", folder / "few.tsv")
    message = run("hvd-train", *given, *more, "checkpoint.every_steps=1", code=1)
    assert message.startswith("hvd-train: step 2: the loss is nan")
    message = run("hvd-transformer", "translate", folder / "diverged", text="a b\n", code=2)
    assert message.count("\n") == 1 and message.endswith("contains NaN or infinity: the training has diverged\n")


@pytest.mark.parametrize(("name", "kind"), [("translate", "translation"), ("classify", "classification")])
def test_another_tasks_checkpoint_is_refused(language_model: Path, name: str, kind: str) -> None:
    message = run("hvd-transformer", name, language_model, text="x\n", code=2)
    assert message == f"hvd-transformer: {language_model}: a checkpoint of task=language_model, not of task={kind}\n"


def test_what_is_no_checkpoint_is_told(folder: Path, tmp_path: Path) -> None:
    assert "hvd-transformer: " in run("hvd-transformer", "generate", tmp_path, "--prompt", "a", code=2)
    (tmp_path / "config.json").write_text("{}")
    message = run("hvd-transformer", "generate", tmp_path, "--prompt", "a", code=2)
    assert "not a configuration written by `hvd-transformer export`" in message


def test_an_export_of_another_version_is_told(tmp_path: Path) -> None:
    facts = {"format": 1, "made_by": "hvd-transformer 9.0", "task": "language_model", "longest": 8}
    for model, key in (
        ({"d_model": 8, "window": 4}, "model.window"),
        ({"d_model": "wide"}, "model.d_model"),
        ([], "model"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**facts, "model": model}))
        for words in (["generate", tmp_path, "--prompt", "a"], ["export", tmp_path, tmp_path / "out"]):
            message = run("hvd-transformer", *words, code=2)
            assert message.startswith(f"hvd-transformer: {tmp_path / 'config.json'}: {key}: ")
            assert "written by hvd-transformer 9.0, this is" in message and message.count("\n") == 1


def test_an_exported_folder_has_the_checkpoints_weights(translation: Path, folder: Path, tmp_path: Path) -> None:
    exported = tmp_path / "out"
    run("hvd-transformer", "export", translation, exported)
    best = load_file(translation / "checkpoints" / "best" / "model.safetensors")
    found = load_file(exported / "model.safetensors")
    assert found.keys() == best.keys()
    assert all(torch.equal(found[name], best[name]) for name in best)
