"""Examples become token files: every sample once, left-out ones counted, the same files for any number of workers."""

import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvd_transformer.config import load
from hvd_transformer.data import prepare_examples as prepare_examples_module
from hvd_transformer.data.build_once import PrepareContext
from hvd_transformer.data.parallel_text import PairFiles
from hvd_transformer.data.prepare_examples import TrainedVocabulary, prepare_examples
from hvd_transformer.data.prepared import PreparedExamples
from hvd_transformer.data.tables import TableFiles
from hvd_transformer.data.tokenizers import SPECIALS, BPETokenizer, Tokenizer, build_vocabulary
from hvd_transformer.errors import UserError

TRAIN = [
    ("ein Hund bellt", "a dog barks"),
    ("zwei Hunde bellen laut", "two dogs bark"),
    (" ", "nothing"),
    ("ein Haus", "a house"),
]
VALID = [("ein Hund", "a dog"), ("drei Hunde", "three dogs")]
ROLES = ("source", "target")


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    folder = tmp_path / "pairs"
    folder.mkdir()
    for split, rows in {"train": TRAIN, "valid": VALID}.items():
        for column, language in enumerate(("de", "en")):
            (folder / f"{split}.{language}").write_text("".join(f"{row[column]}\n" for row in rows))
    return folder


def prepared(folder: Path, *words: str, shared: bool = False, **tools: object) -> PreparedExamples:
    common = ["task=translation", f"data.cache_dir={folder.parent / 'cache'}", "data.tokenizer=basic_english"]
    config = load(overrides=[*common, *words]).data
    source, context = PairFiles(config).open(folder, 1), PrepareContext(**tools)
    return prepare_examples(config, source, ROLES, shared=shared, context=context)


def texts(data: PreparedExamples, split: str) -> list[tuple[str, ...]]:
    examples = data.splits[split]
    return [
        tuple(data.tokenizers[role].decode_line(examples.texts[role][number]) for role in ROLES)
        for number in range(len(examples))
    ]


@pytest.mark.parametrize("tokenizer", ["bpe", "basic_english", "char"])
@pytest.mark.parametrize("shared", [False, True])
def test_samples_come_back(pairs: Path, tokenizer: str, shared: bool) -> None:
    reports: list[str] = []
    data = prepared(pairs, f"data.tokenizer={tokenizer}", shared=shared, report=reports.append)
    wanted = [row for row in TRAIN if row[0].strip()]
    found = texts(data, "train")
    if tokenizer == "basic_english":
        wanted = [tuple(text.lower() for text in row) for row in wanted]
    assert found == wanted
    assert data.left_out == {"train": {"empty": 1}, "valid": {}}
    assert data.report()[-1] == "left out of train: 1 empty"
    assert (data.tokenizers["source"].json_text == data.tokenizers["target"].json_text) == shared
    assert list(data.raw_texts("valid")) == [list(row) for row in VALID]
    target = data.splits["train"].texts["target"]
    assert target.lengths(0, 3).tolist() == [len(target[number]) for number in range(3)]
    assert target.lengths(1, 3).tolist() == target.lengths(0, 3).tolist()[1:]
    longest = [max(len(own[number]) for own in data.splits["train"].texts.values()) for number in range(3)]
    assert data.splits["train"].lengths.samples(0, 3).tolist() == np.argsort(longest, kind="stable").tolist()
    assert data.splits["train"].lengths.lengths.tolist() == sorted(set(longest))
    again = prepared(pairs, f"data.tokenizer={tokenizer}", shared=shared, report=lambda text: pytest.fail(text))
    assert (again.digest, again.folder) == (data.digest, data.folder)


def test_many_workers_make_the_same_files(pairs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = prepared(pairs)
    files = {path.name: path.read_bytes() for path in one.folder.glob("*.bin")}
    assert set(files) >= {"train-source.bin", "train-target-ends.bin", "valid-source.bin"}
    monkeypatch.setattr("hvd_transformer.data.prepare_examples._CHUNK", 1)
    (one.folder / "train-source.bin").unlink()  # so that it is made again
    with ThreadPoolExecutor(3) as threads:
        assert prepared(pairs, map=threads.map).digest == one.digest
    assert {path.name: path.read_bytes() for path in one.folder.glob("*.bin")} == files


def test_long_samples_are_dropped_cut_or_refused(pairs: Path) -> None:
    data = prepared(pairs, "data.sequence_length=3")
    assert data.left_out["train"] == {"empty": 1, "of more than 3 tokens": 1}
    assert len(data.splits["train"]) == 2
    cut = prepared(pairs, "data.sequence_length=3", "data.too_long=cut")
    assert texts(cut, "train")[1] == ("zwei hunde bellen", "two dogs bark")
    with pytest.raises(UserError, match=r"train.de, line 2: 4 tokens, more than data.sequence_length=3; raise it"):
        prepared(pairs, "data.sequence_length=3", "data.too_long=error")


def test_targets_have_a_limit_of_their_own(pairs: Path) -> None:
    """The first pair has 3 + 3 tokens, the second 4 + 4, the last 2 + 2."""
    before = prepared(pairs)
    data = prepared(pairs, "data.target_length=2")
    assert texts(data, "train") == [("ein haus", "a house")]
    assert data.left_out["train"] == {"empty": 1, "of more than 2 tokens in the target": 2}
    data = prepared(pairs, "data.sequence_length=3", "data.target_length=200")
    assert data.left_out["train"] == {"empty": 1, "of more than 3 tokens in the source": 1}
    cut = prepared(pairs, "data.sequence_length=3", "data.target_length=1", "data.too_long=cut")
    assert texts(cut, "train") == [("ein hund bellt", "a"), ("zwei hunde bellen", "two"), ("ein haus", "a")]
    assert cut.splits["train"].lengths.lengths.tolist() == [2, 3]  # a batch of tokens is filled by the longer text
    with pytest.raises(UserError, match=r"train.de, line 1: 3 tokens, more than data.target_length=2; raise it"):
        prepared(pairs, "data.target_length=2", "data.too_long=error")
    with pytest.raises(UserError, match=r"train.de, line 2: 4 tokens, more than data.sequence_length=3; raise it"):
        prepared(pairs, "data.sequence_length=3", "data.target_length=3", "data.too_long=error")
    assert prepared(pairs, "data.target_length=none", report=pytest.fail).folder == before.folder


def table(folder: Path, **splits: list[tuple[str, str]]) -> PreparedExamples:
    folder.mkdir(exist_ok=True)
    for split, rows in splits.items():
        lines = (json.dumps({"text": text, "label": label}) for text, label in rows)
        (folder / f"{split}.jsonl").write_text("\n".join(lines))
    config = load(overrides=[f"data.cache_dir={folder.parent / 'cache'}", "data.tokenizer=char"]).data
    return prepare_examples(config, TableFiles(config).open(folder, 1), ("text",))


def test_labels_are_numbered_in_their_order(tmp_path: Path) -> None:
    train = [("a", "10"), ("b", "9"), ("c", "-1")]
    data = table(tmp_path / "numbers", train=train, valid=[("a", "9")])
    assert data.labels == ["-1", "9", "10"]
    labels = data.splits["train"].labels
    assert labels is not None and labels[:].tolist() == [2, 1, 0]
    words = table(tmp_path / "words", train=[("a", "good"), ("b", "bad")], valid=[("a", "good")])
    assert words.labels == ["bad", "good"]
    same = [f"{'0' * zeros}1" for zeros in range(8)]  # equal numbers: the order of a set would differ by process
    assert table(tmp_path / "zeros", train=[("a", label) for label in same], valid=[("a", "1")]).labels == sorted(same)
    long = ["1", "1" + 5000 * "0"]  # int() takes at most 4,300 digits
    assert table(tmp_path / "long", train=[("a", label) for label in long], valid=[("a", "1")]).labels == long


def test_labels_that_cannot_be_learned_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"line 2: the label maybe is only in the valid split; the training split has n, y"
    ):
        table(tmp_path / "new", train=[("a", "y"), ("b", "n")], valid=[("a", "y"), ("b", "maybe")])
    own: dict[str, Tokenizer] = {"text": build_vocabulary("char", Counter("ab"), None, 1, SPECIALS)}
    for labels, message in ((None, "is only in the valid split"), (["n", "y"], "is none of the model's labels")):
        config = load(overrides=[f"data.cache_dir={tmp_path / 'cache'}"]).data
        source, learned = TableFiles(config).open(tmp_path / "new", 1), TrainedVocabulary(own, labels)
        with pytest.raises(UserError, match=f"the label maybe {message}"):
            prepare_examples(config, source, ("text",), learned=learned)
    with pytest.raises(UserError, match="the training split has only the label y; there must be two or more"):
        table(tmp_path / "one", train=[("a", "y")], valid=[("a", "y")])
    names = [("a", str(number)) for number in range(1001)]
    with pytest.raises(
        UserError, match="^data.label_column=label: 1,001 labels for 2,001 training samples; it must be"
    ):
        table(tmp_path / "many", train=[*names, *names[:-1]], valid=names[:1])
    assert len(table(tmp_path / "twice", train=names * 2, valid=names[:1]).labels) == 1001
    assert len(table(tmp_path / "few", train=names[:1000], valid=names[:1]).labels) == 1000
    with pytest.raises(UserError, match="the valid split has no usable sample"):
        table(tmp_path / "none", train=[("a", "y"), ("b", "n")], valid=[(" ", "y")])


def test_a_damaged_folder_is_made_again(pairs: Path) -> None:
    first = prepared(pairs)
    file = first.folder / "valid-target-ends.bin"
    file.write_bytes(file.read_bytes()[:-1])
    reports: list[str] = []
    second = prepared(pairs, report=reports.append)
    assert "is damaged: preparing it again" in reports[0]
    assert second.splits["valid"].lengths.lengths.tolist() == [2]


def test_a_start_with_prepared_data_reads_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even to count the rows of one file, which is split at random."""
    file = tmp_path / "rows.csv"
    file.write_text("text,label\n" + "".join(f"text {number},{number % 2}\n" for number in range(200)))
    config = load(overrides=["task=classification", f"data.cache_dir={tmp_path / 'cache'}", "data.tokenizer=char"]).data
    first = prepare_examples(config, TableFiles(config).open(file, 1), ("text",))
    assert {split: len(examples) for split, examples in first.splits.items()} == {"train": 180, "valid": 10, "test": 10}
    train = first.splits["train"].labels
    assert train is not None and first.label_counts == np.bincount(train[:]).tolist()
    monkeypatch.setattr("hvd_transformer.data.tables.read_lines", lambda path: pytest.fail(f"{path} was read"))
    again = prepare_examples(config, TableFiles(config).open(file, 1), ("text",))
    assert (again.digest, again.label_counts) == (first.digest, first.label_counts)


def test_byte_pairs_of_sentences_are_learned_from_a_sample(pairs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for column, language in enumerate(("de", "en")):
        lines = [f"{TRAIN[number % 2][column]} {number:04d}" for number in range(3000)]
        (pairs / f"train.{language}").write_text("".join(f"{line}\n" for line in lines))
    learned, train = [], BPETokenizer.train

    def recording(texts: Iterator[str], *args: Any, **kwargs: Any) -> BPETokenizer:
        learned.append(list(texts))
        return train(learned[-1], *args, **kwargs)

    monkeypatch.setattr(BPETokenizer, "train", recording)
    bpe = ("data.tokenizer=bpe", "data.vocab_size=270")
    whole = prepared(pairs, *bpe)
    assert [len(texts) for texts in learned] == [3000, 3000]
    assert prepared(pairs, *bpe, "data.tokenizer_sample_mb=0.5").folder == whole.folder
    messages: list[str] = []
    assert prepared(pairs, *bpe, "data.tokenizer_sample_mb=0.01", report=messages.append).folder != whole.folder
    assert sum("byte pairs are learned from 0.0 of" in text for text in messages) == 2
    for texts in learned[2:]:
        assert 10_000 < sum(map(len, texts)) < 10_600
        numbers = [int(text.split()[-1]) for text in texts]
        assert max(np.diff([0, *numbers, 3000])) < 3 * 3000 / len(texts)


def test_folders_of_the_format_before_are_not_read(pairs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = prepared(pairs)
    monkeypatch.setattr("hvd_transformer.data.prepare_examples.FORMAT", 1)
    assert prepared(pairs).folder != now.folder


@pytest.mark.parametrize("tokenizer", ["basic_english", "char"])
def test_long_samples_are_worked_on_in_smaller_parts(
    pairs: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two thousand long ones would take gigabytes. What is written is the same."""
    words = f"data.tokenizer={tokenizer}", "data.sequence_length=200"
    digest = prepared(pairs, *words).digest
    monkeypatch.setattr(prepare_examples_module, "_CHUNK_CHARACTERS", 30)
    sizes: list[int] = []

    def mapped(function: Any, chunks: Iterator[list[Any]]) -> Iterator[Any]:
        for chunk in chunks:
            sizes.append(len(chunk))
            yield function(chunk)

    again = prepared(pairs, *words, f"data.cache_dir={pairs.parent / 'again'}", map=mapped)
    assert again.digest == digest
    assert max(sizes) < len(TRAIN) and sum(sizes) >= len(TRAIN) + len(VALID)
