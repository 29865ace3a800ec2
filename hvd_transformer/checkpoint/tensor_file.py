"""safetensors files: several ranks write their shards into one file, and it is read a few rows at a time.

8 bytes: length of the header | header: JSON, {name: {dtype, shape, data_offsets}} | bytes of the tensors
(github.com/huggingface/safetensors, "Format").
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hvd_transformer.checkpoint.manifest import DamagedCheckpoint
from hvd_transformer.errors import UserError
from hvd_transformer.nn.parallel_layers import split_range


@dataclass(frozen=True)
class StridedBlocks:
    """A rank's piece of a flattened tensor: blocks of equal length at equal distances."""

    length: int
    stride: int  # from the start of one block to that of the next
    offset: int  # of the first block

    @classmethod
    def of(cls, shape: Sequence[int], split: tuple[int, int] | None, index: int, count: int) -> "StridedBlocks":
        """The piece of rank `index` of `count`, for a tensor split as by a `TensorSplit`; None: the whole tensor."""
        if split is None or count == 1:
            return cls(prod(shape), prod(shape), 0)
        dim, parts = split
        inner, size = prod(shape[dim + 1 :]), shape[dim] // parts
        places = split_range(size, index, count)
        return cls(len(places) * inner, size * inner, places.start * inner)

    def before(self, place: int) -> int:
        """The number of elements of the piece before element `place` of the whole tensor."""
        block, within = divmod(place, self.stride)
        return block * self.length + min(max(within - self.offset, 0), self.length)


@dataclass(frozen=True)
class TensorShard:
    """A part of a rank's piece of a tensor: its ZeRO shard, or all of the piece."""

    shape: tuple[int, ...]  # of the whole tensor
    blocks: StridedBlocks  # the piece
    start: int  # of `values` in the piece
    values: Tensor  # [n], on any device

    def runs(self, first: int, last: int) -> Iterator[tuple[int, Tensor]]:
        """The shard's elements in [first, last) of the whole tensor: views of `values`, each with its place there."""
        blocks = self.blocks
        position = max(blocks.before(first), self.start)
        stop = min(blocks.before(last), self.start + self.values.numel())
        while position < stop:
            block, within = divmod(position, blocks.length)
            count = min(blocks.length - within, stop - position)
            place = block * blocks.stride + blocks.offset + within
            yield place, self.values[position - self.start :][:count]
            position += count


_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def create(file: Path, shards: Mapping[str, TensorShard]) -> None:
    """Create the file at its full size, for the whole tensors; the values are zero until they are written."""
    # Hugging Face's readers require the framework.
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, shard in shards.items():
        dtype = shard.values.dtype
        stop = position + prod(shard.shape) * dtype.itemsize
        entries[name] = {"dtype": _DTYPES[dtype], "shape": shard.shape, "data_offsets": [position, stop]}
        position = stop
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)  # the tensors start at a multiple of 8 bytes
    with file.open("xb") as opened:
        opened.write(len(header).to_bytes(8, "little") + header)
        opened.truncate(opened.tell() + position)


def write(file: Path, shards: Mapping[str, TensorShard]) -> None:
    """Write the shards into a file made by `create`. Other ranks may write theirs at the same time."""
    with file.open("r+b", buffering=0) as opened:
        length = int.from_bytes(opened.read(8), "little")
        entries = json.loads(opened.read(length))
        for name, shard in shards.items():
            values, begin = shard.values, 8 + length + entries[name]["data_offsets"][0]
            for place, run in shard.runs(0, prod(shard.shape)):
                _write_all(opened.fileno(), run, begin + place * values.element_size())
        os.fsync(opened.fileno())


def check(file: Path, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise `UserError` if the names or shapes in the file differ from `shapes`."""
    with _reading(file), safe_open(file, framework="pt") as opened:
        if differing := sorted(set(opened.keys()) ^ set(shapes)):
            where = "in the model but not in the file" if differing[0] in shapes else "in the file but not in the model"
            raise UserError(f"{file}: of another model: {differing[0]} is {where}")
        for name, shape in shapes.items():
            found = opened.get_slice(name).get_shape()
            if list(found) != list(shape):
                raise UserError(f"{file}: of another model: {name} is {list(found)}, not {list(shape)}")


def read(file: Path, rows: Iterable[tuple[str, int, int]]) -> Iterator[Tensor]:
    """Yield rows of tensors, each given as (name, first row, last row exclusive)."""
    with _reading(file), safe_open(file, framework="pt") as opened:
        for name, first, last in rows:
            yield opened.get_slice(name)[first:last]


def _write_all(descriptor: int, values: Tensor, position: int) -> None:
    view = values.contiguous().view(torch.uint8).numpy().data
    while view:
        written = os.pwrite(descriptor, view, position)
        view, position = view[written:], position + written


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise DamagedCheckpoint(f"{file}: no valid safetensors file: {error}") from None
