"""What a curve may be drawn over instead of steps: seconds of training, samples, tokens.

A line of metrics.jsonl has no time, but the speed since the line before it: seconds are summed from
`milliseconds_per_step`, tokens from those and `tokens_per_second`. So they are of training alone, without evaluations,
checkpoints and waiting, and comparable between runs that were interrupted. `samples` are in the line.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable

from hvd_transformer.service.runs.metrics.metrics_rows import Row, number

AXES = ("step", "seconds", "samples", "tokens")
_MOST = 1e18  # on any axis: nonsense in a file adds up to no infinity
_THIN = 16  # lines per point of the table; between the points, all axes are taken to be linear


class Axes:
    """Steps against the other axes of one run: a table that grows by a point every few lines."""

    def __init__(self) -> None:
        self._table = {axis: array("d", [0.0]) for axis in AXES}
        self._now = dict.fromkeys(AXES, 0.0)  # of the last line; the table's last point may be older
        self._lines = 0

    def add(self, rows: Iterable[Row]) -> None:
        """Take the next lines, in the order of their steps."""
        now = self._now
        for row in rows:
            milliseconds, samples = number(row.get("milliseconds_per_step")), number(row.get("samples"))
            if milliseconds is None and samples is None:  # of an evaluation
                continue
            seconds = min((row["step"] - now["step"]) * max(0.0, float(milliseconds or 0.0)) / 1000, _MOST)
            now["step"] = row["step"]
            tokens = seconds * max(0.0, number(row.get("tokens_per_second")) or 0.0)
            now["seconds"] = min(now["seconds"] + seconds, _MOST)
            now["tokens"] = min(now["tokens"] + tokens, _MOST)
            now["samples"] = min(max(now["samples"], samples or 0.0), _MOST)
            self._lines += 1
            if self._lines % _THIN == 0:
                for axis, values in self._table.items():
                    values.append(now[axis])

    def of_steps(self, axis: str, steps: Iterable[float]) -> list[float]:
        """The places on an axis of some steps in ascending order."""
        if axis == "step":
            return list(steps)
        return self._convert("step", axis, steps)

    def steps_at(self, axis: str, places: Iterable[float]) -> list[float]:
        """The steps at some places on an axis in ascending order."""
        if axis == "step":
            return list(places)
        return self._convert(axis, "step", places)

    def step_of(self, axis: str, place: float, *, last: bool = False) -> float:
        """The step at a place on an axis: the first one there or, with `last`, the last one.

        Beyond the end it is the last step: what comes after it, an evaluation, belongs there.
        """
        if axis == "step":
            return place
        own, steps = self._with_end(axis), self._with_end("step")
        after = bisect_right(own, place) if last else bisect_left(own, place)
        if after == len(own):
            return float("inf") if last else steps[-1]
        if after == 0:
            return steps[0]
        before, behind = own[after - 1], own[after]
        part = (place - before) / (behind - before) if behind > before else 0.0
        return steps[after - 1] + part * (steps[after] - steps[after - 1])

    @property
    def memory(self) -> int:
        """Bytes of memory."""
        return sum(8 * len(values) for values in self._table.values())

    def _with_end(self, axis: str) -> "array[float]":
        table = self._table[axis]
        return table if self._table["step"][-1] == self._now["step"] else table + array("d", [self._now[axis]])

    def _convert(self, source: str, target: str, places: Iterable[float]) -> list[float]:
        own, other = self._with_end(source), self._with_end(target)
        found, after = [], 1
        for place in places:
            if after < len(own) and own[after] < place:
                after = bisect_left(own, place, after)
            if after >= len(own):
                found.append(other[-1])
                continue
            before, behind = own[after - 1], own[after]
            part = (place - before) / (behind - before) if behind > before else 0.0
            found.append(other[after - 1] + part * (other[after] - other[after - 1]))
        return found
