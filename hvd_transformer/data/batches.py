"""Batches of windows, of columns, and of examples of similar length (length bucketing)."""

import heapq
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hvd_transformer.data.length_order import Cut, LengthOrder
from hvd_transformer.data.sampler import NeighborSampler, Permutation, Replica, StepSampler, share
from hvd_transformer.data.token_file import Tokens


class Batch(NamedTuple):
    """Token numbers and the token numbers that follow them, both [B, T], int64."""

    inputs: Tensor
    targets: Tensor


class WindowDataset:
    """Training samples of `length` consecutive tokens, in an order determined by seed and epoch alone.

    Each epoch cuts the text at another offset, so that over the epochs every token appears at every position of a
    window. Memory does not grow with the number of tokens.
    """

    _AHEAD = 512  # places in the order that are computed at once where steps are short: a few cost as much as all

    def __init__(self, tokens: Tokens, length: int, seed: int) -> None:
        self.tokens, self.length, self.seed = tokens, length, seed
        # One window fewer than would fit leaves room to shift the offset; the tokens left out change every epoch.
        self.num_items = max(1, (len(tokens) - 1) // length - 1)
        self._epoch, self._places = -1, range(0)  # of this epoch, where the samples at these places start
        self._starts = np.empty(0, np.int64)

    def batch(self, epoch: int, items: range) -> Batch:
        """The samples at these positions of the epoch's order."""
        known = self._places
        if epoch != self._epoch or items.start < known.start or items.stop > known.stop:
            goes_on = epoch == self._epoch and known.start <= items.start < known.stop + self._AHEAD // 2
            ahead = min(items.start + self._AHEAD, self.num_items) if goes_on else 0
            known = range(items.start, max(items.stop, ahead))
            self._starts = self._find_starts(epoch, known)
            self._epoch, self._places = epoch, known
        starts = self._starts[items.start - known.start : items.stop - known.start]
        return _batch([self.tokens[start : start + self.length + 1] for start in starts.tolist()])

    def _find_starts(self, epoch: int, places: range) -> NDArray[np.int64]:
        order = Permutation(self.num_items, (self.seed, epoch))
        slack = len(self.tokens) - self.num_items * self.length
        offset = int(np.random.SeedSequence((self.seed, epoch, 1)).generate_state(1)[0]) % slack
        return order[np.arange(places.start, places.stop)] * self.length + offset


class ColumnDataset:
    """The text as `num_columns` columns, cut into stretches of `length` rows (`batchify` of the PyTorch tutorial).

    An item is one stretch of all columns. The last stretch may be shorter; tokens that do not fill a row are left out,
    as in the tutorial.
    """

    def __init__(self, tokens: Tokens, num_columns: int, length: int) -> None:
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


def evaluation_batches(
    tokens: Tokens, length: int, batch_size: int, replica: Replica, most: int | None = None
) -> Iterator[Batch]:
    """This replica's part of the first `most` windows, or of all. Together, the replicas see every token of these but
    the first as a target exactly once."""
    last = len(tokens) - 1 if most is None else min(len(tokens) - 1, most * length)
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
    """Training batches of samples of similar length.

    A batch has at most `batch_size` samples or, if `batch_tokens` is given, at most that many tokens including padding
    (see `Cut`). Batches of `batch_tokens` cost about the same whatever their length, so an epoch has them in random
    order. Batches of `batch_size` samples cost as much as they are long, so they stay ordered by length, and
    `NeighborSampler` makes each step of neighbours. In both cases samples of equal length are in random order, so that
    a sample meets others in every epoch, and samples that lie side by side in the data are spread over the epoch.
    """

    def __init__(self, order: LengthOrder, batch_size: int, batch_tokens: int | None, seed: int) -> None:
        self.order, self.seed = order, seed
        self.cut = Cut(order, batch_size, batch_tokens)
        self.num_items = len(self.cut)  # batches per epoch
        self.is_even = batch_tokens is not None  # all batches cost about the same

    def sampler(self, step_size: int, replica: Replica) -> StepSampler | NeighborSampler:
        """Steps of so many batches over all replicas, in which every replica has about the same work."""
        if self.is_even:
            return StepSampler(self.num_items, step_size, 1, replica)
        return NeighborSampler(self.num_items, step_size, self.seed, replica)

    def item(self, epoch: int, number: int) -> NDArray[np.int64]:
        """The numbers of the samples in this batch of the epoch (B,)."""
        if self.is_even:
            number = int(Permutation(self.num_items, (self.seed, epoch, 2))[np.array([number])][0])
        places = self.cut[number]
        return self.order.shuffled(places.start, places.stop, (self.seed, epoch))


# Evaluation is cut into at least this many batches per replica, which deals them evenly.
_LEAST_BATCHES = 8


def dealt_batches(
    order: LengthOrder, batch_size: int, batch_tokens: int | None, replica: Replica
) -> Iterator[NDArray[np.int64]]:
    """A replica's evaluation batches, the longest first. Together, the replicas see every sample exactly once.

    Each batch goes to the replica that has the fewest tokens so far, padding included (longest processing time first,
    Graham 1969). If there are few samples per replica, batches are smaller.
    """
    if replica.size > 1:
        parts = _LEAST_BATCHES * replica.size
        batch_size = max(1, min(batch_size, len(order) // parts))
        batch_tokens = None if batch_tokens is None else max(1, min(batch_tokens, order.num_tokens // parts))
    loads = [(0, rank) for rank in range(replica.size)]  # a heap
    for places, tokens in Cut(order, batch_size, batch_tokens).longest_first():
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + tokens, rank))
        if rank == replica.rank:
            yield order.samples(places.start, places.stop)
