"""An exported tokenizer.json, read by the tokenizers library alone, has our token numbers."""

import json
import pickle
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Model
from tokenizers import models, normalizers, pre_tokenizers, trainers

from hvd_transformer.data.as_transformers_tokenizer import tokenizer_json, transformers_files, vocabulary_of
from hvd_transformer.data.pretrained_tokenizer import PretrainedTokenizer
from hvd_transformer.data.tokenizers import (
    DOCUMENT_SPECIALS,
    SPECIALS,
    BPETokenizer,
    CharTokenizer,
    WordTokenizer,
    build_vocabulary,
)

TEXT = "A room, <pad> b </s><s> x<pad> <PAD>\x1c</s>\t<s> <unk> c.</s>"


@pytest.mark.parametrize("kind", [BPETokenizer, CharTokenizer, WordTokenizer])
def test_special_tokens_in_a_sentence_are_text(kind: type) -> None:
    if kind is BPETokenizer:
        ours = BPETokenizer.train([TEXT] * 5, 600, 1, sentences=True)
    else:
        ours = build_vocabulary(kind.kind, kind.count(TEXT), None, 1, SPECIALS)
    text = tokenizer_json(ours)
    theirs, ids = Model.from_str(text), ours.encode_lines([TEXT])[0].tolist()
    assert theirs.encode(TEXT).ids == ids
    assert theirs.decode(ids).strip() == ours.decode_line(ids)
    assert tuple(vocabulary_of(text)[: len(SPECIALS)]) == SPECIALS
    assert len(vocabulary_of(text)) == ours.vocab_size


@pytest.mark.parametrize("kind", [BPETokenizer, CharTokenizer, WordTokenizer])
def test_the_end_token_in_a_document_is_text(kind: type, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    if kind is BPETokenizer:
        ours = BPETokenizer.train([TEXT] * 5, 600, 1, specials=DOCUMENT_SPECIALS)
    else:
        ours = build_vocabulary(kind.kind, kind.count(TEXT), None, 1, DOCUMENT_SPECIALS)
    for name, text in transformers_files(ours, 100).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    library, theirs = Model.from_str(tokenizer_json(ours)), transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = ours.encode(TEXT).tolist()
    assert library.encode(TEXT).ids == theirs(TEXT)["input_ids"] == ids
    assert theirs.eos_token_id == ours.document_end == 1
    assert 1 not in ids
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    again = PretrainedTokenizer.read(tmp_path)  # to train on from there
    assert again.document_end == 1
    for one in (again, pickle.loads(pickle.dumps(again))):
        assert one.encode(TEXT).tolist() == ids
        assert [found.tolist() for found in one.encode_lines([TEXT])] == [ids]


def test_greek_words_end_as_in_python() -> None:
    text = "ΟΔΟΣ Σ ΣΑΣ ΑΣ.Β ΑΣ' Α'Σ Α'Σ'Β 1Σ ΑΣ1 ΑΣ-Β ΑΣ\u0300Β ʰΣ ΣΣ ΑΣΣ ⅣΣ"
    ours = build_vocabulary("basic_english", WordTokenizer.count(text), None, 1, SPECIALS)
    assert Model.from_str(tokenizer_json(ours)).encode(text).ids == ours.encode_lines([text])[0].tolist()


def test_transformers_reads_a_tokenizer_file_as_it_is(tmp_path: Path) -> None:
    """Without the name of a class it would take Qwen's, which splits text differently."""
    transformers = pytest.importorskip("transformers")
    model = Model(models.BPE({"a": 0, "b": 1, "1": 2, "ab": 3, "11": 4}, [("a", "b"), ("1", "1")]))
    model.save(str(tmp_path / "tokenizer.json"))
    ours = PretrainedTokenizer.open(tmp_path / "tokenizer.json")
    for name, text in transformers_files(ours, 100).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs("ab11")["input_ids"] == ours.encode("ab11").tolist() == [3, 4]


@pytest.mark.parametrize("family", ["GPT2Tokenizer", "LlamaTokenizer"])
def test_transformers_reads_it_whatever_class_its_folder_names(family: str, tmp_path: Path) -> None:
    """A class of its own makes anew how texts are split."""
    transformers = pytest.importorskip("transformers")
    texts = ["a\n\n1. b  2", " a b", "  12  a"] * 30
    model = Model(models.BPE(byte_fallback=family == "LlamaTokenizer"))
    if family == "GPT2Tokenizer":
        digits = pre_tokenizers.Digits(individual_digits=True)
        model.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    else:
        model.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    alphabet = pre_tokenizers.ByteLevel.alphabet() if family == "GPT2Tokenizer" else []
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    model.train_from_iterator(texts, trainer)
    (tmp_path / "own").mkdir()
    model.save(str(tmp_path / "own/tokenizer.json"))
    config = {"tokenizer_class": family, "eos_token": "<|endoftext|>"}
    (tmp_path / "own/tokenizer_config.json").write_text(json.dumps(config))
    ours = PretrainedTokenizer.open(tmp_path / "own")
    for name, text in transformers_files(ours, 100).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in texts[:3]:
        assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode(text).tolist(), text
    assert theirs.eos_token_id == ours.document_end
