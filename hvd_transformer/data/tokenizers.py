"""Tokenizers, from text to token numbers and back: basic_english words, characters, byte-level BPE."""

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from hvd_transformer.data.build_once import ShouldStop
from hvd_transformer.data.in_thread import computing
from hvd_transformer.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as HuggingFaceTokenizer

UNKNOWN = "<unk>"  # always token 0
# The first tokens of tokenizers for sentences: <pad> fills a batch, <s> begins a target and </s> ends it.
SPECIALS = (UNKNOWN, "<pad>", "<s>", "</s>")
PAD, BEGIN, END = range(1, 4)
DOCUMENT_END = "</s>"  # token 1 of a tokenizer that is learned from documents
DOCUMENT_SPECIALS = (UNKNOWN, DOCUMENT_END)
BPE_VOCAB_SIZE = 4096
Ids = NDArray[np.uint32]

# The byte-pair pattern never joins a character with the white space after it: cutting there changes no token.
_PART_END = re.compile(r"(?<=\S)(?=[ \n])")
_PART_CHARACTERS = 2**14
_AT_ONCE = 2**20  # characters that are given to the library at once

# What torchtext's basic_english replaces in lower-case text before it splits at white space, in this order.
BASIC_ENGLISH = {
    "'": " ' ", '"': "", ".": " . ", "<br />": " ", ",": " , ", "(": " ( ", ")": " ) ", "!": " ! ", "?": " ? ",
    ";": " ", ":": " ",
}  # fmt: skip


class Tokenizer(ABC):
    """A fixed vocabulary, `<unk>` first. Pickled as its class and its JSON text."""

    kind: ClassVar[str]
    file_name: ClassVar[str]

    @property
    @abstractmethod
    def vocab_size(self) -> int: ...

    @property
    def pad(self) -> int:
        """The token number that fills a batch of sentences."""
        return PAD

    @abstractmethod
    def encode(self, text: str) -> Ids:
        """The token numbers of a text (T,)."""

    def encode_lines(self, lines: Sequence[str]) -> list[Ids]:
        """The token numbers of each line (T,)."""
        return [self.encode(line) for line in lines]

    def encode_texts(self, texts: Sequence[str]) -> list[Ids]:
        """The token numbers of each text (T,), without special tokens."""
        return [self.encode(text) for text in texts]

    @property
    def document_end(self) -> int | None:
        """The token number that ends a document, if there is one."""
        return None

    def shorten(self, ids: Ids, limit: int) -> Ids:
        """Truncate the tokens of a line to at most `limit`."""
        return ids[:limit]

    def decode_line(self, ids: Iterable[int]) -> str:
        """The text of a sentence, without padding, beginning and end."""
        return self.decode(number for number in ids if not PAD <= number <= END).strip()

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text: exact for byte pairs and known characters; words joined by spaces for basic_english."""

    @property
    @abstractmethod
    def json_text(self) -> str:
        """The complete tokenizer as JSON; equal vocabularies give equal texts."""

    @classmethod
    @abstractmethod
    def from_json(cls, text: str) -> "Tokenizer":
        """Rebuild the tokenizer from its `json_text`. Raises an exception of any kind if the text is damaged."""

    @cached_property
    def digest(self) -> str:
        """Equal for tokenizers that give the same numbers."""
        return sha256(self.json_text)

    def files(self) -> dict[str, str]:
        """The files that keep it: texts by file name."""
        return {self.file_name: self.json_text}

    def save(self, folder: Path, prefix: str = "") -> None:
        """Write its files, with `prefix` before their names."""
        for name, text in self.files().items():
            (folder / f"{prefix}{name}").write_text(text, encoding="utf-8")

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.json_text)


@lru_cache(maxsize=2)  # a worker process that encodes many pieces builds the tables once
def _rebuild(kind: type[Tokenizer], text: str) -> Tokenizer:
    return kind.from_json(text)


class VocabularyTokenizer(Tokenizer):
    """A tokenizer whose tokens are words or characters, each with a number.

    `ends_documents`: token 1 is the end of a document. Without it, `</s>` may be the most frequent word of a text.
    """

    file_name = "vocabulary.json"
    separator: ClassVar[str]  # between decoded tokens

    def __init__(self, tokens: Sequence[str], ends_documents: bool = False) -> None:
        self.tokens, self.ends_documents = list(tokens), ends_documents

    @property
    def vocab_size(self) -> int:
        return len(self.tokens)

    @cached_property
    def json_text(self) -> str:
        found: dict[str, Any] = {"kind": self.kind, "tokens": self.tokens}
        more = {"ends_documents": True} if self.ends_documents else {}  # others are as before there was such a key
        return json.dumps(found | more, ensure_ascii=False, indent=0)

    @classmethod
    def from_json(cls, text: str) -> "VocabularyTokenizer":
        found = json.loads(text)
        tokens = found["tokens"]
        if not tokens or tokens[0] != UNKNOWN or not all(isinstance(token, str) for token in tokens):
            raise ValueError(f"its tokens must be a list of strings, {UNKNOWN} first")
        return cls(tokens, bool(found.get("ends_documents")))

    @property
    def document_end(self) -> int | None:
        first = self.tokens[: len(SPECIALS)]
        return first.index(DOCUMENT_END) if DOCUMENT_END in first else None

    def decode(self, ids: Iterable[int]) -> str:
        return self.separator.join(self.tokens[number] for number in ids)

    @staticmethod
    @abstractmethod
    def count(text: str) -> Counter[str]:
        """The number of occurrences of each token."""


class WordTokenizer(VocabularyTokenizer):
    """torchtext's basic_english, applied line by line; line ends are not tokens."""

    kind = "basic_english"
    separator = " "

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Token → token number. "<pad>" in a sentence is an unknown word: its own token would be taken for padding. So
        is "</s>" in a document, which would end there."""
        found = {token: number for number, token in enumerate(self.tokens)}
        if tuple(self.tokens[: len(SPECIALS)]) == SPECIALS:
            for special in SPECIALS[PAD:]:
                del found[special]
        elif self.ends_documents:
            del found[DOCUMENT_END]
        return found

    def encode(self, text: str) -> Ids:
        get = self.numbers.get
        words = _words(text)
        return np.fromiter(map(get, words, repeat(0)), np.uint32, len(words))

    @staticmethod
    def count(text: str) -> Counter[str]:
        return Counter(_words(text))


class CharTokenizer(VocabularyTokenizer):
    """Single characters, including line feeds."""

    kind = "char"
    separator = ""

    @cached_property
    def _table(self) -> Ids:
        """Code point → token number."""
        table = np.zeros(0x110000, np.uint32)
        for number, character in enumerate(self.tokens):
            if len(character) == 1:  # no special token
                table[ord(character)] = number
        return table

    def encode(self, text: str) -> Ids:
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
        return np.take(self._table, codes)

    @staticmethod
    def count(text: str) -> Counter[str]:
        return Counter(text)


class BPETokenizer(Tokenizer):
    """Byte-level byte-pair encoding by Hugging Face's tokenizers. Decoding restores every text exactly."""

    kind = "bpe"
    file_name = "tokenizer.json"

    def __init__(self, model: "HuggingFaceTokenizer") -> None:
        self.model = model
        # In a sentence "<pad>" is text: it would be taken for padding. So is "</s>" in a document, which would end.
        if model.token_to_id(SPECIALS[PAD]) == PAD or model.token_to_id(DOCUMENT_END) == 1:
            model.encode_special_tokens = True

    @property
    def vocab_size(self) -> int:
        return int(self.model.get_vocab_size())

    def encode(self, text: str) -> Ids:
        arrays = list(encode_all(self.model, _parts(text)))
        return np.concatenate(arrays) if arrays else np.empty(0, np.uint32)

    def encode_lines(self, lines: Sequence[str]) -> list[Ids]:
        return list(encode_all(self.model, lines))

    def encode_texts(self, texts: Sequence[str]) -> list[Ids]:
        if max(map(len, texts), default=0) <= _AT_ONCE:
            return self.encode_lines(texts)
        return [self.encode(text) for text in texts]

    @property
    def document_end(self) -> int | None:
        found = self.model.token_to_id(DOCUMENT_END)
        return None if found is None else int(found)

    def decode(self, ids: Iterable[int]) -> str:
        return str(self.model.decode([int(number) for number in ids], skip_special_tokens=False))

    @cached_property
    def json_text(self) -> str:
        return str(self.model.to_str())

    @classmethod
    def from_json(cls, text: str) -> "BPETokenizer":
        from tokenizers import Tokenizer as Model

        return cls(Model.from_str(text))

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        vocab_size: int | None,
        min_frequency: int,
        *,
        sentences: bool = False,
        specials: Sequence[str] = (UNKNOWN,),
        should_stop: ShouldStop = lambda: False,
    ) -> "BPETokenizer":
        """Learn the merges from texts that are read one by one; memory holds only the distinct words.

        The first word of `sentences` is treated like the others, and the vocabulary has the `SPECIALS`; otherwise it
        begins with `specials`.

        Raises `Stopped` on request.
        """
        from tokenizers import Tokenizer as Model
        from tokenizers import decoders, models, pre_tokenizers, trainers

        model = Model(models.BPE())
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=sentences)
        model.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size or BPE_VOCAB_SIZE,
            min_frequency=min_frequency,
            special_tokens=list(SPECIALS if sentences else specials),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        parts = texts if sentences else (part for text in texts for part in _parts(text))
        computing(lambda: model.train_from_iterator(parts, trainer), should_stop)
        return cls(model)


def encode_all(model: "HuggingFaceTokenizer", texts: Iterable[str]) -> Iterator[Ids]:
    """The token numbers of each text, without special tokens; not all at once, as the library's encodings take more
    than a hundred times the memory of the texts."""
    some, size = list[str](), 0
    for text in chain(texts, [None]):
        if text is not None:
            some.append(text)
            size += len(text)
        if some and (text is None or size >= _AT_ONCE):
            for encoding in model.encode_batch_fast(some, add_special_tokens=False):
                yield np.array(encoding.ids, np.uint32)
            some, size = [], 0


VOCABULARY_KINDS: dict[str, type[VocabularyTokenizer]] = {kind.kind: kind for kind in (WordTokenizer, CharTokenizer)}


def build_vocabulary(
    kind: str,
    counts: Counter[str],
    vocab_size: int | None,
    min_frequency: int,
    specials: Sequence[str] = (UNKNOWN,),
) -> VocabularyTokenizer:
    """The vocabulary that torchtext builds from the counts: by decreasing frequency, then by code point.

    Raises `UserError` if nothing but the specials is left.
    """
    found = sorted(token for token, count in counts.items() if count >= max(1, min_frequency) and token not in specials)
    found.sort(key=counts.__getitem__, reverse=True)  # stable
    tokens = [*specials, *found][: None if vocab_size is None else max(vocab_size, len(specials))]
    if len(tokens) <= len(specials):
        raise UserError(
            f"data.min_frequency={min_frequency}: leaves a vocabulary of nothing but {', '.join(specials)}; the most "
            f"frequent token of the training split occurs {max(counts.values(), default=0)} times"
        )
    # Character vocabularies need no mark: `</s>` is no character.
    ends_documents = kind == WordTokenizer.kind and tuple(specials) == DOCUMENT_SPECIALS
    return VOCABULARY_KINDS[kind](tokens, ends_documents)


def sha256(text: str) -> str:
    """The SHA-256 of a text, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def _words(text: str) -> list[str]:
    """The tokens of torchtext's basic_english, line after line, by plain replacements of the whole text: in less than
    half of the time of its regular expressions."""
    text = text.lower()
    for mark, replacement in BASIC_ENGLISH.items():
        text = text.replace(mark, replacement)
    return text.split()


def _parts(text: str) -> Iterator[str]:
    """Cut a text into parts of some thousand characters; their tokens are those of the whole text."""
    start = 0
    while start < len(text):
        found = _PART_END.search(text, min(start + _PART_CHARACTERS, len(text)))
        end = found.start() if found else len(text)
        yield text[start:end]
        start = end
