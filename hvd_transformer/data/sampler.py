"""Which samples each replica takes in each step of an epoch, and which remain.

An epoch consists of the items 0 … N-1. The items not yet seen are kept as a list of intervals, which fully describes
the position in the data for any number of replicas. A resumed job therefore sees each remaining item exactly once, even
if the number of replicas has changed. Every replica takes the same number of steps; if the items of a step cannot be
divided evenly, some replicas get one fewer, or none.

    windows   item = position in the shuffled order     step k of 2 replicas:  | r0 r0 r0 r1 r1 r1 | next step …
    columns   item = stretch of sequence_length rows    replica 0: | k k+1 …   |   replica 1: | k k+1 …   |
    buckets   item = batch, ordered by length           step k: … | r0 r1 r0 r1 | … step k + 1 is elsewhere
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8


class Permutation:
    """A pseudorandom bijection of range(length), determined by `key` alone: a Feistel network with cycle walking (Black
    and Rogaway 2002). Its memory does not grow with the length.

    `order[indices]` maps an array of indices in [0, length), int64.
    """

    def __init__(self, length: int, key: tuple[int, ...]) -> None:
        self.length = length
        self._half_bits = max(1, ((length - 1).bit_length() + 1) // 2)
        self._mask = np.uint64((1 << self._half_bits) - 1)
        self._round_keys = np.random.SeedSequence(key).generate_state(_ROUNDS, np.uint64)

    def __getitem__(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        values = self._encrypt(indices.astype(np.uint64))
        outside = values >= self.length
        while outside.any():
            values[outside] = self._encrypt(values[outside])
            outside = values >= self.length
        return values.astype(np.int64)

    def _encrypt(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        shift = np.uint64(self._half_bits)
        left, right = values >> shift, values & self._mask
        for key in self._round_keys:
            left, right = right, left ^ (_mix(right + key) & self._mask)
        joined: NDArray[np.uint64] = (left << shift) | right
        return joined


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finalizer (Steele, Lea and Flood 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed


Intervals = list[tuple[int, int]]


@dataclass(frozen=True)
class StepPlan:
    """One step of one replica: the items of each accumulation step, and what remains of the epoch after the step."""

    accumulation: list[range]
    remaining: Intervals


@dataclass(frozen=True)
class Replica:
    """The rank of this replica among the data-parallel replicas, and their number."""

    rank: int = 0
    size: int = 1


def share(items: range, replica: Replica) -> range:
    """The contiguous part of the items that a replica takes. Sizes differ by at most one; earlier parts are larger."""
    start, stop = (-(-len(items) * rank // replica.size) for rank in (replica.rank, replica.rank + 1))
    return items[start:stop]


class StepSampler:
    """Takes the items in order, `step_size` per step. Each replica divides its part of a step into accumulation steps
    of `batch_size` items; the last one may be smaller.

    For a fixed step size, a step sees the same items for any number of replicas.
    """

    def __init__(self, num_items: int, step_size: int, batch_size: int, replica: Replica) -> None:
        self.num_items, self.step_size, self.batch_size, self.replica = num_items, step_size, batch_size, replica

    def num_steps(self, remaining: Intervals | None = None) -> int:
        """The number of steps from this position to the end of the epoch."""
        return len(self._starts(remaining))

    def epoch(self, remaining: Intervals | None = None, epoch: int = 0) -> Iterator[StepPlan]:
        """The steps from this position (None: the start of the epoch), in all epochs the same."""
        for start in self._starts(remaining):
            stop = min(start + self.step_size, self.num_items)
            own = share(range(start, stop), self.replica)
            accumulation = [own[first : first + self.batch_size] for first in range(0, len(own), self.batch_size)]
            yield StepPlan(accumulation, [(stop, self.num_items)] if stop < self.num_items else [])

    def _starts(self, remaining: Intervals | None) -> range:
        """The first item of each step."""
        if remaining is None:
            return range(0, self.num_items, self.step_size)
        first = remaining[0][0] if remaining else self.num_items
        return range(first, self.num_items, self.step_size)


class ColumnSampler:
    """Cuts what remains into `num_stretches` stretches; a step takes the next `items` items of each. The stretches are
    divided among the replicas.

    For fixed `num_stretches` and `items`, a step sees the same items for any number of replicas.
    """

    def __init__(self, num_items: int, num_stretches: int, items: int, replica: Replica) -> None:
        self.num_items, self.num_stretches, self.items, self.replica = num_items, num_stretches, items, replica

    def num_steps(self, remaining: Intervals | None = None) -> int:
        """The number of steps from this position to the end of the epoch: that of the longest stretch."""
        return -(-max(map(_length, self._stretches(remaining))) // self.items)

    def epoch(self, remaining: Intervals | None = None, epoch: int = 0) -> Iterator[StepPlan]:
        """The steps from this position (None: the start of the epoch), in all epochs the same."""
        stretches = self._stretches(remaining)
        own = share(range(self.num_stretches), self.replica)
        for step in range(self.num_steps(remaining)):
            seen, after = step * self.items, (step + 1) * self.items
            taken = [interval for index in own for interval in _cut(stretches[index], seen, after)]
            left = [_cut(stretch, after, _length(stretch)) for stretch in stretches]
            yield StepPlan([range(item, item + 1) for interval in taken for item in range(*interval)], _merge(left))

    def _stretches(self, remaining: Intervals | None) -> list[Intervals]:
        intervals = [(0, self.num_items)] if remaining is None else remaining
        whole = range(_length(intervals))
        parts = [share(whole, Replica(index, self.num_stretches)) for index in range(self.num_stretches)]
        return [_cut(intervals, part.start, part.stop) for part in parts]


class NeighborSampler:
    """Takes `step_size` neighbouring items per step, at a random place of those that remain. The replicas take them in
    turn, one per accumulation step. If neighbours cost about the same, so do the replicas' parts of a step.

    A step depends on the seed, the epoch and what remains, which is kept as a list of at most `MOST_INTERVALS`: while
    it is shorter, a step is cut out anywhere; then at an end of any of the intervals. An epoch of up to twice that many
    steps therefore has them in random order. In a longer one, the next step is always one of about that many that are
    spread over all items, chosen at random.

    tensor2tensor and fairseq shuffle all batches and let ranks wait for the longest; Hugging Face's
    `LengthGroupedSampler` sorts each 50 batches of a random order, so that the length falls within every 50 steps.

    For a fixed step size, a step sees the same items for any number of replicas. All steps but the last have
    `step_size` items. Where fewer than that lie side by side, a step adds the nearest ones.
    """

    MOST_INTERVALS = 128

    def __init__(self, num_items: int, step_size: int, seed: int, replica: Replica) -> None:
        self.num_items, self.step_size, self.seed, self.replica = num_items, step_size, seed, replica

    def num_steps(self, remaining: Intervals | None = None) -> int:
        """The number of steps from this position to the end of the epoch."""
        return -(-(self.num_items if remaining is None else _length(remaining)) // self.step_size)

    def epoch(self, remaining: Intervals | None = None, epoch: int = 0) -> Iterator[StepPlan]:
        """The steps of this epoch from this position (None: its start)."""
        left = [(0, self.num_items)] if remaining is None else list(remaining)
        for _ in range(self.num_steps(remaining)):
            taken, left = self._take(left, epoch)
            items = [item for interval in taken for item in range(*interval)]
            own = items[self.replica.rank :: self.replica.size]
            yield StepPlan([range(item, item + 1) for item in own], left)

    def _take(self, left: Intervals, epoch: int) -> tuple[Intervals, Intervals]:
        """The items of a step, and what remains after it; both increasing."""
        total = _length(left)
        place = int(np.random.SeedSequence((self.seed, epoch, total)).generate_state(1, np.uint64)[0]) % total
        index = 0
        while place >= left[index][1] - left[index][0]:
            place -= left[index][1] - left[index][0]
            index += 1
        start, stop = left[index]
        size = min(self.step_size, stop - start)
        if len(left) < self.MOST_INTERVALS:
            first = min(start + place // size * size, stop - size)
        else:
            first = start if 2 * place < stop - start else stop - size
        rest = [(start, first), (first + size, stop)]
        taken, left = [(first, first + size)], left[:index] + rest + left[index + 1 :]
        left = [interval for interval in left if interval[0] < interval[1]]
        while (missing := self.step_size - _length(taken)) and left:
            taken, left = _add_nearest(taken, left, missing)
        return taken, left


def _add_nearest(taken: Intervals, left: Intervals, missing: int) -> tuple[Intervals, Intervals]:
    """Move up to `missing` items from `left` to `taken`, both increasing: those nearest to what is taken."""
    after = next((number for number, (start, _) in enumerate(left) if start >= taken[-1][1]), len(left))
    below = taken[0][0] - left[after - 1][1] if after else None
    above = left[after][0] - taken[-1][1] if after < len(left) else None
    if above is None or (below is not None and below < above):
        start, stop = left[after - 1]
        middle = max(start, stop - missing)
        kept = [(start, middle)] if start < middle else []
        return [(middle, stop), *taken], left[: after - 1] + kept + left[after:]
    start, stop = left[after]
    middle = min(stop, start + missing)
    kept = [(middle, stop)] if middle < stop else []
    return [*taken, (start, middle)], left[:after] + kept + left[after + 1 :]


def _length(intervals: Intervals) -> int:
    return sum(stop - start for start, stop in intervals)


def _cut(intervals: Intervals, first: int, last: int) -> Intervals:
    """Items number `first` to `last` - 1 of the intervals, counted across all of them."""
    result: Intervals = []
    for start, stop in intervals:
        low, high = max(first, 0), min(last, stop - start)
        if low < high:
            result.append((start + low, start + high))
        first, last = first - (stop - start), last - (stop - start)
    return result


def _merge(parts: list[Intervals]) -> Intervals:
    """Increasing intervals as one list, in which adjacent intervals are joined."""
    result: Intervals = []
    for start, stop in (interval for part in parts for interval in part):
        if result and result[-1][1] == start:
            start = result.pop()[0]
        result.append((start, stop))
    return result
