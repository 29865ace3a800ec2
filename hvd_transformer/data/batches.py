"""Batches of windows, of columns, and of examples of similar length (length bucketing)."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hvd_transformer.data.prepared import TokenFile
from hvd_transformer.data.sampler import Permutation, Replica, share


class Batch(NamedTuple):
    """Token numbers and the token numbers that follow them, both [B, T], int64."""

    inputs: Tensor
    targets: Tensor


class WindowDataset:
    """Training samples of `length` consecutive tokens, in an order determined by seed and epoch alone.

    Each epoch cuts the text at another offset, so that over the epochs every token appears at every position of a
    window. Memory does not grow with the number of tokens.
    """

    def __init__(self, tokens: TokenFile, length: int, seed: int) -> None:
        self.tokens, self.length, self.seed = tokens, length, seed
        # One window fewer than would fit leaves room to shift the offset; the tokens left out change every epoch.
        self.num_items = max(1, (len(tokens) - 1) // length - 1)

    def batch(self, epoch: int, items: range) -> Batch:
        """The samples at these positions of the epoch's order."""
        order = Permutation(self.num_items, (self.seed, epoch))
        slack = len(self.tokens) - self.num_items * self.length
        offset = int(np.random.SeedSequence((self.seed, epoch, 1)).generate_state(1)[0]) % slack
        starts = order[np.arange(items.start, items.stop)] * self.length + offset
        return _batch([self.tokens[start : start + self.length + 1] for start in starts.tolist()])


class ColumnDataset:
    """The text as `num_columns` columns, cut into stretches of `length` rows (`batchify` of the PyTorch tutorial).

    An item is one stretch of all columns. The last stretch may be shorter; tokens that do not fill a row are left out,
    as in the tutorial.
    """

    def __init__(self, tokens: TokenFile, num_columns: int, length: int) -> None:
        self.tokens, self.num_columns, self.length = tokens, num_columns, length
        self.num_rows = len(tokens) // num_columns
        self.num_items = max(0, -(-(self.num_rows - 1) // length))

    def batch(self, epoch: int, items: range) -> Batch:
        """The stretch at this position; every epoch keeps the order of the text."""
        (item,) = items
        first = item * self.length
        last = min(first + self.length, self.num_rows - 1)
        starts = [column * self.num_rows for column in range(self.num_columns)]
        return _batch([self.tokens[start + first : start + last + 1] for start in starts])


def evaluation_batches(tokens: TokenFile, length: int, batch_size: int, replica: Replica) -> Iterator[Batch]:
    """This replica's part of all windows. Together, the replicas see every token but the first as a target exactly
    once."""
    last = len(tokens) - 1
    windows = share(range(-(-last // length)), replica)
    whole = range(windows.start, min(windows.stop, last // length))
    for first in range(whole.start, whole.stop, batch_size):
        batch = whole[first - whole.start : first - whole.start + batch_size]
        yield _batch([tokens[window * length : window * length + length + 1] for window in batch])
    for window in windows[len(whole) :]:  # the end of the text, shorter than a window
        yield _batch([tokens[window * length : last + 1]])


def _batch(rows: list[NDArray[np.unsignedinteger]]) -> Batch:
    block = torch.from_numpy(np.stack(rows).astype(np.int64))
    return Batch(block[:, :-1].contiguous(), block[:, 1:].contiguous())


class LengthBuckets:
    """Training batches of samples of similar length, in random order.

    `lengths` (N,) are in tokens. A batch has at most `batch_size` samples or, if `batch_tokens` is given, at most that
    many tokens including padding: the number of its samples times the longest of them.
    """

    def __init__(self, lengths: NDArray[np.int64], batch_size: int, batch_tokens: int | None, seed: int) -> None:
        self.lengths, self.seed = lengths, seed
        self.bounds = _cut(np.sort(lengths), batch_size, batch_tokens)
        self.num_items = len(self.bounds) - 1  # batches per epoch
        self._order: tuple[int, NDArray[np.int64]] | None = None

    def item(self, epoch: int, number: int) -> NDArray[np.int64]:
        """The numbers of the samples in the batch at this position of the epoch (B,)."""
        place = int(Permutation(self.num_items, (self.seed, epoch, 2))[np.array([number])][0])
        return self._sorted(epoch)[self.bounds[place] : self.bounds[place + 1]]

    def _sorted(self, epoch: int) -> NDArray[np.int64]:
        """All samples ordered by length; samples of equal length are in random order."""
        if self._order is None or self._order[0] != epoch:
            shuffled = Permutation(len(self.lengths), (self.seed, epoch))[np.arange(len(self.lengths))]
            self._order = epoch, shuffled[np.argsort(self.lengths[shuffled], kind="stable")]
        return self._order[1]


def in_order(
    lengths: NDArray[np.int64], batch_size: int, batch_tokens: int | None, replica: Replica
) -> Iterator[NDArray[np.int64]]:
    """A replica's evaluation batches, ordered by length. Together, the replicas see every sample exactly once."""
    order = np.argsort(lengths, kind="stable")
    bounds = _cut(lengths[order], batch_size, batch_tokens)
    for number in share(range(len(bounds) - 1), replica):
        yield order[bounds[number] : bounds[number + 1]]


def _cut(lengths: NDArray[np.int64], batch_size: int, batch_tokens: int | None) -> list[int]:
    """The start of each batch of samples with these increasing lengths, and the end of the last one."""
    if batch_tokens is None:
        return [*range(0, len(lengths), batch_size), len(lengths)]
    bounds = [0]
    while (start := bounds[-1]) < len(lengths):
        # Padded to the longest, samples start … stop - 1 have (stop - start) × lengths[stop - 1] tokens.
        most = lengths[start : start + batch_tokens // max(1, int(lengths[start])) + 1]
        fitting = int(np.searchsorted(most * np.arange(1, len(most) + 1), batch_tokens, side="right"))
        bounds.append(start + max(1, fitting))
    return bounds
