"""Which samples each replica takes in each step of an epoch, and which remain.

An epoch is the units 0 … N-1. What has not been seen yet is a list of intervals of units; it says all there is
to say about the position in the data, whatever the number of replicas, so a resumed job sees each remaining
unit exactly once, also after that number has changed. Every replica takes the same number of steps; in an
epoch's last ones some have fewer samples, or none.

    windows   unit = position in the shuffled order     step k of 2 replicas:  | r0 r0 r0 r1 r1 r1 | next step …
    columns   unit = stretch of sequence_length rows    replica 0: | k k+1 …   |   replica 1: | k k+1 …   |
"""

from collections.abc import Iterator
from dataclasses import dataclass

Intervals = list[tuple[int, int]]


@dataclass(frozen=True)
class Step:
    """One step of one replica: the units of each round, and what remains of the epoch after it."""

    rounds: list[range]
    remaining: Intervals


@dataclass(frozen=True)
class Replica:
    """This rank's place among the data-parallel replicas."""

    rank: int = 0
    size: int = 1


def share(total: int, replica: Replica) -> range:
    """A replica's contiguous part of `total` things: parts differ by one at most."""
    return range(total * replica.rank // replica.size, total * (replica.rank + 1) // replica.size)


class WindowSampler:
    """Steps go through the order front to back; a round's samples are dealt to the replicas in rank order.

    A step sees the same samples whatever the number of replicas, as long as batch_size × rounds × replicas
    stays the same.
    """

    def __init__(self, num_units: int, batch_size: int, rounds: int, replica: Replica) -> None:
        self.num_units, self.rounds, self.replica = num_units, rounds, replica
        self.round_size = batch_size * replica.size
        self.step_size = self.round_size * rounds

    def num_steps(self, remaining: Intervals | None = None) -> int:
        """Steps from this position to the end of the epoch."""
        first = self._first(remaining)
        return -(-(self.num_units - first) // self.step_size)

    def epoch(self, remaining: Intervals | None = None) -> Iterator[Step]:
        """The steps from this position (None: the epoch's beginning)."""
        for start in range(self._first(remaining), self.num_units, self.step_size):
            stop = min(start + self.step_size, self.num_units)
            # A partial step is spread over its rounds and replicas, so that all have about the same work.
            num_rounds = min(self.rounds, -(-(stop - start) // self.round_size))
            rounds = []
            for index in range(num_rounds):
                part = share(stop - start, Replica(index, num_rounds))
                own = share(len(part), self.replica)
                rounds.append(range(start + part.start + own.start, start + part.start + own.stop))
            yield Step(rounds, [(stop, self.num_units)] if stop < self.num_units else [])

    def _first(self, remaining: Intervals | None) -> int:
        if remaining is None:
            return 0
        return remaining[0][0] if remaining else self.num_units


class ColumnSampler:
    """Each replica walks through its own stretch of what remains, `rounds` units a step."""

    def __init__(self, num_units: int, rounds: int, replica: Replica) -> None:
        self.num_units, self.rounds, self.replica = num_units, rounds, replica

    def num_steps(self, remaining: Intervals | None = None) -> int:
        """Steps from this position to the end of the epoch: those of the longest stretch."""
        return -(-max(map(_length, self._stretches(remaining))) // self.rounds)

    def epoch(self, remaining: Intervals | None = None) -> Iterator[Step]:
        """The steps from this position (None: the epoch's beginning)."""
        stretches = self._stretches(remaining)
        for step in range(self.num_steps(remaining)):
            seen = step * self.rounds
            own = _cut(stretches[self.replica.rank], seen, seen + self.rounds)
            left = [_cut(stretch, seen + self.rounds, _length(stretch)) for stretch in stretches]
            yield Step([range(unit, unit + 1) for part in own for unit in range(*part)], _merge(left))

    def _stretches(self, remaining: Intervals | None) -> list[Intervals]:
        intervals = [(0, self.num_units)] if remaining is None else remaining
        parts = [share(_length(intervals), Replica(rank, self.replica.size)) for rank in range(self.replica.size)]
        return [_cut(intervals, part.start, part.stop) for part in parts]


def _length(intervals: Intervals) -> int:
    return sum(stop - start for start, stop in intervals)


def _cut(intervals: Intervals, first: int, last: int) -> Intervals:
    """The first-th to last-th unit of the intervals, counted through all of them."""
    result: Intervals = []
    for start, stop in intervals:
        low, high = max(first, 0), min(last, stop - start)
        if low < high:
            result.append((start + low, start + high))
        first, last = first - (stop - start), last - (stop - start)
    return result


def _merge(parts: list[Intervals]) -> Intervals:
    """Increasing intervals as one list, neighbours that touch joined."""
    result: Intervals = []
    for start, stop in (interval for part in parts for interval in part):
        if result and result[-1][1] == start:
            start = result.pop()[0]
        result.append((start, stop))
    return result
