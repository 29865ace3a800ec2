"""Where the numbers that one rank has of a tensor lie in the whole of it.

whole     | .. ## .. .. | .. ## .. .. | .. ## .. .. |     one block of `length` in each `stride`, after `offset`
piece     | ## ## ## |                                    of a rank's share of a matrix
fragment      ## #                                        of a rank's shard of its bucket
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from hvd_transformer.parallel.tensor import span


@dataclass(frozen=True)
class Blocks:
    """A piece of a flat tensor: equal blocks, equally far apart."""

    length: int
    stride: int
    offset: int

    @classmethod
    def of(cls, shape: Sequence[int], cut: tuple[int, int] | None, index: int, count: int) -> "Blocks":
        """The piece for rank `index` of `count` of a tensor cut as in `parallel.tensor`; None: all of it."""
        if cut is None or count == 1:
            return cls(prod(shape), prod(shape), 0)
        dim, parts = cut
        inner, size = prod(shape[dim + 1 :]), shape[dim] // parts
        places = span(size, index, count)
        return cls(len(places) * inner, size * inner, places.start * inner)

    def before(self, place: int) -> int:
        """How many numbers of the piece come before this place of the whole."""
        block, within = divmod(place, self.stride)
        return block * self.length + min(max(within - self.offset, 0), self.length)


@dataclass(frozen=True)
class Fragment:
    """The numbers from `start` on of a rank's piece of a tensor of this shape: `values` [n], in any memory."""

    shape: tuple[int, ...]
    blocks: Blocks
    start: int
    values: Tensor

    @classmethod
    def whole(cls, tensor: Tensor) -> "Fragment":
        shape = tuple(tensor.shape)
        return cls(shape, Blocks.of(shape, None, 0, 1), 0, tensor.flatten())

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
