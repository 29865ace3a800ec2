"""Reduces points to what a screen can show: at most two per pixel column, its smallest and its largest value."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hvd_transformer.service.runs.metrics.pyramid import Extremes, Point


class Points(NamedTuple):
    """Points in the order of `x`. A `y` of None is a gap. `n`: how many points there are in this range of the curve."""

    x: list[float]
    y: list[float | None]
    n: int


def reduce(extremes: Extremes, edges: Iterable[float]) -> list[Point]:
    """The smallest and the largest value of each pixel, in the order of their steps. NaN is a gap.

    `edges`: the steps, in ascending order, at which one pixel ends and the next one begins. A pixel shows a gap only if
    there is nothing else in it.
    """
    low, high = extremes
    low_values, high_values = _without_gaps(low.values, math.inf), _without_gaps(high.values, -math.inf)
    points: list[Point] = []
    low_start = high_start = 0
    for edge in (*edges, math.inf):
        low_stop, high_stop = bisect_left(low.steps, edge, low_start), bisect_left(high.steps, edge, high_start)
        found = []
        if low_start < low_stop:
            place = low_values.index(min(low_values[low_start:low_stop]), low_start, low_stop)
            found.append((low.steps[place], low.values[place]))
        if high_start < high_stop:
            place = high_values.index(max(high_values[high_start:high_stop]), high_start, high_stop)
            found.append((high.steps[place], high.values[place]))
        points += sorted({point for point in found if not math.isnan(point[1])}) or found[:1]
        low_start, high_start = low_stop, high_stop
    return points


def _without_gaps(values: Sequence[float], instead: float) -> Sequence[float]:
    """The values with `instead` for each NaN, which has no order."""
    if not math.isnan(sum(values)):
        return values
    return [instead if math.isnan(value) else value for value in values]
