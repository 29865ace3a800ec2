"""`export --format transformers`: AutoModelForCausalLM and AutoTokenizer read the folder, and do what we do."""

import json
import math
import resource
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from commands import output as run

from hvd_transformer.data.load_tokenizer import load_tokenizer

transformers = pytest.importorskip("transformers")

TEXT = "The cat's (big, red) hat sat on my rug!\nIs the rug; the cat: “fine”? Äh, no… 12 hats.\n" * 60
CASES = {
    "bpe": ["--preset", "tiny", "data.vocab_size=300"],
    "char": [
        "--preset",
        "tiny",
        "data.tokenizer=char",
        "data.vocab_size=none",
        "model.position=learned",
    ],
    "words": [
        "--preset",
        "tiny",
        "data.tokenizer=basic_english",
        "data.vocab_size=none",
        "model.position=rotary",
    ],
    "llama": [
        "--preset",
        "llama-tiny",
        "data.vocab_size=300",
        "model.num_layers=2",
        "model.d_model=32",
    ],
}
SETTINGS = [
    "data.workers=1", "data.split=[0.8,0.2]", "training.device=cpu", "data.sequence_length=32", "training.batch_size=4",
    "training.text_samples=0", "optimizer.warmup_steps=0",
]  # fmt: skip
PROMPT = "the cat's hat sat on"


def validation_loss(checkpoint: Path) -> float:
    shown = run("hvd-transformer", "evaluate", checkpoint, "--split", "valid", "--json")
    return float(json.loads(shown)["metrics"]["loss"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run and its export for each case."""
    root = tmp_path_factory.mktemp("export")
    (root / "text.txt").write_text(TEXT, encoding="utf-8")
    for name, words in CASES.items():
        more = [f"data.source={root / 'text.txt'}", f"data.cache_dir={root / 'cache'}", f"output_dir={root / name}"]
        run("hvd-train", *words, *SETTINGS, *more, "training.max_steps=12")
        run("hvd-transformer", "export", root / name, root / f"{name}-exported", "--format", "transformers")
    return root


@pytest.mark.parametrize("name", CASES)
def test_its_tokenizer_has_our_numbers(folder: Path, name: str) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(folder / f"{name}-exported")
    ours = load_tokenizer(folder / name / "checkpoints" / "latest")
    for text in (TEXT, PROMPT, "A \t newline\n\n and \x1c µ unknown ☃", "a <unk> b <unk>x", ""):
        found = theirs(text, add_special_tokens=False)["input_ids"]
        assert found == ours.encode(text).tolist()
    ids = ours.encode(TEXT).tolist()
    assert theirs.decode(ids) == ours.decode(ids)


def test_who_may_read_one_of_its_files_may_read_all(folder: Path) -> None:
    files = list((folder / "bpe-exported").iterdir())
    assert {file.stat().st_mode for file in files} == {(folder / "text.txt").stat().st_mode}


@pytest.mark.parametrize("name", CASES)
def test_it_writes_what_we_write(folder: Path, name: str) -> None:
    exported = folder / f"{name}-exported"
    words = ["--prompt", PROMPT, "--tokens", "50", "--temperature", "0", "--json"]
    own = json.loads(run("hvd-transformer", "generate", folder / name, *words))["text"]
    assert json.loads(run("hvd-transformer", "generate", exported, *words))["text"] == own
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    model = transformers.AutoModelForCausalLM.from_pretrained(exported).eval()
    inputs = tokenizer(PROMPT, add_special_tokens=False, return_tensors="pt")["input_ids"]
    found = model.generate(
        input_ids=inputs,
        max_new_tokens=50,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    assert tokenizer.decode(found[0]) == own


@pytest.mark.parametrize("name", ["char", "llama"])
def test_a_text_ends_where_a_document_does(name: str, tmp_path: Path) -> None:
    """transformers stops there by itself, and trains on documents with that token."""
    document = "a red cat"
    (tmp_path / "own.jsonl").write_text(f'{{"text": "{document}"}}\n' * 200)
    more = [f"data.source={tmp_path / 'own.jsonl'}", f"data.cache_dir={tmp_path}", f"output_dir={tmp_path / 'run'}"]
    more += ["training.max_steps=80", "optimizer.lr=0.01", "data.text_column=text", "training.epochs=99"]
    run("hvd-train", *CASES[name], *SETTINGS, *more)
    run("hvd-transformer", "export", tmp_path / "run", tmp_path / "exported", "--format", "transformers")
    words = ["--prompt", "a", "--tokens", "30", "--temperature", "0", "--json"]
    own = json.loads(run("hvd-transformer", "generate", tmp_path / "run", *words))["text"]
    assert own == document
    assert json.loads(run("hvd-transformer", "generate", tmp_path / "exported", *words))["text"] == own
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported").eval()
    end = load_tokenizer(tmp_path / "run" / "checkpoints" / "latest").document_end
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id == end
    inputs = tokenizer("a", add_special_tokens=False, return_tensors="pt")["input_ids"]
    found = model.generate(input_ids=inputs, max_new_tokens=30, do_sample=False, pad_token_id=0)[0]
    assert found[-1] == end and tokenizer.decode(found[:-1]) == own


@pytest.mark.parametrize("name", ["char", "llama"])
def test_it_learns_to_label_texts(name: str, folder: Path, tmp_path: Path) -> None:
    """A language model of unlabelled documents, then a classifier: batches are filled with the end of a document."""
    rows = [("good", "a big red hat"), ("bad", "no cat"), ("good", "my rug is fine"), ("bad", "12")] * 8
    (tmp_path / "own.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for _, text in rows))
    (tmp_path / "rows.csv").write_text("label,text\n" + "".join(f"{label},{text}\n" for label, text in rows))
    more = [f"data.cache_dir={tmp_path}", "training.max_steps=3", "optimizer.lr=0.01"]
    source = f"data.source={tmp_path / 'own.jsonl'}"
    run("hvd-train", *CASES[name], *SETTINGS, *more, source, f"output_dir={tmp_path / 'run'}")
    run("hvd-transformer", "export", tmp_path / "run", tmp_path / "exported", "--format", "transformers")
    words = ["task=classification", f"data.source={tmp_path / 'rows.csv'}", f"output_dir={tmp_path / 'labels'}"]
    shown = run("hvd-train", *words, f"model.pretrained={tmp_path / 'exported'}", *SETTINGS, *more)
    assert "new weights: score.weight" in shown
    run("hvd-transformer", "export", tmp_path / "labels", tmp_path / "again")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "again")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "again").eval()
    assert tokenizer.pad_token_id == model.config.pad_token_id == tokenizer.eos_token_id
    texts = [text for _, text in rows[:4]]
    with torch.no_grad():
        wanted = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits.softmax(-1)
    chosen = [word for text in texts for word in ("--text", text)]
    found = run("hvd-transformer", "classify", tmp_path / "labels", *chosen).splitlines()
    for line, row in zip(found, wanted, strict=True):
        assert list(json.loads(line)["probabilities"].values()) == pytest.approx(row.tolist(), abs=2e-6)
    # Without documents there is no end that could fill a batch.
    other = [f"model.pretrained={folder / f'{name}-exported'}", f"output_dir={tmp_path / 'other'}"]
    message = run("hvd-train", *words, *other, *SETTINGS, *more, code=2)
    assert message.endswith("its tokenizer has no pad token, which fills a batch, and no eos_token\n")


@pytest.mark.parametrize("name", CASES)
def test_its_loss_is_that_of_evaluate(folder: Path, name: str) -> None:
    """The mean over all windows of the validation split, as transformers computes it."""
    exported = folder / f"{name}-exported"
    wanted = validation_loss(folder / name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    model = transformers.AutoModelForCausalLM.from_pretrained(exported).eval()
    lines = TEXT.splitlines(keepends=True)
    text = "".join(lines[round(0.8 * len(lines)) :])
    tokens = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    total = 0.0
    with torch.no_grad():
        for start in range(0, len(tokens) - 1, 32):
            window = tokens[start : start + 33]
            logits = model(input_ids=window[None, :-1]).logits[0]
            total += float(F.cross_entropy(logits, window[1:], reduction="sum"))
    assert total / (len(tokens) - 1) == pytest.approx(wanted, rel=1e-5)
    assert math.isfinite(wanted)


@pytest.mark.parametrize("name", ["bpe", "llama"])
def test_training_begins_at_its_loss(folder: Path, name: str, tmp_path: Path) -> None:
    """A Llama in our blocks, on two pipeline stages; a GPT-2 as transformers' own module."""
    more = ["parallel.pipeline=2", "parallel.micro_batches=2"] if name == "llama" else []
    more += [
        f"data.source={folder / 'text.txt'}",
        f"data.cache_dir={folder / 'cache'}",
        f"output_dir={tmp_path / 'run'}",
    ]
    words = ["training.max_steps=1", "optimizer.lr=1e-12"]
    run("hvd-train", f"model.pretrained={folder / f'{name}-exported'}", *SETTINGS, *more, *words)
    wanted = validation_loss(folder / name)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["valid_loss"] == pytest.approx(wanted, rel=1e-5)


def test_a_full_disk_gets_one_line(folder: Path, tmp_path: Path) -> None:
    """Here files of some size cannot be written."""
    words = ["export", folder / "bpe", tmp_path / "out", "--format", "transformers"]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16384, limits[1]))
    try:
        message = run("hvd-transformer", *words, code=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert message.startswith(f"hvd-transformer: {tmp_path / 'out'}: cannot be written: ")
    assert "File too large" in message and message.count("\n") == 1
    assert not (tmp_path / "out").exists()  # so that the same command can be repeated
    (tmp_path / "out").mkdir()
    assert (tmp_path / "out").as_posix() in run("hvd-transformer", *words) and len(
        list((tmp_path / "out").iterdir())
    ) > 2


def test_bad_input_gets_one_line(folder: Path, tmp_path: Path) -> None:
    message = run(
        "hvd-transformer",
        "export",
        folder / "bpe",
        folder / "bpe",
        "--format",
        "transformers",
        code=2,
    )
    assert message == f"hvd-transformer: {folder / 'bpe'}: exists already; choose a new or empty folder\n"
    words = [
        "export",
        folder / "bpe-exported",
        tmp_path / "again",
        "--format",
        "transformers",
    ]
    assert "is a Hugging Face folder already, which converters of" in run("hvd-transformer", *words, code=2)
    assert not (tmp_path / "again").exists()
    (tmp_path / "rows.csv").write_text("label,text\n" + "good,a clean room\nbad,no sleep\n" * 12)
    settings = [f"data.source={tmp_path / 'rows.csv'}", f"data.cache_dir={tmp_path}", f"output_dir={tmp_path / 'run'}"]
    run("hvd-train", "--preset", "tiny", "task=classification", "data.workers=1", *settings, "training.max_steps=1")
    words = ["export", tmp_path / "run", tmp_path / "again", "--format", "transformers"]
    assert run("hvd-transformer", *words, code=2).endswith(f"{tmp_path / 'run'}: only for task=language_model\n")
