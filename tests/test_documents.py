"""Documents in JSON lines: token numbers as the library gives them, an end token after each; bad lines are named."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from commands import output as run
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

DOCUMENTS = [f"The naïve cat sat on rug {number}!\n\n“Fine”\r\n" + "and so on " * (number % 7) for number in range(300)]
SETTINGS = [
    "--preset", "tiny", "data.vocab_size=none", "data.workers=2", "data.split=[0.7,0.3]", "training.device=cpu",
    "data.sequence_length=16", "training.batch_size=4", "training.max_steps=2", "training.text_samples=2",
]  # fmt: skip


def write(path: Path, documents: Sequence[object], column: str = "text") -> Path:
    lines = [json.dumps({"id": number, column: text}) for number, text in enumerate(documents)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def tokens(cache: Path, split: str) -> list[int]:
    (file,) = (cache / "prepared").glob(f"*/{split}.bin")
    return np.fromfile(file, np.uint16).tolist()


def train(root: Path, source: Path, *words: object, code: int = 0) -> str:
    more = [f"data.source={source}", f"data.cache_dir={root / 'cache'}", f"output_dir={root / 'run'}"]
    return run("hvd-train", *SETTINGS, *more, *words, code=code)


def own_tokenizer(folder: Path, config: dict[str, object]) -> Path:
    """Its number of the end is not ours."""
    model = Tokenizer(models.BPE(unk_token="[UNK]"))
    model.pre_tokenizer, model.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    model.train_from_iterator(DOCUMENTS, trainers.BpeTrainer(vocab_size=90, special_tokens=["[UNK]", "[PAD]", "[END]"]))
    folder.mkdir()
    model.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("kind", ["bpe", "char", "basic_english", "own"])
def test_every_document_is_followed_by_an_end(kind: str, tmp_path: Path) -> None:
    """A file, cut between documents by `data.split`."""
    chosen, end = kind, 1
    if kind == "own":
        chosen, end = str(own_tokenizer(tmp_path / "own", {"eos_token": {"content": "[END]"}})), 2
    source = write(tmp_path / "posts.jsonl", DOCUMENTS, "body")
    train(tmp_path, source, f"data.tokenizer={chosen}", "data.text_column=body")
    found = [tokens(tmp_path / "cache", split) for split in ("train", "valid")]
    assert [split[-1] for split in found] == [end, end]
    documents = [list(map(int, row.split())) for row in " ".join(map(str, found[0] + found[1])).split(f" {end} ")]
    assert len(documents) == len(DOCUMENTS)
    assert 0.5 < len(found[0]) / len(found[0] + found[1]) < 0.9
    if kind in ("bpe", "own"):
        (file,) = (tmp_path / "cache" / "prepared").glob("*/tokenizer.json")
        library = Tokenizer.from_file(str(file))
        wanted = [library.encode(text, add_special_tokens=False).ids for text in DOCUMENTS]
        assert found[0] + found[1] == [token for ids in wanted for token in (*ids, end)]
    elif kind == "char":
        assert [len(row) for row in documents[:-1]] == [len(text) for text in DOCUMENTS[:-1]]
    shown = run("hvd-transformer", "generate", tmp_path / "run", "--prompt", "The cat", "--tokens", 4)
    assert shown.lower().startswith("the cat")


def test_a_folder_and_another_file_to_evaluate(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for split, part in {"train": DOCUMENTS[:200], "valid": DOCUMENTS[200:250], "test": DOCUMENTS[250:]}.items():
        write(tmp_path / "folder" / f"{split}.jsonl", part)
    train(tmp_path, tmp_path / "folder", "data.tokenizer=char")
    words = ["evaluate", tmp_path / "run", "--json", "--data"]
    of_split = json.loads(run("hvd-transformer", "evaluate", tmp_path / "run", "--json", "--split", "test"))["metrics"]
    found = json.loads(run("hvd-transformer", *words, tmp_path / "folder" / "test.jsonl"))["metrics"]
    assert found == of_split
    plain = tmp_path / "plain.txt"
    plain.write_text("".join(DOCUMENTS[250:]), encoding="utf-8")
    assert json.loads(run("hvd-transformer", *words, plain))["metrics"] != of_split


BROKEN = [
    ("{", "line 3: not valid JSON: "),
    ("7", "line 3: must be a JSON object with the column text"),
    ('{"body": "x"}', "line 3: has no column text (data.text_column); it has body"),
    (r'{"text": "a \ud800 b"}', "line 3: text contains an unpaired surrogate (invalid Unicode)"),
    ('{"text": ["x"]}', 'line 3: text must be a text, not ["x"]'),
]


@pytest.mark.parametrize(("line", "message"), BROKEN)
def test_a_broken_line_is_named(line: str, message: str, tmp_path: Path) -> None:
    good = json.dumps({"text": "a cat"})
    source = tmp_path / "posts.jsonl"
    source.write_text("\n".join([good, "", line, *[good] * 9]))
    assert f"{source}, {message}" in train(tmp_path, source, code=2)
    assert not (tmp_path / "run").exists()


def test_bad_settings(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a cat\n" * 50)
    message = train(tmp_path, tmp_path / "text.txt", "data.text_column=body", code=2)
    assert message.endswith("text.txt has no columns; it must end in .jsonl or .parquet\n")
    own = own_tokenizer(tmp_path / "own", {})
    message = train(tmp_path, write(tmp_path / "a.jsonl", DOCUMENTS), f"data.tokenizer={own}", code=2)
    assert "documents need a tokenizer with an end-of-sequence token" in message
