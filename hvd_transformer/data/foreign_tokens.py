"""Token files as other tools write them: nanoGPT's `.bin`, and Megatron's `.bin` with its index `.idx`.

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

import re
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvd_transformer.errors import UserError

TOKENS, INDEX = ".bin", ".idx"
_HEADER = struct.Struct("<9sQBQQ")
_MAGIC = b"MMIDIDX\x00\x00"
# What preprocess_data.py appends to its prefix: the JSON key, and what a sequence is.
_MEGATRON = re.compile(r"_[^_]+_(document|sentence)$")
_FORMATS = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


@dataclass(frozen=True)
class TokenSpan:
    """Tokens `start` to `end` - 1 of a file."""

    path: Path
    dtype: str
    start: int
    end: int


Spans = tuple[TokenSpan, ...]  # one after the other


def megatron_ending(path: Path) -> str | None:
    """What Megatron appended to the name of its file, such as `_text_document`; None if it is not from there."""
    found = _MEGATRON.search(path.stem)
    return None if found is None else found[0]


class ForeignTokens:
    """The tokens of several files in order, as if they were one.

    Raises `UserError` if a file is damaged, or of another kind than the first one.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self.files = [_File(path) for path in paths]
        first = self.files[0]
        for file in self.files:
            if file.has_index != first.has_index:
                bare, indexed = (first, file) if file.has_index else (file, first)
                raise UserError(
                    f"{bare.path}: has no {bare.path.with_suffix(INDEX).name} beside it, as {indexed.path.name} has"
                )
            if file.dtype != first.dtype:
                raise UserError(
                    f"{file.path}: its tokens are {np.dtype(file.dtype)}, those of {first.path.name} "
                    f"{np.dtype(first.dtype)}; the files of a split must have the same number format"
                )
        self._ends = list(accumulate(file.count for file in self.files))

    def spans(self, low: float = 0.0, high: float = 1.0) -> Spans:
        """This share of the tokens; Megatron's are cut between documents. Empty if there is none in it."""
        (first, start), (last, end) = self._cut(low), self._cut(high)
        found = []
        for number in range(first, last + 1):
            file = self.files[number]
            own = start if number == first else 0, end if number == last else file.count
            if own[0] < own[1]:
                found.append(TokenSpan(file.path, file.dtype, *own))
        return tuple(found)

    def _cut(self, share: float) -> tuple[int, int]:
        """Where a share of all tokens ends: the number of the file, and the token in it."""
        total = self._ends[-1]
        target = total if share > 1 - 1e-9 else round(share * total)
        number = min(bisect_right(self._ends, target), len(self.files) - 1)
        file = self.files[number]
        return number, file.cut(target - (self._ends[number] - file.count))


class _Layout(NamedTuple):
    """Where an index has its three tables, in bytes."""

    lengths: int
    begins: int
    documents: int
    end: int


class _File:
    """A `.bin` file, with its index if it has one, which stays on the disk. Raises `UserError` if they are damaged."""

    def __init__(self, path: Path) -> None:
        self.path, self.index, self.dtype = path, path.with_suffix(INDEX), "<u2"
        self._layout: _Layout | None = None
        try:
            size = path.stat().st_size
            if self.index.is_file():
                self._read_index(size)
            elif megatron_ending(path):
                raise UserError(f"{path}: has no {self.index.name} beside it, which Megatron's token files need")
        except OSError as error:
            raise UserError(f"{error.filename or path}: cannot be read: {error.strerror}") from None
        self.count, rest = divmod(size, np.dtype(self.dtype).itemsize)
        if not size:
            raise UserError(f"{path}: the file is empty; it must hold tokens")
        if rest:
            raise UserError(
                f"{path}: its size, {size} bytes, is not a multiple of {np.dtype(self.dtype).itemsize} bytes per token"
            )

    @property
    def has_index(self) -> bool:
        return self._layout is not None

    def cut(self, target: int) -> int:
        """Where to cut at or after this token: Megatron's before a document."""
        if self._layout is None:
            return target
        _, begins, documents = self._tables(self._layout)
        item = np.dtype(self.dtype).itemsize

        def begin(document: int) -> int:
            number = int(documents[document])
            return int(begins[number]) // item if number < len(begins) else self.count

        return begin(bisect_left(range(len(documents) - 1), target, key=begin))

    def _read_index(self, size: int) -> None:
        """Read the index of a `.bin` file of so many bytes."""
        with self.index.open("rb") as file:
            head = file.read(_HEADER.size)
        if len(head) < _HEADER.size or not head.startswith(_MAGIC):
            raise UserError(f"{self.index}: no index of Megatron's token files (it must begin with MMIDIDX)")
        _, version, code, num_sequences, num_documents = _HEADER.unpack(head)
        if version != 1 or code not in _FORMATS:
            raise UserError(
                f"{self.index}: version {version}, number format {code}; can read version 1 with whole numbers"
            )
        layout = _Layout(*accumulate((4 * num_sequences, 8 * num_sequences, 8 * num_documents), initial=_HEADER.size))
        if self.index.stat().st_size < layout.end:
            raise UserError(
                f"{self.index}: damaged: shorter than its {num_sequences} sequences and {num_documents} documents"
            )
        self.dtype, self._layout, last = _FORMATS[code], layout, 0
        if num_sequences and num_documents:
            lengths, begins, _ = self._tables(layout)
            last = int(begins[-1]) + int(lengths[-1]) * np.dtype(self.dtype).itemsize
        if last != size or (size and int(begins[0])):
            raise UserError(f"{self.index}: describes {last} bytes of tokens, but {self.path.name} has {size}")

    def _tables(self, layout: _Layout) -> Sequence[NDArray[np.int64]]:
        """The lengths of the sequences, where each begins, and the documents. Mapped anew each time, as a mapping keeps
        its file open."""
        mapped = np.memmap(self.index, np.uint8, "r")
        return [
            mapped[low:high].view(dtype)
            for (low, high), dtype in zip(pairwise(layout), ("<i4", "<i8", "<i8"), strict=True)
        ]
