"""Token files that other tools have prepared: nanoGPT's `.bin`, and Megatron's `.bin` with its index `.idx`.

Training maps them where they are.

nanoGPT: 16-bit token numbers, without a header (data/openwebtext/prepare.py of github.com/karpathy/nanoGPT).
Megatron: the tokens of all sequences, one after the other; the index, little endian (`_IndexWriter` in
megatron/core/datasets/indexed_dataset.py of github.com/NVIDIA/Megatron-LM):

    9 bytes   MMIDIDX, 0, 0
    8         version: 1
    1         number format: see `_FORMATS`
    8, 8      number of sequences S, and of the entries of `documents` D
    4 S       tokens of each sequence
    8 S       where each sequence begins in the .bin file, in bytes
    8 D       documents: the number of the sequence with which each one begins; the last entry is S
"""

import hashlib
import struct
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_transformer.config.mixture import origin
from hvd_transformer.config.schema import DataConfig
from hvd_transformer.data.build_once import PrepareContext, Stopped
from hvd_transformer.data.load_tokenizer import load_tokenizer
from hvd_transformer.data.prepare_folder import prepare_folder
from hvd_transformer.data.prepared import PreparedData, TokenFile
from hvd_transformer.data.splits import SPLITS, WHOLE, Source, file_identity
from hvd_transformer.data.tokenizers import Tokenizer
from hvd_transformer.errors import UserError

FORMAT = 1  # of what is kept about token files; another number checks all of them anew
_HEADER = struct.Struct("<9sQBQQ")
_MAGIC = b"MMIDIDX\x00\x00"
_FORMATS = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_CHECKED = 2**22  # tokens at a time


@dataclass(frozen=True)
class TokenSpan:
    """Tokens `start` to `end` - 1 of a file."""

    path: Path
    dtype: str
    start: int
    end: int


class TokenCorpus(Source[TokenSpan]):
    """Splits of ready token files."""


def open_token_folder(folder: Path, stems: Mapping[str, tuple[str, ...]]) -> TokenCorpus | None:
    """The token files of a folder: `train.bin` and `val.bin`, with `train.idx` or, such as Megatron writes it,
    `train_text_document.idx`; None if it has none. Raises `UserError`."""
    found = {split: next(filter(None, (_find(folder, stem) for stem in stems[split])), None) for split in SPLITS}
    spans = {split: _Tokens(path).span(0.0, 1.0) for split, path in found.items() if path is not None}
    if not spans:
        return None
    for split in ("train", "valid"):
        if split not in spans:
            accepted = " or ".join(f"{stem}.bin" for stem in stems[split])
            raise UserError(f"{folder}: token files, but none of the {split} split; it must hold {accepted}")
    return _corpus(folder.name, spans)


def open_token_file(path: Path, shares: list[float] | None) -> TokenCorpus | None:
    """One token file, which may be given as its index or without ending, cut by shares of its tokens (None: all of it,
    to be evaluated), Megatron's between documents; None if the path is none. Raises `UserError`."""
    if path.suffix not in (".bin", ".idx"):
        path = path.with_name(f"{path.name}.idx")
    if not path.is_file():
        return None
    tokens = _Tokens(path.with_suffix(".bin").absolute())
    if shares is None:
        return _corpus(tokens.path.stem, {WHOLE: tokens.span(0.0, 1.0)})
    ends = accumulate(shares, initial=0.0)
    spans = {split: tokens.span(*share) for split, share in zip(SPLITS, pairwise(ends), strict=False)}
    for split, span in spans.items():
        if span.start == span.end:
            raise UserError(f"{span.path}: data.split={shares} leaves the {split} split empty")
    return _corpus(tokens.path.stem, spans)


def prepare_tokens(
    config: DataConfig, corpus: TokenCorpus, tokenizer: Tokenizer | None, context: PrepareContext
) -> PreparedData:
    """Check once that the tokenizer has all tokens, and keep the checksums. Raises `UserError` and `Stopped`."""
    if tokenizer is None:
        raise needs_tokenizer(config)
    settings = {"format": FORMAT, "corpus": corpus.identity, "tokenizer": tokenizer.digest}

    def write(folder: Path) -> dict[str, Any]:
        tokenizer.save(folder)
        size = sum(span.end - span.start for span in corpus.splits.values())
        context.report(f"Checking {corpus.name}: {size:,} tokens in {len(corpus.splits)} splits")
        splits = {split: _checked(span, tokenizer, context) for split, span in corpus.splits.items()}
        return {"format": FORMAT, "tokenizer": tokenizer.digest, "splits": splits}

    def read(folder: Path, index: dict[str, Any]) -> PreparedData | None:
        kept = load_tokenizer(folder)
        if kept.digest != index["tokenizer"]:
            return None
        splits = {
            split: TokenFile(span.path, span.dtype, span.end - span.start, index["splits"][split]["sha256"], span.start)
            for split, span in corpus.splits.items()
        }
        has_documents = any(entry["documents"] for entry in index["splits"].values())
        return PreparedData(folder, kept, splits, index["digest"], has_documents)

    return prepare_folder(config, corpus.name, settings, write, read, context)


def needs_tokenizer(config: DataConfig) -> UserError:
    """For token files without `data.tokenizer`."""
    return UserError(
        f"{origin(config)}: has token numbers; name the tokenizer that made them with data.tokenizer="
        "tokenizer.json or its folder"
    )


def _checked(span: TokenSpan, tokenizer: Tokenizer, context: PrepareContext) -> dict[str, Any]:
    """The entry of these tokens in the index. `documents` counts those that an end token follows."""
    digest, tokens = hashlib.sha256(), np.memmap(span.path, span.dtype, "r")
    documents, vocab_size = 0, tokenizer.vocab_size
    for start in range(span.start, span.end, _CHECKED):
        if context.should_stop():
            raise Stopped
        part = np.asarray(tokens[start : min(start + _CHECKED, span.end)])
        if (wrong := np.flatnonzero((part < 0) | (part >= vocab_size))).size:
            raise UserError(
                f"{span.path}: token {start + wrong[0]} is {part[wrong[0]]}, but the tokenizer has {vocab_size} "
                "tokens; data.tokenizer must be the one that made the file"
            )
        digest.update(part.tobytes())
        if tokenizer.document_end is not None:
            documents += int(np.count_nonzero(part == tokenizer.document_end))
    return {"tokens": span.end - span.start, "sha256": digest.hexdigest(), "documents": documents}


def _find(folder: Path, stem: str) -> Path | None:
    """The `.bin` file of a split."""
    found = [path for path in sorted(folder.glob(f"{stem}[-_.]*.idx")) if path.is_file()]
    for path in (folder / f"{stem}.bin", *found):
        if path.with_suffix(".bin").is_file():
            if len(found) > 1:
                raise UserError(f"{folder}: {' and '.join(file.name for file in found)}; one token file per split")
            return path.with_suffix(".bin")
    return None


class _Tokens:
    """A `.bin` file, with its index if it has one. Raises `UserError` if they are damaged."""

    def __init__(self, path: Path) -> None:
        self.path, self.dtype = path, "<u2"
        self._begins: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None  # of sequences and documents
        index = path.with_suffix(".idx")
        try:
            size = path.stat().st_size
            if index.is_file():
                self._read(index, size)
        except OSError as error:
            raise UserError(f"{error.filename or path}: cannot be read: {error.strerror}") from None
        self.count, rest = divmod(size, np.dtype(self.dtype).itemsize)
        if rest or not self.count:
            raise UserError(f"{path}: {size} bytes are no tokens of {np.dtype(self.dtype).itemsize} bytes each")

    def span(self, low: float, high: float) -> TokenSpan:
        """This share of the tokens."""
        return TokenSpan(self.path, self.dtype, self._cut(low), self._cut(high))

    def _cut(self, share: float) -> int:
        """The end of a share: of Megatron's that of a document."""
        target = self.count if share > 1 - 1e-9 else round(share * self.count)
        if self._begins is None:
            return target
        sequences, documents = self._begins
        item = np.dtype(self.dtype).itemsize

        def begin(document: int) -> int:
            number = int(documents[document])
            return int(sequences[number]) // item if number < len(sequences) else self.count

        return begin(bisect_left(range(len(documents) - 1), target, key=begin))

    def _read(self, path: Path, size: int) -> None:
        """Read the index of a `.bin` file of so many bytes."""
        with path.open("rb") as file:
            head = file.read(_HEADER.size)
        if len(head) < _HEADER.size or not head.startswith(_MAGIC):
            raise UserError(f"{path}: no index of Megatron's token files (it must begin with MMIDIDX)")
        _, version, code, num_sequences, num_documents = _HEADER.unpack(head)
        if version != 1 or code not in _FORMATS:
            raise UserError(f"{path}: version {version}, number format {code}; can read version 1 with whole numbers")
        start = _HEADER.size
        ends = [start + 4 * num_sequences, start + 12 * num_sequences, start + 12 * num_sequences + 8 * num_documents]
        if path.stat().st_size < ends[-1] or not num_sequences or not num_documents:
            raise UserError(
                f"{path}: damaged: shorter than its {num_sequences} sequences and {num_documents} documents"
            )
        mapped = np.memmap(path, np.uint8, "r")
        lengths, begins, documents = (
            mapped[low:high].view(dtype)
            for (low, high), dtype in zip(pairwise([start, *ends]), ("<i4", "<i8", "<i8"), strict=True)
        )
        self.dtype, self._begins = _FORMATS[code], (begins, documents)
        last = int(begins[-1]) + int(lengths[-1]) * np.dtype(self.dtype).itemsize
        if int(begins[0]) or last != size:
            raise UserError(f"{path}: describes {last} bytes of tokens, but {path.with_suffix('.bin').name} has {size}")


def _corpus(name: str, spans: dict[str, TokenSpan]) -> TokenCorpus:
    files = {split: [*file_identity(span.path), span.dtype, span.start, span.end] for split, span in spans.items()}
    return TokenCorpus(name, {"tokens": files}, spans)
