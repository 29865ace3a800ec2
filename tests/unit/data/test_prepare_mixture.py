"""Sources of a mixture that are only evaluated, and end marks in the text of documents."""

import json
from pathlib import Path

import numpy as np
import pytest

from hvd_transformer.config import load
from hvd_transformer.config.schema import Config
from hvd_transformer.data.blend import BlendedDataset
from hvd_transformer.data.build_once import ALONE
from hvd_transformer.data.prepare_mixture import prepare_sources, prepare_split
from hvd_transformer.data.prepared import PreparedData
from hvd_transformer.data.sampler import Replica
from hvd_transformer.data.token_file import MixedTokens
from hvd_transformer.errors import UserError
from hvd_transformer.tasks.language_model_task import LanguageModelTask

DOCUMENTS = [f"old </s> price {number} </s>" for number in range(100)]


def write_documents(path: Path) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("abcd dcba </s>\n" * 200)
    (tmp_path / "whole.txt").write_text("wxyz\n" * 50)
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "valid.txt").write_text("0123\n" * 20)
    write_documents(tmp_path / "docs.jsonl")
    return tmp_path


def configure(folder: Path, entries: dict[str, float], *words: str) -> Config:
    sources = ", ".join(f"{{source: {folder / name}, weight: {weight}}}" for name, weight in entries.items())
    own = ["data.split=[0.8, 0.1, 0.1]", "data.sequence_length=8", "data.vocab_size=none", "training.batch_size=2"]
    return load("tiny", None, [f"data.sources=[{sources}]", f"data.cache_dir={folder / 'cache'}", *own, *words])


def mixed(data: PreparedData, split: str) -> dict[str, int]:
    tokens = data.splits[split]
    assert isinstance(tokens, MixedTokens)
    return dict(zip(tokens.names, map(len, tokens.files), strict=True))


@pytest.mark.parametrize("kind", ["char", "basic_english"])
def test_a_source_of_weight_0_is_only_evaluated(folder: Path, kind: str) -> None:
    """Nothing of it is in the tokenizer; a single file is evaluated as a whole."""
    entries = {"whole.txt": 0, "a.txt": 1, "held": 0}
    config = configure(folder, entries, f"data.tokenizer={kind}")
    data = prepare_sources(config.data, None, ALONE)
    assert not set("".join(data.tokenizer.tokens)) & set("wxyz0123")
    assert list(mixed(data, "train")) == list(mixed(data, "test")) == ["a"]
    per_line = 5 if kind == "char" else 1
    assert {name: size for name, size in mixed(data, "valid").items() if name != "a"} == {
        "whole": 50 * per_line,
        "held": 20 * per_line,
    }
    task = LanguageModelTask(config, data, Replica())
    assert isinstance(task.samples, BlendedDataset)
    (only,) = task.samples.datasets
    assert only.num_items == task.samples.num_items
    assert {"whole_loss", "held_loss", "a_loss"} <= set(task.metric_names)
    again = prepare_split(config.data, "valid", data.tokenizer, ALONE)
    assert again.split_digests["valid"] == data.split_digests["valid"]
    assert list(mixed(prepare_split(config.data, "train", data.tokenizer, ALONE), "train")) == ["a"]


def test_documents_that_are_only_evaluated_have_an_end(folder: Path) -> None:
    config = configure(folder, {"docs.jsonl": 0, "a.txt": 1}, "data.tokenizer=bpe", "data.vocab_size=300")
    data = prepare_sources(config.data, None, ALONE)
    assert data.tokenizer.document_end == 1
    docs = data.splits["valid"].files[0][:]
    assert np.count_nonzero(docs == 1) == len(DOCUMENTS)


def test_a_source_of_weight_0_needs_a_valid_split(folder: Path) -> None:
    (folder / "held" / "valid.txt").rename(folder / "held" / "train.txt")
    config = configure(folder, {"held": 0, "a.txt": 1}, "data.tokenizer=char")
    with pytest.raises(UserError, match="held: no file of the valid split"):
        prepare_sources(config.data, None, ALONE)


@pytest.mark.parametrize("kind", ["bpe", "basic_english", "char"])
def test_an_end_mark_in_a_text_ends_no_document(folder: Path, kind: str) -> None:
    """Neither in a document nor in running text beside documents."""
    entries = {"docs.jsonl": 1, "a.txt": 1}
    data = prepare_sources(configure(folder, entries, f"data.tokenizer={kind}").data, None, ALONE)
    assert data.tokenizer.document_end == 1
    for number, wanted in enumerate((len(DOCUMENTS), 0)):
        found = sum(np.count_nonzero(tokens.files[number][:] == 1) for tokens in data.splits.values())
        assert found == wanted


def test_an_end_mark_is_a_word_of_running_text_alone(folder: Path) -> None:
    """As before documents had an end token: its token numbers stay the same."""
    (folder / "a.txt").write_text("</s> a b </s> <s>\n" * 100)
    words = [f"data.source={folder / 'a.txt'}", "data.tokenizer=basic_english", f"data.cache_dir={folder / 'cache'}"]
    data = prepare_sources(load(None, None, words).data, None, ALONE)
    assert data.tokenizer.tokens == ["<unk>", "</s>", "<s>", "a", "b"]
    assert data.splits["valid"][:5].tolist() == [1, 3, 4, 1, 2]


def test_a_test_split_that_is_named_must_be_in_one_of_the_sources(folder: Path) -> None:
    """Otherwise the job would be trained, and never tested."""
    for name in ("b", "c"):
        (folder / name).mkdir()
        for split in ("train", "valid"):
            (folder / name / f"{split}.txt").write_text("abcd dcba\n" * 100)
    (folder / "b" / "second.txt").write_text("abcd\n" * 20)
    words = ["data.split=[0.9, 0.1]", "data.tokenizer=char"]
    config = configure(folder, {"b": 1, "c": 1}, *words, "data.test=second")
    assert list(mixed(prepare_sources(config.data, None, ALONE), "test")) == ["b"]
    config = configure(folder, {"b": 1, "c": 1}, *words, "data.test=third")
    with pytest.raises(UserError, match=r"^data.test=third: data.sources=.* has no file of that name$"):
        prepare_sources(config.data, None, ALONE)
    alone = config.data.model_copy(update={"sources": None, "source": str(folder / "c")})
    with pytest.raises(UserError, match=r"^data.test=third: data.source=.*/c has no file of that name$"):
        prepare_sources(alone, None, ALONE)
