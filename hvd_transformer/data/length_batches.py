"""Batches of samples of about the same length, in an order given by seed and epoch alone.

    lengths   3 3 3 3 4 4 4 | 5 5 5 6 6 | 8 9 9 | 14 17      each with room for so many samples or padded tokens

Samples are sorted by length, those of one length in a new order each epoch, and cut into batches; the batches come
in a shuffled order. The sorted lengths are the same in every epoch, and so are the cuts: an epoch has as many batches
as any other, and a batch is a unit of the sampler, so that steps and the position in the data are those of any task.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from hvd_transformer.data.permutation import Permutation
from hvd_transformer.data.sampler import Replica, share


class LengthBatches:
    """`lengths` (N,) in tokens. A batch has at most `batch_size` samples or, where it is given, `batch_tokens`: its
    samples times the longest of them."""

    def __init__(self, lengths: NDArray[np.int64], batch_size: int, batch_tokens: int | None, seed: int) -> None:
        self.lengths, self.seed = lengths, seed
        self.ends = _cut(np.sort(lengths), batch_size, batch_tokens)
        self._order: tuple[int, NDArray[np.int64]] | None = None

    @property
    def num_units(self) -> int:
        """Batches an epoch."""
        return len(self.ends)

    def unit(self, epoch: int, number: int) -> NDArray[np.int64]:
        """The samples of the epoch's batch at this position (B,)."""
        place = int(Permutation(self.num_units, (self.seed, epoch, 2))[np.array([number])][0])
        start = self.ends[place - 1] if place else 0
        return self._sorted(epoch)[start : self.ends[place]]

    def _sorted(self, epoch: int) -> NDArray[np.int64]:
        """All samples by length."""
        if self._order is None or self._order[0] != epoch:
            shuffled = Permutation(len(self.lengths), (self.seed, epoch))[np.arange(len(self.lengths))]
            self._order = epoch, shuffled[np.argsort(self.lengths[shuffled], kind="stable")]
        return self._order[1]


def in_order(
    lengths: NDArray[np.int64], batch_size: int, batch_tokens: int | None, replica: Replica
) -> Iterator[NDArray[np.int64]]:
    """A replica's part of all samples, by length, for evaluation: together they have each sample once."""
    order = np.argsort(lengths, kind="stable")
    ends = _cut(lengths[order], batch_size, batch_tokens)
    for number in share(range(len(ends)), replica):
        yield order[ends[number - 1] if number else 0 : ends[number]]


def _cut(lengths: NDArray[np.int64], batch_size: int, batch_tokens: int | None) -> list[int]:
    """Where batches of these rising lengths end."""
    if batch_tokens is None:
        return [*range(batch_size, len(lengths), batch_size), len(lengths)]
    ends, start = [], 0
    while start < len(lengths):
        # Padded to the longest, samples start … stop - 1 have (stop - start) × lengths[stop - 1] tokens: it rises.
        most = lengths[start : start + batch_tokens // max(1, int(lengths[start])) + 1]
        fitting = int(np.searchsorted(most * np.arange(1, len(most) + 1), batch_tokens, side="right"))
        start += max(1, fitting)
        ends.append(start)
    return ends
