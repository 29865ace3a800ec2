"""tiktoken files and SentencePiece models have the token numbers of their libraries."""

import base64
import io
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiktoken_ext import openai_public
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from hvd_transformer.data.as_transformers_tokenizer import transformers_files
from hvd_transformer.data.pretrained_tokenizer import PretrainedTokenizer
from hvd_transformer.errors import UserError

SCRIPTS = """The quick brown fox — “jumps” over 13½ lazy dogs… It's WE'LL; 12345 #hash (code) {\treturn x[0]; }
Größe, Übermut, Straße; Ça va, naïveté, œuvre; ¿Qué pasó, señor? Příliš žluťoučký kůň úpěl ďábelské ódy.
Tiếng Việt: Trăm năm trong cõi người ta. Съешь же ещё этих мягких французских булок. Ξεσκεπάζω τὴν ψυχοφθόρα ᾅδης.
日本語では、ガギグゲゴとパピプペポ。ﾊﾝｶｸ ｶﾞｷﾞ　全角ＡＢＣ１２３ 中文：天地玄黄，宇宙洪荒。
한국어: 키스의 고유조건은 입술끼리 만나야 하고. العربيّة: نَصٌّ ؛ ١٢٣ עברית: בְּרֵאשִׁית हिन्दी: क़लम और किताब ไทย: น้ำใจ กำลัง
😀👩‍👩‍👧‍👦🏳️‍🌈🇩🇪 ✈️ ① Ⅳ ㎏ ﬁ ﬂ ™ № ℃ Å K 𝒳 ≠ ∑ x² + y₂ → ∞ zero\u200bwidth\u00adsoft\ufeffbom \u00a0 line \x00 nul
  leading and   many    spaces   """.splitlines()
FORMS = [lambda text, form=form: unicodedata.normalize(form, text) for form in ("NFC", "NFD", "NFKD")] + [str.upper]
TEXTS = ["", " ", "\n", *(form(text) for text in SCRIPTS for form in FORMS), "\n".join(SCRIPTS)]
ENGLISH = [f"The {noun} {verb} in the {noun}s, not {verb}ing." for noun in ("cat", "house") for verb in ("sat", "play")]


def spelled_bytes() -> dict[str, int]:
    """The byte of each character of byte-level vocabularies."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    """Byte pairs learned from all scripts."""
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    model.train_from_iterator([*TEXTS, *ENGLISH], trainer)
    byte_of = spelled_bytes()
    return {bytes(byte_of[letter] for letter in token): rank for token, rank in model.get_vocab().items()}


def write_ranks(path: Path, ranks: dict[bytes, int]) -> Path:
    lines = (
        base64.b64encode(token) + b" %d\n" % rank for token, rank in sorted(ranks.items(), key=lambda pair: pair[1])
    )
    path.write_bytes(b"".join(lines))
    return path


# The name of the file, tiktoken's encoding with its pattern, and the number of the end token.
NAMED = {
    "r50k_base": ("r50k_base", 50256),
    "cl100k_base": ("cl100k_base", 100257),
    "o200k_base": ("o200k_base", 199999),
}


@pytest.mark.parametrize("name", [*NAMED, "own"])
def test_a_tiktoken_file_has_the_numbers_of_tiktoken(
    name: str, ranks: dict[bytes, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_public, "load_tiktoken_bpe", lambda *_, **__: ranks)  # nothing is downloaded
    published, end = NAMED.get(name, ("cl100k_base", len(ranks)))
    found = getattr(openai_public, published)()
    theirs = tiktoken.Encoding("own", pat_str=found["pat_str"], mergeable_ranks=ranks, special_tokens={})
    ours = PretrainedTokenizer.open(write_ranks(tmp_path / f"{name}.tiktoken", ranks))

    @settings(deadline=None, max_examples=150)
    @given(st.text() | st.text("'sl dT\n\r\t.19é "))
    def any_text(text: str) -> None:
        assert ours.encode(text).tolist() == theirs.encode_ordinary(text)

    for text in TEXTS:
        assert ours.encode(text).tolist() == theirs.encode_ordinary(text), text
        assert ours.decode(ours.encode(text)) == text
    any_text()
    assert ours.document_end == end
    assert name == "own" or found["special_tokens"]["<|endoftext|>"] == end


KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "bytes": {"byte_fallback": True},
    "llama": {
        "byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False,
        "split_digits": True, "allow_whitespace_only_pieces": True,
    },
    "no prefix": {"add_dummy_prefix": False, "normalization_rule_name": "nfkc_cf"},
    "symbols": {"user_defined_symbols": ["<sep>", "@@"], "byte_fallback": True},
    "phrases": {"split_by_whitespace": False, "pad_id": 3},
}  # fmt: skip


def sentencepiece_model(path: Path, kind: str, **options: Any) -> Path:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*SCRIPTS, *ENGLISH * 9]), model_writer=model, model_type=kind, minloglevel=2,
        vocab_size=700, character_coverage=0.98, hard_vocab_limit=False, **options,
    )  # fmt: skip
    path.write_bytes(model.getvalue())
    return path


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
@pytest.mark.parametrize("name", KINDS)
def test_a_sentencepiece_model_has_the_numbers_of_sentencepiece(kind: str, name: str, tmp_path: Path) -> None:
    path = sentencepiece_model(tmp_path / "own.model", kind, **KINDS[name])
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(path))
    ours = PretrainedTokenizer.open(path)
    for text in [*TEXTS, *ENGLISH, "a <sep>b@@ @@c<sep>", *(["a <unk> b <0x41> c"] if kind == "bpe" else [])]:
        wanted = theirs.encode(text)
        assert ours.encode(text).tolist() == wanted, text
        if theirs.unk_id() not in wanted:
            assert ours.decode(wanted) == theirs.decode(wanted)
    exported = tmp_path / "exported"
    exported.mkdir()
    for file, content in transformers_files(ours, 100).items():
        (exported / file).write_text(content, encoding="utf-8")
    text = "a <unk> b"
    found = transformers.AutoTokenizer.from_pretrained(exported)(text, add_special_tokens=False)["input_ids"]
    assert found == ours.encode(text).tolist()
    assert ours.document_end == theirs.eos_id() == 2
    assert ours.own_pad == (3 if name == "phrases" else None)
    assert ours.vocab_size == theirs.vocab_size()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tiktoken", b"IQ== 0\nIg= 1\n", "line 2: must be a token in base64, a space and its rank"),
        ("a.tiktoken", b"IQ== 0\nIg== one\n", "line 2: must be a token in base64, a space and its rank"),
        ("a.tiktoken", b"IQ== 0\n", "has no token for the byte 0x00; a .tiktoken file has one for each byte"),
        ("a.model", b"no protocol buffer", "not a SentencePiece model"),
        ("a.model", b"", "not a SentencePiece model"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        PretrainedTokenizer.open(tmp_path / name)
    assert str(caught.value) == f"data.tokenizer={tmp_path / name}: {message}"


def test_other_kinds_of_sentencepiece_models_are_refused(tmp_path: Path) -> None:
    for kind, options in {"word": {}, "char": {}, "bpe": {"treat_whitespace_as_suffix": True}}.items():
        path = sentencepiece_model(tmp_path / f"{kind}.model", kind, **options)
        with pytest.raises(UserError, match="own|only SentencePiece models of the types unigram and bpe"):
            PretrainedTokenizer.open(path)
