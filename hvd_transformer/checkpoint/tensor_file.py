"""safetensors files that several ranks write, each its fragments, and that are read a few rows at a time.

8 bytes: length of the header | header: JSON, {name: {dtype, shape, data_offsets}} | the tensors' bytes
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
    """A piece of a flat tensor: equal blocks, equally far apart."""

    length: int
    stride: int
    offset: int

    @classmethod
    def of(cls, shape: Sequence[int], cut: tuple[int, int] | None, index: int, count: int) -> "StridedBlocks":
        """The piece for rank `index` of `count` of a tensor cut as in `parallel.tensor`; None: all of it."""
        if cut is None or count == 1:
            return cls(prod(shape), prod(shape), 0)
        dim, parts = cut
        inner, size = prod(shape[dim + 1 :]), shape[dim] // parts
        places = split_range(size, index, count)
        return cls(len(places) * inner, size * inner, places.start * inner)

    def before(self, place: int) -> int:
        """How many numbers of the piece come before this place of the whole."""
        block, within = divmod(place, self.stride)
        return block * self.length + min(max(within - self.offset, 0), self.length)


@dataclass(frozen=True)
class TensorShard:
    """The numbers from `start` on of a rank's piece of a tensor of this shape: `values` [n], in any memory."""

    shape: tuple[int, ...]
    blocks: StridedBlocks
    start: int
    values: Tensor

    @classmethod
    def whole(cls, tensor: Tensor) -> "TensorShard":
        shape = tuple(tensor.shape)
        return cls(shape, StridedBlocks.of(shape, None, 0, 1), 0, tensor.flatten())

    def runs(self, first: int, last: int) -> Iterator[tuple[int, Tensor]]:
        """What it has of the whole's places [first, last): views of `values`, each with the place it begins at."""
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
# Header lengths are multiples of this many bytes.
_ALIGNMENT = 8


def create(file: Path, fragments: Mapping[str, TensorShard]) -> None:
    """Makes the file at its full size, for the whole of each named tensor; their values are still zero."""
    # Hugging Face's readers want to know whose tensors these are.
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, fragment in fragments.items():
        dtype = fragment.values.dtype
        stop = position + prod(fragment.shape) * dtype.itemsize
        entries[name] = {"dtype": _DTYPES[dtype], "shape": fragment.shape, "data_offsets": [position, stop]}
        position = stop
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _ALIGNMENT)
    with file.open("xb") as opened:
        opened.write(len(header).to_bytes(8, "little") + header)
        opened.truncate(opened.tell() + position)


def write(file: Path, fragments: Mapping[str, TensorShard]) -> None:
    """Writes what the fragments have into a file that was created; others may write theirs at the same time."""
    with file.open("r+b", buffering=0) as opened:
        length = int.from_bytes(opened.read(8), "little")
        entries = json.loads(opened.read(length))
        for name, fragment in fragments.items():
            values, begin = fragment.values, 8 + length + entries[name]["data_offsets"][0]
            for place, run in fragment.runs(0, prod(fragment.shape)):
                _write_all(opened.fileno(), run, begin + place * values.element_size())
        os.fsync(opened.fileno())


def check(file: Path, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raises `UserError` where names or shapes are not those of the file."""
    with _reading(file), safe_open(file, framework="pt") as opened:
        if odd := sorted(set(opened.keys()) ^ set(shapes)):
            where = "in the model but not in the file" if odd[0] in shapes else "in the file but not in the model"
            raise UserError(f"{file}: of another model: {odd[0]} is {where}")
        for name, shape in shapes.items():
            found = opened.get_slice(name).get_shape()
            if list(found) != list(shape):
                raise UserError(f"{file}: of another model: {name} is {list(found)}, not {list(shape)}")


def read(file: Path, rows: Iterable[tuple[str, int, int]]) -> Iterator[Tensor]:
    """These rows [first, last) of tensors, one after the other."""
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
