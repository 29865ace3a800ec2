"""Tokenizers of other libraries as `tokenizers` has them: tiktoken's files of ranks, and SentencePiece's models.

The token numbers are those of the library that the file belongs to.
"""

import base64
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from hvd_transformer.errors import UserError, missing_extra

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Piece = TypeVar("Piece", str, bytes)


class Converted(NamedTuple):
    """A tokenizer, and its special tokens as tokenizer_config.json has them, such as {"eos_token": "</s>"}."""

    tokenizer: "Tokenizer"
    special: dict[str, str]


def convert(path: Path, given: str) -> Converted | None:
    """The tokenizer of a .tiktoken or .model file; None for a path with another ending.

    Raises `UserError`, which begins with `given`, if it cannot be read or converted, and `OSError`.
    """
    if path.suffix == ".tiktoken":
        return _from_tiktoken(path, given)
    return _from_sentencepiece(path, given) if path.suffix == ".model" else None


# tiktoken's patterns, which cut a text into words. Its own use possessive quantifiers, which match the same faster.
_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+\z|\s*[\r\n]"
    r"|\s+(?!\S)|\s"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDS}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDS}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# By the name of a published file: its pattern, and the number of its end token. The file itself has neither.
_PUBLISHED = {
    "r50k_base": (_GPT2, 50256),
    "p50k_base": (_GPT2, 50256),
    "cl100k_base": (_CL100K, 100257),
    "o200k_base": (_O200K, 199999),
}
_END = "<|endoftext|>"


def _from_tiktoken(path: Path, given: str) -> Converted:
    """Byte-level byte pairs: each line of the file is a token in base64 and its rank."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise UserError(f"{given}: line {number}: must be a token in base64, a space and its rank") from None
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise UserError(f"{given}: has no token for the byte {missing[0]:#04x}; a .tiktoken file has one for each byte")
    pattern, end = _PUBLISHED.get(path.stem, (_CL100K, 1 + max(ranks.values())))
    letters = _byte_letters()
    spelled = {token: "".join(letters[byte] for byte in token) for token in ranks}
    vocabulary = {spelled[token]: rank for token, rank in ranks.items()} | {_END: end}
    ordered = sorted(ranks, key=ranks.__getitem__)
    merges = [(spelled[left], spelled[right]) for left, right in _merges(ordered, ranks)]
    # tiktoken looks for the whole word first.
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_END])
    return Converted(tokenizer, {"eos_token": _END})


def _byte_letters() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies (GPT-2): itself if it is printable Latin-1,
    else one of those from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _merges(ordered: Sequence[Piece], numbers: Mapping[Piece, int]) -> Iterator[tuple[Piece, Piece]]:
    """All pairs of pieces that make a piece, those of the first piece of `ordered` first."""
    for piece in ordered:
        cuts = ((piece[:place], piece[place:]) for place in range(1, len(piece)))
        pairs = [(left, right) for left, right in cuts if left in numbers and right in numbers]
        yield from sorted(pairs, key=lambda pair: (numbers[pair[0]], numbers[pair[1]]))


# The types of pieces and models in sentencepiece_model.proto.
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_UNIGRAM, _BPE = 1, 2
_SPACE = "▁"


def _from_sentencepiece(path: Path, given: str) -> Converted:
    from tokenizers import AddedToken, Regex, decoders, pre_tokenizers

    proto, processor = _read_sentencepiece(path, given)
    trainer, prefix = proto.trainer_spec, proto.normalizer_spec.add_dummy_prefix
    if trainer.model_type not in (_UNIGRAM, _BPE) or trainer.treat_whitespace_as_suffix:
        raise UserError(f"{given}: only SentencePiece models of the types unigram and bpe, with spaces before words")
    tokenizer = (_unigram if trainer.model_type == _UNIGRAM else _bpe)(proto, processor.unk_id())
    tokenizer.normalizer = _normalizer(proto.normalizer_spec)
    # Words are encoded one by one, unless a piece spans several.
    several = any(_SPACE in piece.piece[1:] for piece in proto.pieces)
    words: list[Any] = [pre_tokenizers.Metaspace(_SPACE, "never", not several)]
    if trainer.model_type == _BPE and (own := _pieces(proto, _USER_DEFINED)):
        longest_first = sorted(own, key=len, reverse=True)
        words.insert(0, pre_tokenizers.Split(Regex("|".join(map(re.escape, longest_first))), "isolated"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(words)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        + ([decoders.Strip(" ", 1, 0)] if prefix else [])
    )
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False) for piece in _pieces(proto, _CONTROL)])
    _compare(tokenizer, processor, proto, given)
    # No unk_token: transformers would find it in texts.
    kinds = {"bos": processor.bos_id(), "eos": processor.eos_id(), "pad": processor.pad_id()}
    special = {f"{kind}_token": processor.id_to_piece(number) for kind, number in kinds.items() if number >= 0}
    return Converted(tokenizer, special)


def _pieces(proto: Any, *types: int) -> dict[str, float]:
    """The pieces of these types and their scores."""
    return {piece.piece: piece.score for piece in proto.pieces if piece.type in types}


def _unigram(proto: Any, unknown: int) -> "Tokenizer":
    from tokenizers import Tokenizer, models

    # As in SentencePiece, symbols of the user win over all other pieces.
    highest = max(_pieces(proto, _NORMAL).values(), default=0.0)
    scores = [
        (piece.piece, len(piece.piece.encode()) * highest - 0.1 if piece.type == _USER_DEFINED else piece.score)
        for piece in proto.pieces
    ]
    return Tokenizer(models.Unigram(scores, unknown, proto.trainer_spec.byte_fallback))


def _bpe(proto: Any, unknown: int) -> "Tokenizer":
    from tokenizers import Tokenizer, models

    numbers = {piece.piece: number for number, piece in enumerate(proto.pieces)}
    scores = _pieces(proto, _NORMAL, _UNUSED)
    ordered = sorted(scores, key=scores.__getitem__, reverse=True)
    model = models.BPE(
        numbers,
        list(_merges(ordered, {piece: numbers[piece] for piece in scores})),
        unk_token=proto.pieces[unknown].piece,
        fuse_unk=True,
        byte_fallback=proto.trainer_spec.byte_fallback,
        # No merge makes a symbol of the user: it is a word by itself.
        ignore_merges=bool(_pieces(proto, _USER_DEFINED)),
    )
    return Tokenizer(model)


def _normalizer(spec: Any) -> Any:
    """What SentencePiece does with a text first: its table of characters, spaces, and ▁ for spaces."""
    from tokenizers import Regex, normalizers

    steps: list[Any] = []
    if spec.precompiled_charsmap:
        # Precompiled leaves some sequences decomposed, such as Hangul in jamo, which SentencePiece composes.
        composed = [normalizers.NFC()] if "nfkc" in spec.name else []
        steps += [*composed, normalizers.Precompiled(spec.precompiled_charsmap), *composed]
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(_SPACE))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])


def _read_sentencepiece(path: Path, given: str) -> tuple[Any, Any]:
    """The model as its protocol buffer, and as the library's `SentencePieceProcessor`."""
    content = path.read_bytes()
    try:
        from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2
    except ImportError:
        raise missing_extra(given, "sentencepiece", "sentencepiece") from None
    try:
        proto, processor = sentencepiece_model_pb2.ModelProto.FromString(content), SentencePieceProcessor()
        processor.LoadFromSerializedProto(content)
        return proto, processor
    except Exception:  # both libraries have types of their own
        raise UserError(f"{given}: not a SentencePiece model") from None


_PROBES = (
    "",
    " ",
    "  Two  spaces ",
    "a\tb\nc",
    "ÀÉ \ufb01 ½ \uff76\uff9e … “x”",
    "e\u0301 한국어 \u1112\u1161\u11ab 日本語 ไทย हिन्दी العربية",
    "🤗👩\u200d👧 \u200b\ufeff \U0001d4b3",
)
_PROBED_PIECES = 3000


def _compare(tokenizer: "Tokenizer", processor: Any, proto: Any, given: str) -> None:
    """Refuse a model that would have other token numbers than in its library: of its own pieces, or of some texts."""
    pieces = islice(_pieces(proto, _NORMAL, _USER_DEFINED), _PROBED_PIECES)
    for text in (*_PROBES, *(piece.replace(_SPACE, " ") for piece in pieces)):
        if tokenizer.encode(text, add_special_tokens=False).ids != processor.encode(text):
            raise UserError(f"{given}: cannot be converted: {text!r} would have other token numbers")
