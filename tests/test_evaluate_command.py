"""`hvd-transformer evaluate`, without Horovod: the metrics that training ended with, on the same data and on others."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner
from conftest import BIN
from test_using import SMALL, WORDS, run, sentences

from hvd_transformer.cli.launch import launch
from hvd_transformer.errors import UserError

LONG = ["Hund"] * 20  # more than data.sequence_length
# The data, the file of its test split as one, and settings.
TASKS = {
    "translation": (
        "pairs",
        "test.tsv",
        ["translation.beam=2", "model.share_embeddings=true", "optimizer.betas=[0.9, 0.98]"],
    ),
    "classification": ("rows", "test.csv", ["data.class_weights=balanced", "training.best_metric=f1"]),
    "language_model": ("text", "test.txt", ["data.batching=columns", "optimizer.name=muon", "optimizer.eps=1e-9"]),
}


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def evaluated(*words: object) -> dict:
    """The one line of standard output."""
    (line,) = run("hvd-transformer", "evaluate", *words, "--json").splitlines()
    found = json.loads(line)
    assert isinstance(found, dict)
    return found


def of_split(run: Path, split: str) -> dict[str, float]:
    summary = json.loads((run / "summary.json").read_text())
    return {key.removeprefix(f"{split}_"): value for key, value in summary.items() if key.startswith(f"{split}_")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """pairs/, rows/ and text/ with three splits each; a sample of the test split is too long."""
    root = tmp_path_factory.mktemp("evaluate")
    for name in ("pairs", "rows", "text"):
        (root / name).mkdir()
    rows = sentences(200)
    splits = {"train": rows[:150], "valid": rows[150:170], "test": [*rows[170:], LONG]}
    for split, own in splits.items():
        lines = [" ".join(row) for row in own]
        targets = [" ".join(WORDS[word] for word in row) for row in own]
        labels = ["dog" if "Hund" in row else "none" for row in own]
        (root / "text" / f"{split}.txt").write_text("".join(f"{line}\n" for line in lines))
        (root / "pairs" / f"{split}.de").write_text("".join(f"{line}\n" for line in lines))
        (root / "pairs" / f"{split}.en").write_text("".join(f"{line}\n" for line in targets))
        table = "".join(f"{label},{line}\n" for label, line in zip(labels, lines, strict=True))
        (root / "rows" / f"{split}.csv").write_text(f"label,text\n{table}")
    pairs = zip((root / "pairs" / "test.de").open(), (root / "pairs" / "test.en").open(), strict=True)
    (root / "test.tsv").write_text("".join(f"{source.strip()}\t{target}" for source, target in pairs))
    for name in ("rows/test.csv", "text/test.txt"):
        shutil.copy(root / name, root)
    return root


@pytest.fixture(scope="module")
def trained(folder):
    """The run directory of a task, trained when it is first asked for."""

    def train(task: str) -> Path:
        if not (folder / task).exists():
            source, _, words = TASKS[task]
            run(
                "hvd-train", *SMALL, f"task={task}", f"data.source={folder / source}",
                f"data.cache_dir={folder / 'cache'}", f"output_dir={folder / task}", "data.tokenizer=basic_english",
                "training.eval_every=4", "training.max_steps=10", "training.epochs=9", *words,
            )  # fmt: skip
        return folder / task

    return train


@pytest.mark.parametrize("task", TASKS)
def test_the_metrics_are_those_that_training_ended_with(trained, folder: Path, task: str) -> None:
    directory, (source, file, _) = trained(task), TASKS[task]
    before = contents(directory)
    found = evaluated(directory)
    assert found["split"] == "test"
    assert found["metrics"] == of_split(directory, "test")
    assert evaluated(directory, "--split", "valid")["metrics"] == of_split(directory, "valid")
    training = evaluated(directory, "--split", "train")
    assert training["split"] == "train"
    assert training["metrics"].keys() == found["metrics"].keys()
    again = evaluated(directory, "--data", folder / source, "--split", "train")
    assert (again["metrics"], again["count"]) == (training["metrics"], training["count"])
    assert training["count"] > found["count"]
    # The same file, as it is and in a folder without any other split.
    copy = evaluated(directory, "--data", folder / file)
    assert copy["split"] == "data"
    assert {"metrics", "count", "unit", "left_out", "ranks"} < copy.keys()
    assert (copy["metrics"], copy["count"]) == (found["metrics"], found["count"])
    only = folder / f"only-{task}"
    only.mkdir()
    for part in (folder / source).glob("test.*"):
        shutil.copy(part, only)
    assert evaluated(directory, "--data", only)["metrics"] == found["metrics"]
    message = run("hvd-transformer", "evaluate", directory, "--data", only, "--split", "valid", code=2)
    assert message == f"hvd-transformer: {only}: no valid split; there is test\n"
    samples = {"language_model": {}}.get(task, {"of more than 16 tokens": 1})
    assert found["left_out"] == copy["left_out"] == samples
    assert contents(directory) == before


@pytest.mark.parametrize("task", TASKS)
def test_a_limit_takes_the_first_samples_of_the_split(trained, folder: Path, task: str) -> None:
    directory, file = trained(task), TASKS[task][1]
    limit = ["training.eval_batches=2", "training.eval_batch_size=2"]
    found = evaluated(directory, "--data", folder / file, *limit)
    assert found["eval_samples"] == 4
    if task == "language_model":
        assert found["count"] == 4 * 16
    else:
        head = 1 if task == "classification" else 0  # the line with the columns' names
        short = folder / f"short-{file}"
        short.write_text("".join((folder / file).read_text().splitlines(keepends=True)[: 4 + head]))
        whole = evaluated(directory, "--data", short)
        assert found["metrics"] == pytest.approx(whole["metrics"], rel=1e-6)
        assert (found["count"], whole["eval_samples"]) == (whole["count"], None)


def test_a_limited_training_says_so_and_evaluate_takes_the_whole_split(trained, folder: Path) -> None:
    whole = trained("classification")
    words = ["--config", whole / "config.yaml", "training.eval_batches=1", "training.eval_batch_size=8"]
    told = run("hvd-train", *words, f"output_dir={folder / 'limited'}")
    said = "training.eval_batches=1: only the first 8 samples of a split are evaluated"
    assert [line for line in told.splitlines() if said in line] == [f"warning: {said}", said]
    assert said in (folder / "limited" / "logs" / "rank-000.log").read_text()
    summary = json.loads((folder / "limited" / "summary.json").read_text())
    assert summary["eval_samples"] == 8 and "eval_samples" not in json.loads((whole / "summary.json").read_text())
    again = run("hvd-transformer", "evaluate", folder / "limited", "--split", "valid", *words[2:])
    accuracy = of_split(folder / "limited", "valid")["accuracy"]
    assert f"accuracy {accuracy:.4f}," in again and again.endswith(f" (8 samples, 1 rank)\n{said}\n")
    assert evaluated(folder / "limited", "--split", "valid")["count"] == 20


def test_the_text_is_one_line_and_the_notes(trained) -> None:
    *_, line, note = run("hvd-transformer", "evaluate", trained("translation")).splitlines()
    assert line.startswith("test loss ")
    assert ", bleu " in line
    assert line.endswith(" tokens, 1 rank, left out: 1 of more than 16 tokens)")
    assert "sacrebleu" in note


def test_tokenizers_are_the_checkpoints_own(trained, folder: Path) -> None:
    """On a text of which no training split is there; its words are known as they were in training."""
    directory = trained("language_model")
    other = folder / "other.txt"
    other.write_text((folder / "text" / "test.txt").read_text().replace("Hund", "Maus"))
    away = folder / "away"
    (folder / "text").rename(away)
    try:
        found = evaluated(directory, "--data", other)
        message = run("hvd-transformer", "evaluate", directory, code=2)
    finally:
        away.rename(folder / "text")
    assert f"data.source={folder / 'text'}: no such file or folder" in message
    assert found["count"] > 0
    assert found["metrics"]["loss"] > of_split(directory, "test")["loss"]  # of more unknown words


def test_a_split_that_was_changed_is_told(trained, folder: Path) -> None:
    """It may hold what the model was trained on."""
    directory, file = trained("classification"), folder / TASKS["classification"][0] / "test.csv"
    before = file.read_text()
    file.write_text(before + before.splitlines()[1] + "\n")
    try:
        message = run("hvd-transformer", "evaluate", directory, code=2)
        assert evaluated(directory, "--data", file)["split"] == "data"
    finally:
        file.write_text(before)
    assert "its test split is not what it was in training; was it changed?" in message
    assert evaluated(directory)["metrics"] == of_split(directory, "test")


def test_the_work_is_cut_as_the_words_say(trained) -> None:
    """Whatever it was in training; a pipeline's cut is even where there is nothing to measure."""
    directory = trained("translation")
    words = ["parallel.pipeline=2", "training.eval_batch_size=5", "translation.beam=1"]
    found, wanted = evaluated(directory, *words)["metrics"], of_split(directory, "test")
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("task", "words", "message"),
    [
        ("translation", ["--data", "absent"], "--data absent: no such file or folder"),
        ("translation", ["--data", "FOLDER/test.tsv", "--split", "test"], "is one file, which is evaluated as a whole"),
        ("translation", ["--data", "FOLDER/pairs/test.de"], "line 1: 0 tabs; a pair is a source"),
        (
            "classification",
            ["--data", "FOLDER/cow.csv"],
            "cow.csv, line 2: the label cow is none of the model's",
        ),
        ("language_model", ["--data", "FOLDER/empty.txt"], "empty.txt: the file is empty; it must hold text"),
    ],
)
def test_data_that_cannot_be_used_is_told(trained, folder: Path, task: str, words: list[str], message: str) -> None:
    (folder / "cow.csv").write_text("label,text\ncow,ein Hund\n")
    (folder / "empty.txt").write_text("")
    words = [word.replace("FOLDER", str(folder)) for word in words]
    assert message in run("hvd-transformer", "evaluate", trained(task), *words, code=2)


def test_other_data_may_have_other_columns(trained, folder: Path) -> None:
    text = (folder / "test.csv").read_text()
    (folder / "other.csv").write_text(text.replace("label,text\n", "kind,content\n", 1))
    names = ["data.text_column=content", "data.label_column=kind"]
    rows = trained("classification")
    found, wanted = (evaluated(rows, "--data", folder / name, *words) for name, words in
                     (("other.csv", names), ("test.csv", [])))  # fmt: skip
    assert found["metrics"] == wanted["metrics"]
    line = run("hvd-transformer", "evaluate", rows, *names, code=2)
    assert "data.text_column is fixed by the checkpoint" in line
    model = trained("language_model")
    plain = [evaluated(model, "--data", folder / "test.txt", *words)["metrics"] for words in ([], names[:1])]
    assert plain[0] == plain[1]  # running text has no columns


def test_launch_checks_the_words_first(trained, folder: Path) -> None:
    directory = trained("language_model")
    done = CliRunner().invoke(launch, ["-np", "2", "--dry-run", "--", "evaluate", str(directory), "--split", "valid"])
    assert done.output.endswith(f" hvd-transformer evaluate {directory} --split valid\n"), done.output
    exported = folder / "exported"
    run("hvd-transformer", "export", directory, exported)
    for words, message in (
        (
            [directory, "model.d_model=8"],
            "model.d_model is fixed by the checkpoint, model.d_model=32, and",
        ),
        ([directory, "optimizer.lr=1"], "optimizer.lr is fixed by the checkpoint"),
        ([directory, "lr=1"], "lr (command line): unknown key, did you mean optimizer.lr?"),
        ([directory, "parallel.tensor=3"], "parallel.tensor=3: must divide model.num_heads=2"),
        ([directory, "--data", "absent"], "--data absent: no such file or folder"),
        ([exported], "a model's folder, which does not say what its data was"),
        ([folder / "absent"], "absent: no such checkpoint folder"),
    ):
        done = CliRunner().invoke(launch, ["--dry-run", "--", "evaluate", *map(str, words)])
        assert isinstance(done.exception, UserError)
        assert message in str(done.exception)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_result_on_a_full_disk(trained) -> None:
    words = [BIN / "hvd-transformer", "evaluate", trained("classification"), "--json"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "hvd-transformer: the output cannot be written: No space left on device"
    assert "Traceback" not in done.stderr
