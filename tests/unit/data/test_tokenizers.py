"""Tokenizers against torchtext's and Hugging Face's own, and there and back."""

import json
import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HuggingFaceTokenizer
from torchtext.data.utils import get_tokenizer
from torchtext.vocab import Vocab

from hvd_transformer.data import tokenizers
from hvd_transformer.data.load_tokenizer import load_tokenizer
from hvd_transformer.data.tokenizers import (
    BEGIN,
    DOCUMENT_SPECIALS,
    END,
    PAD,
    SPECIALS,
    BPETokenizer,
    CharTokenizer,
    WordTokenizer,
    build_vocabulary,
)
from hvd_transformer.errors import UserError

WIKITEXT = Path(__file__).parents[3].parent / "shared" / "data" / "wikitext-2"
SAMPLE = Path(json.__file__).read_text()
TEXTS = st.text(st.sampled_from("aAbz019 \n\t\r.,'\"<>br/()é\u00a0\u2028日😀Σ\x1c"), max_size=200)


@pytest.fixture(scope="module")
def bpe():
    return BPETokenizer.train([SAMPLE], 600, 1)


@pytest.mark.skipif(not WIKITEXT.is_dir(), reason=f"no WikiText-2 at {WIKITEXT}")
def test_basic_english_is_torchtexts_line_by_line_on_wikitext():
    split = get_tokenizer("basic_english")
    with (WIKITEXT / "valid.txt").open(encoding="utf-8") as file:
        reference = [word for line in file for word in split(line)]
    text = (WIKITEXT / "valid.txt").read_text(encoding="utf-8")
    tokenizer = build_vocabulary("basic_english", WordTokenizer.count(text), None, 1)
    ids = tokenizer.encode(text)
    vocabulary = Vocab(Counter(reference), specials=["<unk>"])
    assert ids.tolist() == [vocabulary.stoi[word] for word in reference]
    assert tokenizer.tokens == vocabulary.itos
    assert tokenizer.decode(ids) == " ".join(reference)


@given(text=TEXTS)
def test_basic_english_is_torchtexts_line_by_line(text):
    split = get_tokenizer("basic_english")
    reference = [word for line in text.split("\n") for word in split(line)]
    counts = WordTokenizer.count(text)
    assert counts == Counter(reference)
    tokenizer = WordTokenizer(["<unk>", *sorted(counts.keys() - {"<unk>"})])
    assert tokenizer.decode(tokenizer.encode(text)) == " ".join(reference)


@given(text=TEXTS)
def test_characters_there_and_back(text):
    assert CharTokenizer.count(text) == Counter(text)
    tokenizer = CharTokenizer(["<unk>", *sorted(set(text))])
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids.tolist() == [tokenizer.tokens.index(character) for character in text]


def test_unknown_is_zero():
    assert CharTokenizer(["<unk>", "a", "\n"]).encode("ab\n\ud800").tolist() == [1, 0, 2, 0]
    assert WordTokenizer(["<unk>", "a"]).encode("A b <unk>").tolist() == [1, 0, 0]


@pytest.mark.parametrize("kind", ["basic_english", "char", "bpe"])
def test_special_tokens_in_a_sentence_are_text(kind):
    """As tokens they would be masked as padding, or end a translation."""
    text = "a <pad> b </s><s>"
    if kind == "bpe":
        tokenizer = BPETokenizer.train([SAMPLE], 600, 1, sentences=True)
        assert tokenizer.decode(tokenizer.encode_lines([text])[0]) == f" {text}"
    else:
        count = {"basic_english": WordTokenizer.count, "char": CharTokenizer.count}[kind]
        tokenizer = build_vocabulary(kind, count(SAMPLE + text), None, 1, SPECIALS)
    for again in (tokenizer, pickle.loads(pickle.dumps(tokenizer))):
        assert not np.isin(again.encode_lines([text])[0], [PAD, BEGIN, END]).any()


@pytest.mark.parametrize("kind", ["basic_english", "char", "bpe"])
def test_the_end_token_in_a_document_is_text(kind: str) -> None:
    """As a token it would end the document there."""
    text = "a </s> b </s><unk>"
    if kind == "bpe":
        tokenizer = BPETokenizer.train([SAMPLE], 600, 1, specials=DOCUMENT_SPECIALS)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    else:
        count = {"basic_english": WordTokenizer.count, "char": CharTokenizer.count}[kind]
        tokenizer = build_vocabulary(kind, count(SAMPLE + text), None, 1, DOCUMENT_SPECIALS)
    for again in (tokenizer, pickle.loads(pickle.dumps(tokenizer))):
        assert again.document_end == 1
        assert 1 not in again.encode(text)
        assert not any(1 in ids for ids in again.encode_texts([text, "</s>"]))


def test_the_most_frequent_word_of_running_text_may_be_an_end_mark() -> None:
    tokenizer = build_vocabulary("basic_english", WordTokenizer.count("<s> a </s> <s> b </s>"), None, 1)
    assert tokenizer.tokens[:3] == ["<unk>", "</s>", "<s>"]
    assert tokenizer.encode("a </s>").tolist() == [3, 1]
    assert tokenizer.json_text == json.dumps({"kind": "basic_english", "tokens": tokenizer.tokens}, indent=0)


@pytest.mark.parametrize(
    ("vocab_size", "min_frequency", "tokens"),
    [
        (None, 1, ["<unk>", "b", "a", "c", "d"]),  # by falling frequency, then by code point
        (3, 1, ["<unk>", "b", "a"]),
        (None, 2, ["<unk>", "b", "a", "c"]),
        (9, 3, ["<unk>", "b"]),
    ],
)
def test_vocabulary_size_counts_unk(vocab_size, min_frequency, tokens):
    counts = Counter("bbbccaad")
    tokenizer = build_vocabulary("char", counts, vocab_size, min_frequency)
    assert tokenizer.tokens == tokens
    assert tokenizer.vocab_size == len(tokens)


def test_vocabulary_of_one():
    message = "data.min_frequency=4: leaves a vocabulary of nothing but <unk>; .* occurs 3 times"
    with pytest.raises(UserError, match=message):
        build_vocabulary("char", Counter("bbbccaad"), None, 4)


@settings(deadline=None)
@given(text=TEXTS)
def test_bpe_is_lossless_and_hugging_faces_own(bpe, text):
    ids = bpe.encode(text)
    assert bpe.decode(ids) == text
    reference = HuggingFaceTokenizer.from_str(bpe.json_text)
    assert ids.tolist() == reference.encode(text).ids


def test_bpe_of_a_long_text_is_hugging_faces_own(bpe):
    for text in (SAMPLE * 10, SAMPLE.replace("\n", " ") * 10, " \n" * 40000 + "a"):
        assert bpe.encode(text).tolist() == bpe.model.encode(text).ids


def test_bpe_vocabulary(bpe):
    assert bpe.vocab_size == 600
    assert bpe.model.token_to_id("<unk>") == 0
    assert bpe.encode("<unk>").tolist() == [0]
    assert BPETokenizer.train(["ab"], None, 1).vocab_size <= 259  # no more pairs than the text has


def test_bpe_training_is_the_same_in_every_process(bpe):
    script = (
        "import json, sys\nfrom pathlib import Path\n"
        "from hvd_transformer.data.tokenizers import BPETokenizer\n"
        "text = Path(json.__file__).read_text()\n"
        "sys.stdout.write(BPETokenizer.train([text], 600, 1).json_text)"
    )
    for threads in ("1", "3"):
        run = subprocess.run(
            [sys.executable, "-c", script],
            env={"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads},
            capture_output=True,
            text=True,
            check=True,
        )
        assert run.stdout == bpe.json_text


@pytest.mark.parametrize("kind", ["basic_english", "char", "bpe"])
def test_saved_and_loaded(tmp_path, bpe, kind):
    count = {"basic_english": WordTokenizer.count, "char": CharTokenizer.count}
    tokenizer = bpe if kind == "bpe" else build_vocabulary(kind, count[kind](SAMPLE), 50, 1)
    tokenizer.save(tmp_path)
    [path] = tmp_path.iterdir()
    assert path.name == ("tokenizer.json" if kind == "bpe" else "vocabulary.json")
    json.loads(path.read_text(encoding="utf-8"))
    for again in (load_tokenizer(tmp_path), pickle.loads(pickle.dumps(tokenizer))):
        assert again.kind == kind
        assert again.vocab_size == tokenizer.vocab_size
        assert again.json_text == tokenizer.json_text
        assert again.encode(SAMPLE).tolist() == tokenizer.encode(SAMPLE).tolist()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", "{}"),
        ("vocabulary.json", "[]"),
        ("vocabulary.json", '{"kind": "char", "tokens": ["a"]}'),
        ("vocabulary.json", '{"kind": "other", "tokens": ["<unk>", "a"]}'),
    ],
)
def test_damaged_tokenizer(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=f"{name}: not a valid tokenizer"):
        load_tokenizer(tmp_path)


def test_no_tokenizer(tmp_path):
    with pytest.raises(UserError, match="no tokenizer; it must hold tokenizer.json or vocabulary.json"):
        load_tokenizer(tmp_path)


def test_a_long_document_is_given_to_the_library_in_parts(bpe, monkeypatch) -> None:
    """Its encodings take more than a hundred times the memory of a text."""
    texts = ["a cat and\n\n a dog's 42 naïve days. " * 900, "", "short"]
    wanted = [ids.tolist() for ids in bpe.encode_texts(texts)]
    assert wanted == [bpe.model.encode(text, add_special_tokens=False).ids for text in texts]
    monkeypatch.setattr(tokenizers, "_AT_ONCE", 1000)
    monkeypatch.setattr(tokenizers, "_PART_CHARACTERS", 500)
    sizes: list[int] = []
    real = bpe.model

    class Watched:
        def encode_batch_fast(self, texts, **options):
            sizes.append(sum(map(len, texts)))
            return real.encode_batch_fast(texts, **options)

    monkeypatch.setattr(bpe, "model", Watched())
    assert [ids.tolist() for ids in bpe.encode_texts(texts)] == wanted
    assert [ids.tolist() for ids in bpe.encode_lines(["a b"] * 900)] == [real.encode("a b").ids] * 900
    assert max(sizes) < 2000 and len(sizes) > 20
