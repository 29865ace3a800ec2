"""A Hugging Face folder's tokenizer gives what transformers does."""

import pickle
from pathlib import Path

import pytest
from huggingface import WORDS, write_bert

from hvd_transformer.data.load_tokenizer import load_tokenizer
from hvd_transformer.data.pretrained_tokenizer import PretrainedTokenizer

transformers = pytest.importorskip("transformers")
TEXTS = ["the room was good", "Not VERY clean!", "unheard of", "a"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_bert(tmp_path_factory.mktemp("tokenizer") / "bert")


def test_numbers_are_those_of_transformers(folder: Path) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = PretrainedTokenizer.read(folder)
    for text, own in zip(TEXTS, ours.encode_lines(TEXTS), strict=True):
        assert own.tolist() == theirs(text)["input_ids"]
        assert ours.encode(text).tolist() == theirs(text, add_special_tokens=False)["input_ids"]
        for limit in (3, 4, 5):
            assert ours.shorten(own, limit).tolist() == theirs(text, truncation=True, max_length=limit)["input_ids"]
    assert (ours.vocab_size, ours.pad) == (5 + len(WORDS), theirs.pad_token_id)
    assert ours.decode_line(ours.encode_lines(TEXTS)[0]) == TEXTS[0]


def test_an_empty_text_has_no_token(folder: Path) -> None:
    assert [len(ids) for ids in PretrainedTokenizer.read(folder).encode_lines(["", " ", "a"])] == [0, 0, 3]


def test_it_is_kept_and_sent_whole(folder: Path, tmp_path: Path) -> None:
    ours = PretrainedTokenizer.read(folder)
    ours.save(tmp_path)
    for other in (load_tokenizer(tmp_path), pickle.loads(pickle.dumps(ours))):
        assert isinstance(other, PretrainedTokenizer)
        assert other.json_text == ours.json_text
        assert [ids.tolist() for ids in other.encode_lines(TEXTS)] == [ids.tolist() for ids in ours.encode_lines(TEXTS)]
