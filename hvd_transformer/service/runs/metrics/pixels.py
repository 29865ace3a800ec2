"""Reduces points to what a screen can show: at most two per pixel column, its smallest and its largest value."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from hvd_transformer.service.runs.metrics.pyramid import largest, smallest


class Points(NamedTuple):
    """Points in the order of `x`. A `y` of None is a gap. `n`: how many points there are in this range of the curve."""

    x: list[float]
    y: list[float | None]
    n: int


def reduce(xs: Sequence[float], ys: Sequence[float], first: float, last: float, width: int, n: int) -> Points:
    """The points, in ascending order from `first` to `last`, for `width` pixels. NaN is a gap.

    A pixel shows a gap only if there is nothing else in it.
    """
    scale = width / (last - first) if last > first else 0.0
    scale = scale if math.isfinite(scale) else 0.0
    pixels = [min(int((x - first) * scale), width - 1) for x in xs]
    points = Points([], [], n)
    start = 0
    while start < len(pixels):
        stop = bisect_right(pixels, pixels[start], start)
        low, high = smallest(xs[start:stop], ys[start:stop]), largest(xs[start:stop], ys[start:stop])
        for x, y in (low,) if low == high or math.isnan(low[1]) else sorted((low, high), key=lambda point: point[0]):
            points.x.append(x)
            points.y.append(None if math.isnan(y) else y)
        start = stop
    return points
