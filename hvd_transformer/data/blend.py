"""Samples of several sources in fixed proportions, in an order that any number of replicas can start anywhere in."""

import math
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import islice

import numpy as np
import torch

from hvd_transformer.data.batches import Batch, WindowDataset

# Multiples of it, modulo 1, lie apart however many there are.
_GOLDEN = (math.sqrt(5) - 1) / 2


class Blend:
    """The order of an epoch that has `sizes[i]` samples of source i: `blend[items]` are (source, number) at the
    positions `items`, number counting the samples of the source.

    Each position takes the source that is furthest behind its share: the samples of source i are due at equal distances
    of 1 / `sizes[i]` of the epoch, and the next one is always the one that is due first. This is stride scheduling
    (Waldspurger and Weihl 1995); the sources start at different fractions of their distance, so that equal ones take
    turns. Blended datasets of Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053) take the source that lacks the most
    samples, which needs a table of the whole epoch; here any position follows from the sizes alone.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes, self.num_items = sizes, sum(sizes)
        self._phases = [(0.5 + source * _GOLDEN) % 1 for source in range(len(sizes))]

    def __getitem__(self, items: range) -> list[tuple[int, int]]:
        return list(islice(self._after(self.counts(items.start)), len(items)))

    def counts(self, position: int) -> list[int]:
        """The number of samples of each source before this position."""
        time = position / self.num_items
        counts = [self._due_before(source, time) for source in range(len(self.sizes))]
        # Rounded to whole samples these may be a few more or less than wanted: less than one per source.
        missing = position - sum(counts)
        for source, number in list(islice(self._after(counts), max(missing, 0))):
            counts[source] = number + 1
        for source, number in list(islice(self._before(counts), max(-missing, 0))):
            counts[source] = number
        return counts

    def _due(self, source: int, number: int) -> float:
        return (number + self._phases[source]) / self.sizes[source]

    def _due_before(self, source: int, time: float) -> int:
        size = self.sizes[source]
        count = max(0, min(size, math.ceil(time * size - self._phases[source])))
        while count and self._due(source, count - 1) >= time:  # of the rounding of `time`
            count -= 1
        while count < size and self._due(source, count) < time:
            count += 1
        return count

    def _after(self, counts: Sequence[int]) -> Iterator[tuple[int, int]]:
        """The samples after so many of each source; of two that are due at once, first that of the first source."""
        left = [(source, count) for source, count in enumerate(counts) if count < self.sizes[source]]
        heapify(due := [(self._due(source, count), source, count) for source, count in left])
        while due:
            _, source, number = due[0]
            yield source, number
            if (number := number + 1) < self.sizes[source]:
                heapreplace(due, (self._due(source, number), source, number))
            else:
                heappop(due)

    def _before(self, counts: Sequence[int]) -> Iterator[tuple[int, int]]:
        """The samples before that, from the last one back."""
        due = [(-self._due(source, count - 1), -source, count - 1) for source, count in enumerate(counts) if count]
        heapify(due)
        while due:
            _, source, number = due[0]
            yield -source, number
            if number:
                heapreplace(due, (-self._due(-source, number - 1), source, number - 1))
            else:
                heappop(due)


def blend_sizes(available: Sequence[int], weights: Sequence[float | None], epochs: Sequence[float]) -> list[int]:
    """The samples of each source in an epoch of the mixture, of `available` ones.

    Without weights each source is read `epochs` times. With weights they are in these proportions, and the epoch ends
    when the first source has been read `epochs` times.
    """
    most = [count * passes for count, passes in zip(available, epochs, strict=True)]
    given = [0.0 if weight is None else weight for weight in weights]
    if not any(given):
        return [max(1, round(count)) for count in most]
    scale = min(count / weight for count, weight in zip(most, given, strict=True) if weight)
    return [max(1, round(scale * weight)) if weight else 0 for weight in given]


class BlendedDataset:
    """Training samples of several datasets of equal length, in the order of `Blend`.

    A source goes on in the next epoch after the sample that it stopped at: it is read as a whole, in random order,
    before any of its samples comes again. Memory does not grow with the number of samples.
    """

    def __init__(self, datasets: Sequence[WindowDataset], sizes: Sequence[int]) -> None:
        self.datasets, self.blend = datasets, Blend(sizes)
        self.num_items = self.blend.num_items

    def batch(self, epoch: int, items: range) -> Batch:
        """The samples at these positions of the epoch's order."""
        sources, numbers = np.array(self.blend[items]).T
        length = self.datasets[0].length
        inputs, targets = (torch.empty(len(items), length, dtype=torch.int64) for _ in range(2))
        for source in np.unique(sources).tolist():
            (places,) = np.nonzero(sources == source)
            first = epoch * self.blend.sizes[source] + int(numbers[places[0]])
            found = self._samples(source, range(first, first + len(places)))
            inputs[places], targets[places] = found
        return Batch(inputs, targets)

    def _samples(self, source: int, numbers: range) -> Batch:
        """These samples of a source, counted from its very first one."""
        dataset, parts = self.datasets[source], []
        while numbers:
            passed, place = divmod(numbers.start, dataset.num_items)
            stop = min(place + len(numbers), dataset.num_items)
            parts.append(dataset.batch(passed, range(place, stop)))
            numbers = numbers[stop - place :]
        return Batch(torch.cat([part.inputs for part in parts]), torch.cat([part.targets for part in parts]))
