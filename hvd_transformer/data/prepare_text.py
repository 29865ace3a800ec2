"""Prepare token files of running text and documents once per cache: cut into pieces, counted and encoded.

```
<cache_dir>/prepared/<name>-<digest of the source and of every setting that matters>/
    tokenizer.json or vocabulary.json
    train.bin  valid.bin  test.bin      token numbers, 16 or 32 bit, little endian
    index.json                          number format, counts, checksums, settings
```
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_transformer.config.schema import DataConfig
from hvd_transformer.data.build_once import PrepareContext
from hvd_transformer.data.corpus_pieces import CorpusPieces, Spans
from hvd_transformer.data.learn_tokenizer import learn_tokenizer, tokenizer_settings
from hvd_transformer.data.parquet import Rows
from hvd_transformer.data.prepare_folder import prepare_folder
from hvd_transformer.data.prepared import PreparedData, read_corpus, token_dtype
from hvd_transformer.data.pretrained_tokenizer import PretrainedTokenizer
from hvd_transformer.data.progress import Mark, Place, Progress
from hvd_transformer.data.shards import check_shards, cut_splits
from hvd_transformer.data.take_over import take_over
from hvd_transformer.data.text_corpus import Corpus
from hvd_transformer.data.text_files import Piece
from hvd_transformer.data.token_corpus import TokenCorpus, prepare_tokens
from hvd_transformer.data.tokenizers import Tokenizer, WordTokenizer
from hvd_transformer.data.words import WordEncoder, parts
from hvd_transformer.errors import UserError

Tokens = NDArray[np.unsignedinteger[Any]]
FORMAT = 1  # of a prepared corpus; another number prepares all of them anew
_FORMAT_WITH_END = 2  # of those whose learned tokenizer has an end token: `</s>` in a text was one in format 1
SAVED_BYTES = 64 * 2**20  # of text: a kill loses no more work
_GROUP_BYTES = 2**20  # of text in small pieces, such as whole files, that are encoded together


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
    settings = {"format": _format(corpus, tokenizer), "corpus": corpus.identity, **own}
    if tokenizer is not None and "columns" in corpus.identity:
        settings["document_end"] = tokenizer.document_end  # the digest does not tell it
    write = _TextWriter(config, corpus, tokenizer, context).write
    found = prepare_folder(config, corpus.name, settings, write, read_corpus, context)
    # The digest is of its token numbers alone: the folder may be of one with another end token or chat template.
    return found if tokenizer is None else replace(found, tokenizer=tokenizer)


@dataclass(frozen=True)
class _TextWriter:
    config: DataConfig
    corpus: Corpus
    tokenizer: Tokenizer | None
    context: PrepareContext

    def write(self, folder: Path) -> dict[str, Any]:
        used = _format(self.corpus, self.tokenizer)
        settings = {"format": used, "source": self.config.source, "corpus": self.corpus.identity}
        check_shards(settings, folder.parent)
        text = CorpusPieces(self.config, self.corpus, self.context)
        if text.has_documents and self.tokenizer is not None and self.tokenizer.document_end is None:
            raise UserError(
                f"data.source={self.config.source}: documents need a tokenizer with an end-of-sequence token "
                "(eos_token in its tokenizer_config.json)"
            )
        kind = self.tokenizer.kind if self.tokenizer else self.config.tokenizer
        self.context.report(f"Preparing {self.corpus.name}: {_amount(text)}, tokenizer {kind}")
        if (found := Progress.read(folder)) is not None:
            progress = found
        else:
            spans = cut_splits(self.corpus.splits, self.context)
            tokenizer = self.tokenizer or learn_tokenizer([(text, spans["train"])], text.has_documents)
            progress = Progress.begin(folder, settings, tokenizer, spans)
            take_over(progress)
        tokenizer = progress.tokenizer
        if found is not None or progress.num_tokens:
            self.context.report(f"{self.corpus.name}: resumes after {progress.num_tokens:,} tokens")
        dtype = token_dtype(tokenizer.vocab_size)
        return {
            "format": FORMAT,  # of the files: equal tokens have equal digests
            "dtype": dtype,
            "vocab_size": tokenizer.vocab_size,
            "tokenizer": {"kind": tokenizer.kind, "file": tokenizer.file_name, "sha256": tokenizer.digest},
            "splits": {
                split: self._write_split(split, text, progress, tokenizer, dtype) for split in self.corpus.splits
            },
        }

    def _write_split(
        self, split: str, text: CorpusPieces, progress: Progress, tokenizer: Tokenizer, dtype: str
    ) -> dict[str, Any]:
        """Write the tokens of a split piece by piece; return its entry in the index."""
        spans = progress.spans[split]
        file, place = progress.resume(split, dtype, self.context.should_stop)
        unsaved = 0
        try:
            for after, size, tokens in self._encoded(text, spans, place, f"encoding {split}", tokenizer, dtype):
                if after.span != place.span:
                    progress.pass_span(split, Mark(file.entry(), place))
                file.add(tokens)
                place = after
                unsaved += size
                if unsaved >= SAVED_BYTES:
                    progress.save(split, file.checkpoint(), place)
                    unsaved = 0
            if not file.count:
                raise UserError(f"{spans[0].path}: the {split} split has no token; it must hold text")
        except UserError:
            progress.save(split, file.checkpoint(), place)
            progress.fail()
            if progress.failed:
                self.context.report(f"{self.corpus.name}: what is encoded is kept; the next start resumes there")
            raise
        progress.save(split, entry := file.checkpoint(), Place(len(spans), 0))
        file.close()
        return {"tokens": entry["count"], "sha256": entry["sha256"]}

    def _encoded(
        self, text: CorpusPieces, spans: Spans, start: Place, phase: str, tokenizer: Tokenizer, dtype: str
    ) -> Iterator[tuple[Place, int, NDArray[Any]]]:
        """From a place on: the place after each piece, its size in bytes and its token numbers (T,)."""
        sizes: deque[tuple[Place, int]] = deque()  # of the pieces that are being encoded
        is_native = text.is_native(tokenizer.kind)

        def pieces() -> Iterator[Piece | Rows]:
            for number, whole in text.read(spans, phase, start=start):
                for piece in parts([whole]) if is_native and isinstance(whole, Piece) else (whole,):
                    sizes.append((Place(number, piece.end), piece.size))
                    yield piece

        if isinstance(tokenizer, WordTokenizer) and is_native:
            encoded = self.context.thread_map(WordEncoder(text.libraries, tokenizer, dtype), pieces())
        else:
            groups = self.context.map(partial(_encode_all, tokenizer, dtype), _grouped(pieces()))
            encoded = chain.from_iterable(groups)
        for tokens in encoded:
            if isinstance(tokens, UserError):
                raise tokens
            yield *sizes.popleft(), tokens


def _format(corpus: Corpus, tokenizer: Tokenizer | None) -> int:
    if isinstance(tokenizer, PretrainedTokenizer):
        return FORMAT
    has_end = "columns" in corpus.identity if tokenizer is None else tokenizer.document_end is not None
    return _FORMAT_WITH_END if has_end else FORMAT


def _amount(text: CorpusPieces) -> str:
    size, shards = f"{text.size / 1e6:.1f} MB", text.corpus.identity.get("shards")
    return f"{size} of text" if shards is None else f"{size} in {len(shards)} files"


def _grouped(pieces: Iterable[Piece | Rows]) -> Iterator[list[Piece | Rows]]:
    """Small pieces together: each item for another process takes a copy of the tokenizer along."""
    group, size = list[Piece | Rows](), 0
    try:
        for piece in pieces:
            group.append(piece)
            size += piece.size
            if size >= _GROUP_BYTES:
                yield group
                group, size = [], 0
    except UserError:  # what was read before a wrong file is kept, too
        if group:
            yield group
        raise
    if group:
        yield group


def _encode_all(tokenizer: Tokenizer, dtype: str, pieces: Sequence[Piece | Rows]) -> list[Tokens | UserError]:
    """The tokens of each piece, up to the first one that is wrong."""
    found: list[Tokens | UserError] = []
    try:
        for piece in pieces:
            found.append(_encode(tokenizer, dtype, piece))
    except UserError as error:
        found.append(error)
    return found


def _encode(tokenizer: Tokenizer, dtype: str, piece: Piece | Rows) -> Tokens:
    if isinstance(piece, Piece) and piece.column is None:
        return tokenizer.encode(piece.text()).astype(dtype)
    end = np.array([tokenizer.document_end])
    rows = [row for ids in tokenizer.encode_texts(list(piece.texts())) for row in (ids, end)]
    return np.concatenate(rows).astype(dtype) if rows else np.empty(0, dtype)
