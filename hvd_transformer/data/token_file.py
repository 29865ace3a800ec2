"""The tokens of a split as training reads them: memory-mapped files, one or several after the other."""

import json
import mmap
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hvd_transformer.data.tokenizers import sha256
from hvd_transformer.errors import UserError


@dataclass
class TokenFile:
    """A file of `count` numbers that need not fit into memory; with `start` those from there on of a file with more.

    `tokens[start:stop]` is a read-only array (T,) of the stored number format that maps the file without a copy.
    """

    path: Path
    dtype: str
    count: int
    sha256: str
    start: int | None = None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, span: slice) -> NDArray[Any]:
        return self._mapped[span]

    @property
    def num_bytes(self) -> int:
        return self.count * np.dtype(self.dtype).itemsize

    def is_whole(self) -> bool:
        """Whether the file exists and has the size recorded in the index."""
        size = self.path.stat().st_size if self.path.is_file() else -1
        return size == self.num_bytes if self.start is None else size >= self._offset + self.num_bytes

    def unmap(self) -> None:
        """Forget the mapping; the next access maps the file again."""
        self.__dict__.pop("_mapped", None)

    @property
    def _offset(self) -> int:
        return (self.start or 0) * np.dtype(self.dtype).itemsize

    @cached_property
    def _mapped(self) -> NDArray[Any]:
        if not self.is_whole():
            size = self.path.stat().st_size if self.path.is_file() else "no"
            raise UserError(
                f"{self.path}: damaged, {size} bytes instead of {self.num_bytes}; remove its folder to prepare it again"
            )
        if not self.count:  # an empty file cannot be mapped
            return np.empty(0, self.dtype)
        with self.path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        mapped.madvise(mmap.MADV_RANDOM)  # windows are read in shuffled order: reading ahead would be useless
        return np.frombuffer(mapped, self.dtype, self.count, self._offset)


@dataclass
class JoinedTokens:
    """Files of one number format, read as if they were one. Only a slice that goes over the end of a file is a copy."""

    files: Sequence[TokenFile]
    most_mapped: int = 256
    """Files mapped at a time: each mapping keeps its file open, and a process may have 1,024 of them."""
    _in_use: dict[int, None] = field(default_factory=dict, repr=False)  # numbers of mapped files, the last used last

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, span: slice) -> NDArray[Any]:
        start, stop, _ = span.indices(len(self))
        parts: list[NDArray[Any]] = []
        for number in range(bisect_right(self._ends, start), len(self.files)):
            begin = self._ends[number] - len(self.files[number])
            if parts and begin >= stop:
                break
            parts.append(self._file(number)[max(start - begin, 0) : max(stop - begin, 0)])
        return parts[0] if len(parts) == 1 else np.concatenate(parts or [np.empty(0, self.files[0].dtype)])

    @property
    def sha256(self) -> str:
        return sha256(json.dumps([file.sha256 for file in self.files]))

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(map(len, self.files)))

    def _file(self, number: int) -> TokenFile:
        self._in_use.pop(number, None)
        self._in_use[number] = None
        if len(self._in_use) > self.most_mapped:
            oldest = next(iter(self._in_use))
            del self._in_use[oldest]
            self.files[oldest].unmap()
        return self.files[number]


Tokens: TypeAlias = TokenFile | JoinedTokens


@dataclass(frozen=True)
class MixedTokens:
    """A split of a mixture: the tokens of those sources that have it, and the names of these."""

    files: Sequence[Tokens]
    names: Sequence[str]

    def __len__(self) -> int:
        return sum(map(len, self.files))

    @property
    def sha256(self) -> str:
        return sha256(json.dumps([tokens.sha256 for tokens in self.files]))
