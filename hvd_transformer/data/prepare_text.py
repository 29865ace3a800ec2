"""Prepare token files of running text and documents once per cache: cut into pieces, counted and encoded.

```
<cache_dir>/prepared/<name>-<digest of the source and of every setting that matters>/
    tokenizer.json or vocabulary.json
    train.bin  valid.bin  test.bin      token numbers, 16 or 32 bit, little endian
    index.json                          number format, counts, checksums, settings
```
"""

import errno
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hvd_transformer.config.schema import DataConfig
from hvd_transformer.data.build_once import PrepareContext, Stopped
from hvd_transformer.data.parquet import Rows
from hvd_transformer.data.prepare_folder import prepare_folder
from hvd_transformer.data.prepared import PreparedData, read_corpus, token_dtype
from hvd_transformer.data.progress import BEGIN, Place, Progress
from hvd_transformer.data.shards import change, check_shards, cut_splits, read_pieces, text_bytes
from hvd_transformer.data.text_corpus import Corpus
from hvd_transformer.data.text_files import PIECE_BYTES, Piece, TextSpan
from hvd_transformer.data.token_corpus import TokenCorpus, prepare_tokens
from hvd_transformer.data.tokenizers import (
    DOCUMENT_END,
    UNKNOWN,
    VOCABULARY_KINDS,
    BPETokenizer,
    Tokenizer,
    WordTokenizer,
    build_vocabulary,
)
from hvd_transformer.data.words import WordEncoder, count_words, is_native, parts
from hvd_transformer.errors import UserError

FORMAT = 1  # of a prepared corpus; another number prepares all of them anew
REPORT_SECONDS = 10.0
LEAST_PIECE = 2**12  # bytes of a sample's pieces, at least
SAVED_BYTES = 64 * 2**20  # of text: a kill loses no more work
Item = TypeVar("Item")
Spans = tuple[TextSpan, ...]


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
    config: DataConfig, corpus: Corpus | TokenCorpus, tokenizer: Tokenizer | None, context: PrepareContext
) -> PreparedData:
    """The corpus as token files, prepared now unless they exist. Without a `tokenizer` one is learned from the training
    split.

    Memory is bounded by a few pieces of text and the counts of the vocabulary. What was encoded before a kill or a stop
    is kept. Several processes may call this at once: one prepares, the others wait. Raises `UserError` if the data
    cannot be used, `Stopped` on request.
    """
    if isinstance(corpus, TokenCorpus):
        return prepare_tokens(config, corpus, tokenizer, context)
    own = tokenizer_settings(config, corpus.train_bytes) if tokenizer is None else {"tokenizer": tokenizer.digest}
    settings = {"format": FORMAT, "corpus": corpus.identity, **own}
    write = _TextWriter(config, corpus, tokenizer, context).write
    return prepare_folder(config, corpus.name, settings, write, read_corpus, context)


@dataclass(frozen=True)
class _TextWriter:
    config: DataConfig
    corpus: Corpus
    tokenizer: Tokenizer | None
    context: PrepareContext

    def write(self, folder: Path) -> dict[str, Any]:
        settings = {"source": self.config.source, "corpus": self.corpus.identity}
        check_shards(settings, folder.parent)
        if self._has_documents and self.tokenizer is not None and self.tokenizer.document_end is None:
            raise UserError(
                f"data.source={self.config.source}: documents need a tokenizer with an end-of-sequence token "
                "(eos_token in its tokenizer_config.json)"
            )
        self.context.report(f"Preparing {self.corpus.name}: {self._amount}, tokenizer {self._kind}")
        if (found := Progress.read(folder)) is not None:
            progress, tokenizer = found
            self.context.report(f"{self.corpus.name}: resumes after {progress.num_tokens:,} tokens")
        else:
            spans = cut_splits(self.corpus.splits, self.context)
            tokenizer = self.tokenizer or self._learn_tokenizer(spans["train"])
            progress = Progress.begin(folder, settings, tokenizer, spans)
        dtype = token_dtype(tokenizer.vocab_size)
        return {
            "format": FORMAT,
            "dtype": dtype,
            "vocab_size": tokenizer.vocab_size,
            "tokenizer": {"kind": tokenizer.kind, "file": tokenizer.file_name, "sha256": tokenizer.digest},
            "splits": {split: self._write_split(split, progress, tokenizer, dtype) for split in self.corpus.splits},
        }

    def _learn_tokenizer(self, train: Spans) -> Tokenizer:
        config = self.config
        specials = (UNKNOWN, DOCUMENT_END) if self._has_documents else (UNKNOWN,)
        if config.tokenizer == BPETokenizer.kind:
            texts = (text for piece in self._sample(train) for text in piece.texts())
            return BPETokenizer.train(
                texts,
                config.vocab_size,
                config.min_frequency,
                specials=specials,
                should_stop=self.context.should_stop,
            )
        pieces = (piece for _, piece in self._pieces(train, "counting tokens"))
        if self._is_native:
            running = (piece for piece in pieces if isinstance(piece, Piece))
            counts = count_words(self._libraries, self.context.thread_map, running)
        else:
            counts = total(self.context.map(partial(_count, config.tokenizer), pieces))
        if not counts:
            raise UserError(f"{train[0].path}: the train split has no token; it must hold text")
        return build_vocabulary(config.tokenizer, counts, config.vocab_size, config.min_frequency, specials)

    def _sample(self, train: Spans) -> Iterator[Piece | Rows]:
        """What byte pairs are learned from: all of the split, or small pieces from everywhere in it."""
        sample, piece_bytes = sample_bytes(self.config, self.corpus.train_bytes), PIECE_BYTES
        if sample is not None:  # there may be more than the sample
            size = text_bytes(train, self.context)
            if (sample := sample_bytes(self.config, size)) is not None:
                report_sample(self.context, self.corpus.name, sample, size)
                piece_bytes = min(PIECE_BYTES, max(LEAST_PIECE, sample // 256))
        pieces = (piece for _, piece in self._pieces(train, "learning byte pairs", piece_bytes))
        return pieces if sample is None else evenly(pieces, lambda piece: piece.size, sample / size)

    def _write_split(self, split: str, progress: Progress, tokenizer: Tokenizer, dtype: str) -> dict[str, Any]:
        """Write the tokens of a split piece by piece; return its entry in the index."""
        spans = progress.spans[split]
        file, start = progress.resume(split, dtype, self.context.should_stop)
        unsaved = 0
        for place, size, tokens in self._encoded(spans, start, f"encoding {split}", tokenizer, dtype):
            file.add(tokens)
            unsaved += size
            if unsaved >= SAVED_BYTES:
                progress.save(split, file.checkpoint(), place)
                unsaved = 0
        if not file.count:
            raise UserError(f"{spans[0].path}: the {split} split has no token; it must hold text")
        progress.save(split, entry := file.checkpoint(), Place(len(spans), 0))
        file.close()
        return {"tokens": entry["count"], "sha256": entry["sha256"]}

    def _encoded(
        self, spans: Spans, start: Place, phase: str, tokenizer: Tokenizer, dtype: str
    ) -> Iterator[tuple[Place, int, NDArray[Any]]]:
        """From a place on: the place after each piece, its size in bytes and its token numbers (T,)."""
        sizes: deque[tuple[Place, int]] = deque()  # of the pieces that are being encoded
        is_native = isinstance(tokenizer, WordTokenizer) and self._is_native

        def pieces() -> Iterator[Piece | Rows]:
            for number, whole in self._pieces(spans, phase, start=start):
                for piece in parts([whole]) if is_native and isinstance(whole, Piece) else (whole,):
                    sizes.append((Place(number, piece.end), piece.size))
                    yield piece

        if isinstance(tokenizer, WordTokenizer) and is_native:
            encoded = self.context.thread_map(WordEncoder(self._libraries, tokenizer, dtype), pieces())
        else:
            encoded = self.context.map(partial(_encode, tokenizer, dtype), pieces())
        for tokens in encoded:
            yield *sizes.popleft(), tokens

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
    def _has_documents(self) -> bool:
        return any(split.spans[0].column is not None for split in self.corpus.splits.values())

    @property
    def _size(self) -> int:
        """Bytes of all files or parts of them; more if they are compressed."""
        spans = dict.fromkeys(span for split in self.corpus.splits.values() for span in split.spans)
        return sum(span.size for span in spans)

    @property
    def _amount(self) -> str:
        size, shards = f"{self._size / 1e6:.1f} MB", self.corpus.identity.get("shards")
        return f"{size} of text" if shards is None else f"{size} in {len(shards)} files"

    @property
    def _kind(self) -> str:
        return self.tokenizer.kind if self.tokenizer else self.config.tokenizer

    def _pieces(
        self, spans: Spans, phase: str, piece_bytes: int | None = None, start: Place = BEGIN
    ) -> Iterator[tuple[int, Piece | Rows]]:
        """The pieces from a place on, each with the number of its span; reports the progress every ten seconds."""
        reported, sizes = time.monotonic(), [span.size for span in spans]
        for number, span in enumerate(spans[start.span :], start=start.span):
            self._check_unchanged(span.path)
            first = max(start.position, span.start) if number == start.span else span.start
            for piece in read_pieces(replace(span, start=first), piece_bytes or PIECE_BYTES):
                if self.context.should_stop():
                    raise Stopped
                if time.monotonic() - reported > REPORT_SECONDS:
                    reported = time.monotonic()
                    done = sum(sizes[:number]) + (0 if span.end is None else piece.start - span.start)
                    self.context.report(f"{self.corpus.name}: {phase}, {100 * done / sum(sizes):.0f} %")
                yield number, piece
            self._check_unchanged(span.path)

    def _check_unchanged(self, path: Path) -> None:
        """Raise `OSError`, after which the next start resumes, if a shard is not what it was when this one began."""
        known = self._shards.get(str(path))
        if known is not None and (what := change(path, *known)) is not None:
            raise OSError(errno.ESTALE, f"{what} while it was prepared; restore it to resume", str(path))

    @cached_property
    def _shards(self) -> dict[str, list[int]]:
        """Size and time of the last change of each."""
        return {path: known for path, *known in self.corpus.identity.get("shards", ())}


def _count(kind: str, piece: Piece | Rows) -> Counter[str]:
    return total(map(VOCABULARY_KINDS[kind].count, piece.texts()))


def _encode(tokenizer: Tokenizer, dtype: str, piece: Piece | Rows) -> NDArray[np.unsignedinteger[Any]]:
    if isinstance(piece, Piece) and piece.column is None:
        return tokenizer.encode(piece.text()).astype(dtype)
    end = np.array([tokenizer.document_end])
    rows = [row for ids in tokenizer.encode_texts(list(piece.texts())) for row in (ids, end)]
    return np.concatenate(rows).astype(dtype) if rows else np.empty(0, dtype)
