"""safetensors files: several ranks write their parts of one file, and it is read through a memory map.

8 bytes: length of the header | header: JSON, {name: {dtype, shape, data_offsets}} | bytes of the tensors
(github.com/huggingface/safetensors, "Format").
"""

import json
import mmap
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hvd_transformer.checkpoint.crc import Range
from hvd_transformer.checkpoint.manifest import DamagedCheckpoint

_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_DTYPE_OF = {name: dtype for dtype, name in _DTYPES.items()}
# Bytes whose checksum is taken and that are written at a time: they are still in the core's cache for the second.
_WRITE_BYTES = 1 << 20
# Bytes that are written before they are sent to the disk and dropped from the page cache. Nobody reads them soon, and
# hundreds of megabytes of new pages cost more than writing, and push out data that training reads.
_CACHED_BYTES = 32 << 20


class Entry(NamedTuple):
    """A tensor of a file."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class FilePart:
    """What one rank writes into a file: the tensors of the file in order, and the rank's bytes of them."""

    entries: Sequence[Entry]
    blocks: Sequence[tuple[int, Tensor]]  # contiguous bytes by their place after the header
    leads: bool = True  # this rank also writes the header; one does

    @cached_property
    def header(self) -> bytes:
        # Hugging Face's readers require the framework.
        found: dict[str, object] = {"__metadata__": {"format": "pt"}}
        position = 0
        for entry in self.entries:
            stop = position + entry.nbytes
            found[entry.key] = {
                "dtype": _DTYPES[entry.dtype],
                "shape": entry.shape,
                "data_offsets": [position, stop],
            }
            position = stop
        header = json.dumps(found, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)  # the tensors start at a multiple of 8 bytes
        return len(header).to_bytes(8, "little") + header


def write(file: Path, part: FilePart, advance: Callable[[], object] | None = None) -> list[Range]:
    """Write one rank's part and return its checksums. Other ranks of the host may write theirs at the same time.

    `advance` is called after every 32 MB.

    Nothing is read, not even pages at the edges by a network file system.
    """
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        ranges, cached = [], 0
        if part.leads:
            os.ftruncate(descriptor, len(part.header) + sum(entry.nbytes for entry in part.entries))
            ranges.append(write_range(descriptor, 0, memoryview(part.header)))
        for place, block in part.blocks:
            for start in range(0, block.numel(), _CACHED_BYTES):
                data = block[start : start + _CACHED_BYTES]
                ranges.append(write_range(descriptor, len(part.header) + place + start, data.numpy().data))
                cached += data.numel()
                if cached >= _CACHED_BYTES:
                    os.fdatasync(descriptor)
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                    cached = 0
                if advance is not None:
                    advance()
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    return ranges


def write_range(descriptor: int, start: int, data: memoryview) -> Range:
    """Write the bytes at this place of the file; returns their checksum."""
    crc, position = 0, start
    while data:
        block = data[:_WRITE_BYTES]
        crc = zlib.crc32(block, crc)
        data = data[_WRITE_BYTES:]
        while block:
            written = os.pwrite(descriptor, block, position)
            block, position = block[written:], position + written
    return Range(start, position, crc)


class StoredTensor(NamedTuple):
    """A tensor of a file. `values` are flat and in the file: a page is read when it is used."""

    shape: tuple[int, ...]
    values: Tensor


def read(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a file by name. Raises `DamagedCheckpoint` if it is not a valid safetensors file."""
    with _reading(file):
        with safe_open(file, framework="pt"):  # checks everything in the header
            pass
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            entries = json.loads(opened.read(length))
            # Private and never written: torch warns of memory that it may not write.
            data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        entries.pop("__metadata__", None)
        return {
            name: StoredTensor(tuple(entry["shape"]), _values(data, 8 + length + entry["data_offsets"][0], entry))
            for name, entry in entries.items()
        }


def _values(data: mmap.mmap, offset: int, entry: dict[str, object]) -> Tensor:
    dtype, shape = _DTYPE_OF.get(str(entry["dtype"])), entry["shape"]
    assert isinstance(shape, list)
    if dtype is None:
        raise ValueError(f"dtype {entry['dtype']}")
    if not prod(shape):
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype, count=prod(shape), offset=offset)


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError, ValueError) as error:
        raise DamagedCheckpoint(f"{file}: not a valid safetensors file: {error}") from None
