"""The minima and maxima of one curve at several resolutions, so that a view of it costs what it has pixels.

level 0   16 points per chunk: where the smallest and the largest value are, and what they are
level 1   4 chunks of level 0 per chunk, and so on

A spike is the largest value of its chunk at every level, so no view can miss it.

Where memory is short, `coarsen` gives up all points or level 0: then the chunks of what was level 1 are the finest.
"""

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from hvd_transformer.service.runs.metrics.metrics_rows import Column

_CHUNK = 16  # points
_FAN = 4
# All points of a curve are kept up to this number: curves of few points, such as of evaluations, are drawn from them.
MOST_RAW = 16_384
_LEAST_RAW, _LEAST_CHUNKS = 4096, 1024  # that are left when memory is short: what a chart of some 500 pixels shows
_PER_PIXEL = 2  # chunks, at least, of the level that a view is made of
Point = tuple[float, float]  # step, value; NaN is a gap


class Extremes(NamedTuple):
    """The smallest and the largest values of some chunks, each in the order of their steps."""

    low: Column
    high: Column

    @property
    def ends(self) -> list[float]:
        """The first and the last step; empty if there are no points."""
        steps = [*self.low.steps[:1], *self.high.steps[:1], *self.low.steps[-1:], *self.high.steps[-1:]]
        return [min(steps), max(steps)] if steps else []


class _Level:
    """Chunks in order: the step and the value of the smallest and of the largest value of each. NaN: all are gaps."""

    def __init__(self) -> None:
        self.low_steps, self.lows, self.high_steps, self.highs = (array("d") for _ in range(4))

    def __len__(self) -> int:
        return len(self.lows)

    def cut(self, length: int) -> None:
        for values in self.arrays():
            del values[length:]

    def append(self, low: Point, high: Point) -> None:
        self.low_steps.append(low[0])
        self.lows.append(low[1])
        self.high_steps.append(high[0])
        self.highs.append(high[1])

    def arrays(self) -> "Sequence[array[float]]":
        return (self.low_steps, self.lows, self.high_steps, self.highs)

    def count(self, first: float, last: float) -> int:
        """How many chunks there are between two steps. The steps of a chunk are not above those of the next."""
        return bisect_right(self.low_steps, last) - bisect_left(self.low_steps, first)

    def between(self, first: float, last: float) -> Extremes:
        """What is between two steps."""
        low, high = Column(self.low_steps, self.lows), Column(self.high_steps, self.highs)
        return Extremes(_cut(low, first, last), _cut(high, first, last))


class Pyramid:
    """One curve. Points come in the order of their steps."""

    def __init__(self) -> None:
        self.count = 0
        self._chunk = _CHUNK
        self._raw: Column | None = Column(array("d"), array("d"))
        self._rest = Column(array("d"), array("d"))  # the points of the last chunk of level 0
        self._levels = [_Level()]

    def add(self, steps: "array[float]", values: "array[float]") -> None:
        """Take the next points."""
        self.count += len(values)
        if self._raw is not None and self.count <= MOST_RAW:
            self._raw.steps.extend(steps)
            self._raw.values.extend(values)
        else:
            self._raw = None
        if len(self._rest.values) == self._chunk:
            self._rest = Column(array("d"), array("d"))
        elif self._rest.values:
            self._levels[0].cut(len(self._levels[0]) - 1)
            steps, values = self._rest.steps + steps, self._rest.values + values
        changed = len(self._levels[0])
        _add_chunks(self._levels[0], steps, values, self._chunk)
        last = (len(values) - 1) // self._chunk * self._chunk
        self._rest = Column(steps[last:], values[last:])
        self._raise(changed)

    def view(self, first: float, last: float, width: int) -> Extremes:
        """All minima and maxima between two steps, of about `_PER_PIXEL` to 8 chunks per pixel."""
        chosen, *coarser = self._levels
        for level in coarser:
            if level.count(first, last) < _PER_PIXEL * width:
                break
            chosen = level
        return chosen.between(first, last)

    def between(self, first: float, last: float) -> Column | None:
        """All points between two steps; None if they are not kept."""
        if self._raw is None:
            return None
        return _cut(self._raw, first, last)

    def num_points(self, first: float, last: float) -> int:
        """How many points there are between two steps, to within a chunk at either end."""
        if self._raw is not None:
            return bisect_right(self._raw.steps, last) - bisect_left(self._raw.steps, first)
        return min(self.count, self._chunk * self._levels[0].count(first, last))

    def coarsen(self) -> None:
        """Take less memory, if it takes more than a chart needs: without all points, and with one level less."""
        if self.count > _LEAST_RAW:
            self._raw = None
        if len(self._levels[0]) > _LEAST_CHUNKS:
            del self._levels[0]
            self._chunk *= _FAN
            self._rest = Column(array("d"), array("d"))  # the last chunk has been begun without them, and stays short

    @property
    def memory(self) -> int:
        """Bytes of memory."""
        raw = 0 if self._raw is None else 16 * len(self._raw.values)
        return raw + 32 * sum(map(len, self._levels))

    def _raise(self, changed: int) -> None:
        """Renew the upper levels, as level 0 has changed from this chunk on."""
        number = 1
        while len(self._levels[number - 1]) > _FAN:
            if number == len(self._levels):
                self._levels.append(_Level())
                changed = 0
            below, level = self._levels[number - 1], self._levels[number]
            changed //= _FAN
            level.cut(changed)
            for start in range(changed * _FAN, len(below), _FAN):
                part = slice(start, start + _FAN)
                level.append(
                    smallest(below.low_steps[part], below.lows[part]),
                    largest(below.high_steps[part], below.highs[part]),
                )
            number += 1


def _cut(column: Column, first: float, last: float) -> Column:
    part = slice(bisect_left(column.steps, first), bisect_right(column.steps, last))
    return Column(column.steps[part], column.values[part])


def _add_chunks(level: _Level, steps: "array[float]", values: "array[float]", chunk: int) -> None:
    for start in range(0, len(values), chunk):
        own_steps, own = steps[start : start + chunk], values[start : start + chunk]
        level.append(smallest(own_steps, own), largest(own_steps, own))


def smallest(steps: Sequence[float], values: Sequence[float]) -> Point:
    """The first of the smallest values; a gap if there are gaps only."""
    if math.isnan(sum(values)):
        values = [math.inf if value != value else value for value in values]
    low = min(values)
    return (steps[values.index(low)], low) if low < math.inf else (steps[0], math.nan)


def largest(steps: Sequence[float], values: Sequence[float]) -> Point:
    """The first of the largest values; a gap if there are gaps only."""
    if math.isnan(sum(values)):
        values = [-math.inf if value != value else value for value in values]
    high = max(values)
    return (steps[values.index(high)], high) if high > -math.inf else (steps[-1], math.nan)
