"""Token files: the token numbers of one split, 16 or 32 bit, mapped into memory when they are first read."""

import hashlib
import mmap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_transformer.errors import UserError


def token_dtype(vocab_size: int) -> str:
    """The smallest little-endian number format that holds every token of the vocabulary."""
    return "<u2" if vocab_size <= 2**16 else "<u4"


@dataclass
class TokenFile:
    """`len(tokens)` and `tokens[start:stop]` of a file that need not fit into memory.

    A slice is a read-only array (T,) of the stored format that maps the file, no copy.
    """

    path: Path
    dtype: str
    count: int
    sha256: str
    _mapped: NDArray[Any] | None = field(default=None, repr=False, compare=False)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, span: slice) -> NDArray[Any]:
        if self._mapped is None:
            self._mapped = self._open()
        return self._mapped[span]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mapped": None}  # another process maps the file itself

    @property
    def num_bytes(self) -> int:
        return self.count * np.dtype(self.dtype).itemsize

    def is_whole(self) -> bool:
        """Whether the file is there with the size that the index tells."""
        return self.path.is_file() and self.path.stat().st_size == self.num_bytes

    def verify(self) -> None:
        """Reads the whole file. Raises `UserError` where its checksum is not the index's."""
        self._check_size()
        digest = hashlib.sha256()
        with self.path.open("rb") as file:
            while chunk := file.read(2**20):
                digest.update(chunk)
        if digest.hexdigest() != self.sha256:
            raise UserError(f"{self.path}: damaged, its checksum differs; remove its folder to prepare it again")

    def _open(self) -> NDArray[Any]:
        self._check_size()
        if not self.count:  # an empty file cannot be mapped
            return np.empty(0, self.dtype)
        with self.path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if hasattr(mmap, "MADV_RANDOM"):  # windows come in shuffled order: reading ahead would be in vain
            mapped.madvise(mmap.MADV_RANDOM)
        return np.frombuffer(mapped, dtype=self.dtype)

    def _check_size(self) -> None:
        if not self.is_whole():
            size = self.path.stat().st_size if self.path.is_file() else "no"
            damage = f"damaged, {size} bytes instead of {self.num_bytes}"
            raise UserError(f"{self.path}: {damage}; remove its folder to prepare it again")
