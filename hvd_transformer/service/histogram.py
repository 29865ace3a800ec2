"""Counts of durations in classes, for monitoring: how long jobs waited, how long a pass of the scheduler took."""

import threading
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple


class Counts(NamedTuple):
    """A histogram at one moment. `at_most[i]`: number of values up to `bounds[i]`; `total`: number of all."""

    bounds: tuple[float, ...]
    at_most: tuple[int, ...]
    total: int
    sum: float


class Histogram:
    """Thread-safe; its size does not grow with the number of values."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: the upper ends of the classes, ascending."""
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        self._turn = threading.Lock()

    def observe(self, value: float) -> None:
        """Count one value."""
        with self._turn:
            self._counts[bisect_left(self._bounds, value)] += 1
            self._sum += value

    def counts(self) -> Counts:
        """What has been counted."""
        with self._turn:
            *at_most, total = accumulate(self._counts)
            return Counts(self._bounds, tuple(at_most), total, self._sum)
