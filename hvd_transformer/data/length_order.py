"""The samples of a split by increasing length: worked out once in preparation, then mapped from files.

```
<split>-order.bin      the number of each sample, the shortest first; equally long ones keep the order of the file
<split>-lengths.bin    how many samples have length 0, 1, 2, …
```

A length is a whole number of few different values, so the order is a counting sort, and all that depends on lengths
(`Cut`, the shuffling of equally long samples) is a table of the different lengths, never of the samples.
"""

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_transformer.data.sampler import Permutation

_CHUNK = 2**18  # samples in memory while a split is sorted


class LengthOrder:
    """Samples by increasing length. A place is a position in this order.

    `numbers` (N,) are the samples' numbers by place, `lengths` (K,) the different lengths, increasing, and `ends` (K,)
    the place behind the last sample of each length. Raises `ValueError` if they do not fit together.
    """

    def __init__(self, numbers: NDArray[Any], lengths: NDArray[Any], counts: NDArray[Any]) -> None:
        self.numbers, self.lengths = numbers, lengths.astype(np.int64)
        self.ends: NDArray[np.int64] = np.cumsum(counts, dtype=np.int64)
        if len(self) != int(counts.sum()):
            raise ValueError(f"{len(self)} samples, but the lengths of {int(counts.sum())}")

    @classmethod
    def of(cls, lengths: NDArray[Any]) -> "LengthOrder":
        """Sort samples of these lengths (N,) in memory."""
        different, counts = np.unique(lengths, return_counts=True)
        return cls(np.argsort(lengths, kind="stable"), different, counts)

    @classmethod
    def sorted_before(cls, numbers: NDArray[Any], histogram: NDArray[Any]) -> "LengthOrder":
        """Read what `write_length_order` wrote and returned."""
        (lengths,) = histogram.nonzero()
        return cls(numbers, lengths, histogram[lengths])

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def num_tokens(self) -> int:
        """The sum of all lengths."""
        return int(self.lengths @ np.diff(self.ends, prepend=0))

    def first(self, count: int) -> "LengthOrder":
        """Only the samples that are the first `count` in the order of the data."""
        starts = range(0, len(self), _CHUNK)
        found = [start + np.flatnonzero(self.numbers[start : start + _CHUNK] < count) for start in starts]
        places = np.concatenate([np.empty(0, np.int64), *found])
        counts = np.bincount(np.searchsorted(self.ends, places, side="right"), minlength=len(self.lengths))
        return LengthOrder(self.numbers[places], self.lengths[counts > 0], counts[counts > 0])

    def samples(self, start: int, stop: int) -> NDArray[np.int64]:
        """The numbers of the samples at these places."""
        return self.numbers[start:stop].astype(np.int64)

    def shuffled(self, start: int, stop: int, key: tuple[int, ...]) -> NDArray[np.int64]:
        """Like `samples`, with the samples of each length in a random order determined by `key`."""
        found = []
        while start < stop:
            run = int(np.searchsorted(self.ends, start, side="right"))
            first, end = int(self.ends[run - 1]) if run else 0, int(self.ends[run])
            places = np.arange(start, min(stop, end)) - first
            order = Permutation(end - first, (*key, int(self.lengths[run])))
            found.append(self.numbers[first + order[places]].astype(np.int64))
            start = end
        return np.concatenate(found)


class Cut:
    """Consecutive batches of samples by increasing length: `cut[number]` are the places of a batch.

    A batch has at most `batch_size` samples or, if `batch_tokens` is given, as many as fit into that many tokens
    including padding: their number times the longest of them. A sample longer than that is a batch of its own.

    The batches of one length are equally large, so the table has an entry for each length that fills a batch, and one
    for each batch of several lengths.
    """

    def __init__(self, order: LengthOrder, batch_size: int, batch_tokens: int | None) -> None:
        self.order = order
        self._batches: list[int] = []  # the number of the first batch of each entry
        self._starts: list[int] = []  # its first place
        self._sizes: list[int] = []  # the number of samples of each of the entry's batches
        self._num_batches = 0
        if batch_tokens is None:
            self._add(0, batch_size, -(-len(order) // batch_size))
        else:
            self._fill(batch_tokens)

    def __len__(self) -> int:
        return self._num_batches

    def __getitem__(self, number: int) -> range:
        entry = bisect_right(self._batches, number) - 1
        size = self._sizes[entry]
        start = self._starts[entry] + (number - self._batches[entry]) * size
        return range(start, min(start + size, len(self.order)))

    def longest_first(self) -> Iterator[tuple[range, int]]:
        """The places of each batch from the longest to the shortest, and its tokens including padding."""
        ends, lengths = self.order.ends.tolist(), self.order.lengths.tolist()
        for number in reversed(range(len(self))):
            places = self[number]
            yield places, len(places) * lengths[bisect_right(ends, places[-1])]

    def _add(self, start: int, size: int, count: int) -> None:
        self._batches.append(self._num_batches)
        self._starts.append(start)
        self._sizes.append(size)
        self._num_batches += count

    def _fill(self, batch_tokens: int) -> None:
        ends = self.order.ends.tolist()
        fitting = [max(1, batch_tokens // max(1, length)) for length in self.order.lengths.tolist()]
        start = run = 0
        while start < len(self.order):
            if count := (ends[run] - start) // fitting[run]:
                self._add(start, fitting[run], count)
                start += count * fitting[run]
            elif start < ends[run]:  # what is left of this length is filled up with longer ones
                stop = ends[run]
                for longer in range(run + 1, len(ends)):
                    stop = max(stop, min(ends[longer], start + fitting[longer]))
                    if stop < ends[longer]:
                        break
                self._add(start, stop - start, 1)
                start = stop
            while run < len(ends) and ends[run] <= start:
                run += 1


def write_length_order(path: Path, count: int, lengths: Callable[[int, int], NDArray[np.int64]]) -> NDArray[np.int64]:
    """Sort samples by length into a file; return the number of samples of length 0, 1, 2, …

    `lengths(start, stop)` are those of some samples, in tokens. Memory holds `_CHUNK` samples and the counts.
    """
    chunks = [(start, min(start + _CHUNK, count)) for start in range(0, count, _CHUNK)]
    histogram = np.zeros(1, np.int64)
    for chunk in chunks:
        found = np.bincount(lengths(*chunk), minlength=len(histogram))
        found[: len(histogram)] += histogram
        histogram = found
    dtype = np.dtype(order_dtype(count))
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, count * dtype.itemsize)  # on a full disk a mapped file would kill
    order = np.memmap(path, dtype, "r+", shape=(count,))
    free = np.cumsum(histogram) - histogram  # the place of the next sample of each length
    for chunk in chunks:
        own = lengths(*chunk)
        counts = np.bincount(own, minlength=len(histogram))
        before = np.cumsum(counts) - counts
        places = np.arange(len(own)) + np.repeat(free - before, counts)
        order[places] = chunk[0] + np.argsort(own, kind="stable")
        free += counts
    order.flush()
    return histogram


def order_dtype(count: int) -> str:
    """The number format of the numbers of so many samples."""
    return "<u4" if count <= 2**32 else "<u8"
