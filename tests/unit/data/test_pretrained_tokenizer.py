"""A Hugging Face folder's tokenizer gives what transformers does."""

import json
import pickle
from pathlib import Path

import pytest
from huggingface import WORDS, write_bert
from tokenizers import Tokenizer, models

from hvd_transformer.data.load_tokenizer import load_tokenizer
from hvd_transformer.data.pretrained_tokenizer import PretrainedTokenizer
from hvd_transformer.errors import UserError

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


def test_older_versions_of_transformers_know_its_class(tmp_path: Path) -> None:
    """Version 5 has another name for the class that reads tokenizer.json, and writes it into what it saves."""
    model = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"a": 0, "b": 1}, [])))
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    found = PretrainedTokenizer.read(tmp_path)
    assert json.loads(found.files()["tokenizer_config.json"])["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert "backend" not in found.config
    found.save(tmp_path)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path)("ab")["input_ids"] == [0, 1]


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    """A folder in which no file names the end token."""
    model = Tokenizer(models.BPE({"a": 0, "b": 1, "</s>": 2}, []))
    model.add_special_tokens(["<|endoftext|>"])
    model.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.parametrize("name", ["", "tokenizer.json"])
def test_the_end_token_is_found_wherever_the_folder_has_it(gpt2: Path, name: str) -> None:
    def end() -> int | None:
        tokenizer = PretrainedTokenizer.open(gpt2 / name)
        padded = tokenizer.with_pad()
        assert padded is not None and padded.own_pad == tokenizer.document_end
        return tokenizer.document_end

    assert end() == 3  # GPT-2's own
    (gpt2 / "tokenizer_config.json").write_text('{"model_max_length": 1024}')
    assert end() == 3
    (gpt2 / "special_tokens_map.json").write_text('{"eos_token": {"content": "b"}}')
    assert end() == 1
    (gpt2 / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    assert end() == 2


def test_a_tokenizer_file_of_another_name_has_no_files_beside_it(gpt2: Path) -> None:
    (gpt2 / "tokenizer.json").rename(gpt2 / "other.json")
    (gpt2 / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    assert PretrainedTokenizer.open(gpt2 / "other.json").document_end == 3


@pytest.mark.parametrize("name", ["", "tokenizer.json"])
@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "must be a JSON object"),
        ("{", "not valid JSON: Expecting property name"),
        ("[" * 100_000, "not valid JSON: maximum recursion depth exceeded"),
        ('{"eos_token": 5}', "eos_token must be a token, such as </s>, not 5"),
        ('{"pad_token": {"content": [1]}}', 'pad_token must be a token, such as </s>, not {"content": [1]}'),
        ('{"bos_token": {"text": "a"}}', 'bos_token must be a token, such as </s>, not {"text": "a"}'),
    ],
)
def test_a_broken_small_file_is_named(gpt2: Path, name: str, file: str, content: str, message: str) -> None:
    (gpt2 / file).write_text(content)
    with pytest.raises(UserError) as caught:
        PretrainedTokenizer.open(gpt2 / name)
    assert str(caught.value).startswith(f"data.tokenizer={gpt2 / name}: {file}: {message}")


def test_a_broken_tokenizer_file_is_named(gpt2: Path) -> None:
    (gpt2 / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="not a valid tokenizer.json: "):
        PretrainedTokenizer.open(gpt2)
    (gpt2 / "tokenizer.json").write_bytes(b"\xff")
    with pytest.raises(UserError, match="/tokenizer.json: not valid UTF-8"):
        PretrainedTokenizer.open(gpt2)
    (gpt2 / "tokenizer.json").write_text("{}")
    (gpt2 / "tokenizer_config.json").write_bytes(b"\xff")
    with pytest.raises(UserError, match="/tokenizer_config.json: not valid UTF-8"):
        PretrainedTokenizer.open(gpt2)


def test_a_maximum_length_that_is_no_number_is_none(gpt2: Path) -> None:
    (gpt2 / "tokenizer_config.json").write_text(json.dumps({"model_max_length": "x"}))
    assert PretrainedTokenizer.open(gpt2).longest is None
