"""Where a rank's numbers are in a whole tensor: its piece by tensor parallelism, its shard of that by ZeRO.

A piece is a number of columns of the tensor as a matrix whose rows are `stride` long, and a shard a range of the piece:

    stride 8, two pieces of length 4     | 0 0 0 0 | 1 1 1 1 |
    a shard of piece 1, start 2, n 8     | . . . . | . . x x |
                                         | . . . . | x x x x |
                                         | . . . . | x x . . |
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from torch import Tensor

from hvd_transformer.nn.parallel_layers import split_range

# Bytes of a rectangle that are copied at a time: between devices torch may copy them once more.
_COPY_BYTES = 32 << 20


class Rectangle(NamedTuple):
    """Rows and columns, each from the first to the last, exclusive."""

    top: int
    bottom: int
    left: int
    right: int


@dataclass(frozen=True)
class StridedBlocks:
    """A rank's piece of a flattened tensor: blocks of equal length at equal distances."""

    length: int
    stride: int  # from the start of one block to that of the next
    offset: int  # of the first block

    @classmethod
    def of(
        cls, shape: Sequence[int], split: tuple[int, int] | None = None, index: int = 0, count: int = 1
    ) -> "StridedBlocks":
        """The piece of rank `index` of `count`, for a tensor split as by a `TensorSplit`; None: the whole tensor."""
        if split is None or count == 1:
            return cls(prod(shape), prod(shape), 0)
        dim, parts = split
        inner, size = prod(shape[dim + 1 :]), shape[dim] // parts
        places = split_range(size, index, count)
        return cls(len(places) * inner, size * inner, places.start * inner)

    @property
    def whole(self) -> bool:
        """Whether the piece is the whole tensor."""
        return self.length == self.stride

    def before(self, place: int) -> int:
        """The number of elements of the piece before element `place` of the whole tensor."""
        if self.whole:
            return place
        block, within = divmod(place, self.stride)
        return block * self.length + min(max(within - self.offset, 0), self.length)

    def rectangles(self, start: int, stop: int) -> Iterator[Rectangle]:
        """The elements [start, stop) of the piece in the matrix: at most a part row, whole rows and a part row."""
        while start < stop:
            row, column = divmod(start, self.length)
            left = self.offset + column
            if column or stop - start < self.length:
                count = min(self.length - column, stop - start)
                yield Rectangle(row, row + 1, left, left + count)
            else:
                rows = (stop - start) // self.length
                count = rows * self.length
                yield Rectangle(row, row + rows, left, left + self.length)
            start += count


@dataclass(frozen=True)
class TensorShard:
    """A part of a rank's piece of a tensor: its ZeRO shard, or all of the piece."""

    shape: tuple[int, ...]  # of the whole tensor
    blocks: StridedBlocks  # the piece
    start: int  # of `values` in the piece
    values: Tensor  # [n], contiguous, on any device

    @property
    def stop(self) -> int:
        return self.start + self.values.numel()

    def between(self, first: int, last: int) -> Tensor:
        """The values in [first, last) of the whole tensor: they are neighbours in the piece."""
        start, stop = max(self.blocks.before(first), self.start), min(self.blocks.before(last), self.stop)
        return self.values[start - self.start : max(start, stop) - self.start]


def copy_overlap(target: TensorShard, source: TensorShard) -> None:
    """Copy the numbers that both shards of a tensor have: a few strided copies, however many rows there are."""
    for into, values in overlap(target, source):
        into.copy_(values)


def overlap(target: TensorShard, source: TensorShard) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of the numbers that both shards of a tensor have, in the target and in the source.

    Both are cut alike, but by any number of ranks, or at least one of the two is of the whole tensor.
    """
    stride = target.blocks.stride if source.blocks.whole else source.blocks.stride
    here, there = _with_stride(target.blocks, stride), _with_stride(source.blocks, stride)
    sources = list(there.rectangles(source.start, source.stop))
    for mine in here.rectangles(target.start, target.stop):
        for other in sources:
            top, bottom = max(mine.top, other.top), min(mine.bottom, other.bottom)
            left, right = max(mine.left, other.left), min(mine.right, other.right)
            if top >= bottom or left >= right:
                continue
            step = max(1, _COPY_BYTES // ((right - left) * target.values.element_size()))
            for first in range(top, bottom, step):
                part = Rectangle(first, min(first + step, bottom), left, right)
                yield _view(target, here, part), _view(source, there, part)


def _with_stride(blocks: StridedBlocks, stride: int) -> StridedBlocks:
    if blocks.whole:
        return StridedBlocks(stride, stride, 0)
    assert blocks.stride == stride, "the tensor is cut in two ways"
    return blocks


def _view(shard: TensorShard, blocks: StridedBlocks, part: Rectangle) -> Tensor:
    position = part.top * blocks.length + part.left - blocks.offset - shard.start
    size = (part.bottom - part.top, part.right - part.left)
    return shard.values.as_strided(size, (blocks.length, 1), shard.values.storage_offset() + position)
