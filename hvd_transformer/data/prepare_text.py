"""Prepare token files once per cache; those of running text are cut into pieces, counted and encoded.

```
<cache_dir>/prepared/<name>-<digest of the source and of every setting that matters>/
    tokenizer.json or vocabulary.json
    train.bin  valid.bin  test.bin      token numbers, 16 or 32 bit, little endian
    index.json                          number format, counts, checksums, settings
```
"""

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hvd_transformer.config.schema import DataConfig
from hvd_transformer.data.build_once import PrepareContext, Stopped, build_once
from hvd_transformer.data.load_tokenizer import load_tokenizer
from hvd_transformer.data.prepared import INDEX, PreparedData, TokenWriter, read_corpus, token_dtype
from hvd_transformer.data.text_corpus import Corpus
from hvd_transformer.data.text_files import PIECE_BYTES, Piece, TextSpan, read_pieces
from hvd_transformer.data.tokenizers import (
    DOCUMENT_END,
    UNKNOWN,
    VOCABULARY_KINDS,
    BPETokenizer,
    Tokenizer,
    WordTokenizer,
    build_vocabulary,
    sha256,
)
from hvd_transformer.data.words import WordEncoder, count_words, is_native
from hvd_transformer.errors import UserError

FORMAT = 1  # of a prepared corpus; another number prepares all of them anew
REPORT_SECONDS = 10.0
LEAST_PIECE = 2**12  # bytes of a sample's pieces, at least
Prepared = TypeVar("Prepared")
Item = TypeVar("Item")
Encode = Callable[[Iterable[Piece]], Iterator[NDArray[Any]]]  # to the token numbers of each piece or part of it (T,)


def prepare_folder(
    config: DataConfig,
    name: str,
    settings: dict[str, Any],
    write: Callable[[Path], dict[str, Any]],
    read: Callable[[Path, dict[str, Any]], Prepared | None],
    context: PrepareContext,
) -> Prepared:
    """Prepare the folder of these settings unless it exists, and read it.

    `settings` are all that the folder depends on, with the format of its files: another value gives another folder.
    `write(aside)` writes all files
    but the index and returns the index, which must not mention paths. Raises `UserError` and `Stopped`.
    """
    key = sha256(json.dumps(settings, sort_keys=True))[:12]
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-")[:60] or "text"
    folder = Path(config.cache_dir).expanduser().absolute() / "prepared" / f"{stem}-{key}"

    def load(folder: Path) -> Prepared | None:
        try:
            return read(folder, json.loads((folder / INDEX).read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, UserError):
            return None

    def build(aside: Path) -> None:
        if folder.exists():
            context.report(f"{folder} is damaged: preparing it again")
        index = write(aside)
        index["digest"] = sha256(json.dumps(index, sort_keys=True))  # without the paths, which differ between hosts
        index["settings"] = {"source": config.source, **settings}
        (aside / INDEX).write_text(json.dumps(index, indent=2, ensure_ascii=False), encoding="utf-8")

    return build_once(folder, load, build, context.should_stop)


def tokenizer_settings(config: DataConfig, train_bytes: int) -> dict[str, Any]:
    """The settings that a learned tokenizer depends on, besides at most so many bytes of text."""
    found = {key: getattr(config, key) for key in ("tokenizer", "vocab_size", "min_frequency")}
    sample = sample_bytes(config, train_bytes)
    return found if sample is None else {**found, "tokenizer_sample_mb": config.tokenizer_sample_mb}


def sample_bytes(config: DataConfig, train_bytes: int) -> int | None:
    """The bytes of text to learn from, of so many; None: all."""
    if config.tokenizer != BPETokenizer.kind or config.tokenizer_sample_mb is None:
        return None
    limit = int(config.tokenizer_sample_mb * 2**20)
    return limit if limit < train_bytes else None


def evenly(items: Iterable[Item], size: Callable[[Item], int], share: float) -> Iterator[Item]:
    """About this share of the items by their size, spread evenly over all of them; always the same ones."""
    seen = taken = 0
    for item in items:
        if taken <= share * seen:
            taken += size(item)
            yield item
        seen += size(item)


def report_sample(context: PrepareContext, name: str, sample: int, whole: int) -> None:
    """Tell how much of the training split's text byte pairs are learned from, in bytes."""
    context.report(
        f"{name}: byte pairs are learned from {sample / 2**20:.1f} of {whole / 2**20:.1f} MiB, spread over the "
        "training split (data.tokenizer_sample_mb)"
    )


def total(counts: Iterable[Counter[str]]) -> Counter[str]:
    """The sum of all counts."""
    result: Counter[str] = Counter()
    for part in counts:
        result.update(part)
    return result


def prepare_corpus(
    config: DataConfig, corpus: Corpus, tokenizer: Tokenizer | None, context: PrepareContext
) -> PreparedData:
    """The corpus as token files, prepared now unless they exist. Without a `tokenizer` one is learned from the training
    split.

    Memory is bounded by a few pieces of text and the counts of the vocabulary. Several processes may call this at once:
    one prepares, the others wait. Raises `UserError` if the data cannot be used, `Stopped` on request.
    """
    own = tokenizer_settings(config, corpus.train_bytes) if tokenizer is None else {"tokenizer": tokenizer.digest}
    settings = {"format": FORMAT, "corpus": corpus.identity, **own}
    write = _TextWriter(config, corpus, tokenizer, context).write
    return prepare_folder(config, corpus.name, settings, write, read_corpus, context)


def learn_tokenizer(config: DataConfig, corpora: Sequence[Corpus], context: PrepareContext) -> Tokenizer:
    """One tokenizer for several corpora, learned from all their training splits now unless it exists.

    Raises as `prepare_corpus`.
    """
    own = tokenizer_settings(config, sum(corpus.train_bytes for corpus in corpora))
    settings = {"format": FORMAT, "corpora": [corpus.identity for corpus in corpora], **own}

    def write(folder: Path) -> dict[str, Any]:
        context.report(f"Learning one tokenizer {config.tokenizer} for {', '.join(corpus.name for corpus in corpora)}")
        first, *others = (_TextWriter(config, corpus, None, context) for corpus in corpora)
        tokenizer = first.learn_tokenizer(others)
        tokenizer.save(folder)
        return {"format": FORMAT, "tokenizer": tokenizer.digest}

    def read(folder: Path, index: dict[str, Any]) -> Tokenizer | None:
        tokenizer = load_tokenizer(folder)
        return tokenizer if tokenizer.digest == index["tokenizer"] else None

    return prepare_folder(config, "mixture", settings, write, read, context)


@dataclass(frozen=True)
class _TextWriter:
    config: DataConfig
    corpus: Corpus
    tokenizer: Tokenizer | None
    context: PrepareContext

    def write(self, folder: Path) -> dict[str, Any]:
        self.context.report(f"Preparing {self.corpus.name}: {self._size / 1e6:.1f} MB of text, tokenizer {self._kind}")
        tokenizer = self.tokenizer or self.learn_tokenizer()
        if self._has_documents and tokenizer.document_end is None:
            raise UserError(
                f"data.source={self.config.source}: documents need a tokenizer with an end-of-sequence token "
                "(eos_token in its tokenizer_config.json)"
            )
        tokenizer.save(folder)
        dtype = token_dtype(tokenizer.vocab_size)
        encode = self._encoder(tokenizer, dtype)
        return {
            "format": FORMAT,
            "dtype": dtype,
            "vocab_size": tokenizer.vocab_size,
            "tokenizer": {"kind": tokenizer.kind, "file": tokenizer.file_name, "sha256": tokenizer.digest},
            "splits": {
                split: self._write_split(TokenWriter(folder, split, dtype), split, span, encode)
                for split, span in self.corpus.splits.items()
            },
        }

    def learn_tokenizer(self, others: Sequence["_TextWriter"] = ()) -> Tokenizer:
        """Learn from this training split, and those of `others`."""
        config, writers = self.config, (self, *others)
        has_documents = any(writer._has_documents for writer in writers)
        specials = (UNKNOWN, DOCUMENT_END) if has_documents else (UNKNOWN,)
        if config.tokenizer == BPETokenizer.kind:
            whole = sum(writer._train.size for writer in writers)
            texts = (text for writer in writers for piece in writer._sample(whole) for text in piece.texts())
            return BPETokenizer.train(
                texts,
                config.vocab_size,
                config.min_frequency,
                specials=specials,
                should_stop=self.context.should_stop,
            )
        pieces = chain.from_iterable(writer._pieces(writer._train, "counting tokens") for writer in writers)
        if all(writer._is_native for writer in writers):
            counts = count_words(self._libraries, self.context.thread_map, pieces)
        else:
            counts = total(self.context.map(partial(_count, config.tokenizer), pieces))
        if not counts:
            raise UserError(f"{self._train.path}: the train split has no token; it must hold text")
        return build_vocabulary(config.tokenizer, counts, config.vocab_size, config.min_frequency, specials)

    def _sample(self, whole: int) -> Iterator[Piece]:
        """What byte pairs are learned from, of `whole` bytes: all of this corpus, or small pieces from everywhere."""
        span, phase, sample = self._train, "learning byte pairs", sample_bytes(self.config, whole)
        if sample is None:
            return self._pieces(span, phase)
        report_sample(self.context, self.corpus.name, sample * span.size // whole, span.size)
        pieces = self._pieces(span, phase, min(PIECE_BYTES, max(LEAST_PIECE, sample // 256)))
        return evenly(pieces, lambda piece: len(piece.data), sample / whole)

    def _write_split(self, file: TokenWriter, split: str, span: TextSpan, encode: Encode) -> dict[str, Any]:
        """Write the tokens of a split piece by piece; return its entry in the index."""
        for tokens in encode(self._pieces(span, f"encoding {split}")):
            file.add(tokens)
        if not file.count:
            raise UserError(f"{span.path}: the {split} split has no token; it must hold text")
        entry = file.close()
        return {"tokens": entry["count"], "sha256": entry["sha256"]}

    def _encoder(self, tokenizer: Tokenizer, dtype: str) -> Encode:
        if isinstance(tokenizer, WordTokenizer) and self._is_native:
            return partial(WordEncoder(self._libraries, tokenizer, dtype).encode, self.context.thread_map)
        return partial(self.context.map, partial(_encode, tokenizer, dtype))

    @property
    def _libraries(self) -> Path:
        return Path(self.config.cache_dir).expanduser().absolute() / "kernels"

    @cached_property
    def _is_native(self) -> bool:
        """Whether native code counts and encodes."""
        if self._has_documents or self._kind != WordTokenizer.kind:
            return False
        return is_native(self._libraries, self._size, self.context.report)

    @property
    def _train(self) -> TextSpan:
        return self.corpus.splits["train"]

    @property
    def _has_documents(self) -> bool:
        return any(span.column is not None for span in self.corpus.splits.values())

    @property
    def _size(self) -> int:
        return sum(span.size for span in self.corpus.splits.values())

    @property
    def _kind(self) -> str:
        return self.tokenizer.kind if self.tokenizer else self.config.tokenizer

    def _pieces(self, span: TextSpan, phase: str, piece_bytes: int | None = None) -> Iterator[Piece]:
        """The pieces of the span; reports the progress every ten seconds."""
        reported = time.monotonic()
        for piece in read_pieces(span, piece_bytes or PIECE_BYTES):
            if self.context.should_stop():
                raise Stopped
            if time.monotonic() - reported > REPORT_SECONDS:
                reported = time.monotonic()
                done = 100 * (piece.start - span.start) / span.size
                self.context.report(f"{self.corpus.name}: {phase}, {done:.0f} %")
            yield piece


def _count(kind: str, piece: Piece) -> Counter[str]:
    return total(map(VOCABULARY_KINDS[kind].count, piece.texts()))


def _encode(tokenizer: Tokenizer, dtype: str, piece: Piece) -> NDArray[np.unsignedinteger[Any]]:
    if piece.column is None:
        return tokenizer.encode(piece.text()).astype(dtype)
    end = np.array([tokenizer.document_end])
    rows = [row for ids in tokenizer.encode_texts(list(piece.texts())) for row in (ids, end)]
    return np.concatenate(rows).astype(dtype) if rows else np.empty(0, dtype)
