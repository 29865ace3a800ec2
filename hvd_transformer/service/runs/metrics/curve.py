"""The curves of one run, from its metrics.jsonl: any key, over steps, seconds, samples or tokens, at any zoom.

The file stays the truth. What is kept of it is in memory alone, at most 2.7 bytes per point of a long run
(`pyramid.py`); close views are read again from the file (`raw_blocks.py`).
"""

import math
import threading
from collections import deque
from pathlib import Path

from hvd_transformer.errors import UserError
from hvd_transformer.service.runs.metrics.axes import AXES, Axes
from hvd_transformer.service.runs.metrics.metrics_file import MetricsFile
from hvd_transformer.service.runs.metrics.metrics_rows import Row, columns, in_order, number, parse
from hvd_transformer.service.runs.metrics.pixels import Points, reduce
from hvd_transformer.service.runs.metrics.pyramid import Extremes, Pyramid
from hvd_transformer.service.runs.metrics.raw_blocks import RawBlocks

COMPARISONS = 3  # of the ranks' work that are kept
_MOST_WIDTH = 4000
_CLOSE = 16  # points per pixel, at most, of a view that is made of all points
_LEAST_BYTES = 50_000  # of memory, with all objects


class Curve:
    """All curves of one run. Safe to use from several threads."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._file = MetricsFile(run / "metrics.jsonl")
        self._lock = threading.Lock()
        self._reset()
        self.complete = threading.Event()  # the file has been read to its end

    def _reset(self) -> None:
        self._restarts = self._file.restarts
        self._keys: dict[str, None] = {}
        self._pyramids: dict[str, Pyramid] = {}
        self._axes, self._blocks = Axes(), RawBlocks(self._run / "metrics.jsonl")
        self._comparisons: deque[Row] = deque(maxlen=COMPARISONS)
        self.last_step = 0.0

    def keys(self) -> list[str]:
        """The keys that have a curve, in the order of their first lines."""
        with self._lock:
            return list(self._pyramids)

    def advance(self, parts: int = 1) -> bool:
        """Read the next parts of the file; returns whether that was all there is. Raises `UserError`."""
        for _ in range(parts):
            with self._lock:
                try:
                    lines = self._file.read()
                except OSError as error:
                    raise UserError(f"{self._run}: metrics.jsonl cannot be read: {error.strerror or error}") from None
                if self._file.restarts != self._restarts:
                    self._reset()
                if lines:
                    self._add(lines)
                if lines is None:
                    self.complete.set()
                    return True
        return False

    def points(
        self, key: str, first: float | None = None, last: float | None = None, width: int = 800, x: str = "step"
    ) -> Points:
        """At most two points for each of `width` pixels from `first` to `last`; None: as far as the curve goes.

        Raises `UserError` for an unknown axis and if the file cannot be read. A key without points has none to show.
        """
        if x not in AXES:
            raise UserError(f"x={x}: no such axis; axes: {', '.join(AXES)}")
        first, last = number(first), number(last)
        width = min(max(width, 1), _MOST_WIDTH)
        with self._lock:
            pyramid = self._pyramids.get(key)
            if pyramid is None:
                return Points([], [], 0)
            begin = -math.inf if first is None else self._axes.step_of(x, first)
            end = math.inf if last is None else self._axes.step_of(x, last, last=True)
            extremes, n = self._between(key, pyramid, begin, end, width)
            if not extremes.ends:
                return Points([], [], 0)
            left, right = self._axes.of_steps(x, extremes.ends)
            left, right = left if first is None else first, right if last is None else last
            pixel = (right - left) / width
            edges = self._axes.steps_at(x, [left + pixel * number for number in range(1, width)])
            points = reduce(extremes, edges)
            xs = self._axes.of_steps(x, [step for step, _ in points])
        return Points(xs, [None if math.isnan(y) else y for _, y in points], n)

    def values_at(self, step: float, prefix: str = "") -> dict[str, float]:
        """The values of the keys with this prefix at one step."""
        found = {}
        with self._lock:
            for key, pyramid in self._pyramids.items():
                if key.startswith(prefix):
                    extremes, _ = self._between(key, pyramid, step, step, 1)
                    for value in extremes.low.values:
                        if not math.isnan(value):
                            found[key] = value
        return found

    def comparisons(self) -> list[Row]:
        """The last lines in which the work of the ranks was compared, to find a slow one."""
        with self._lock:
            return list(self._comparisons)

    def coarsen(self) -> int | None:
        """Take less memory, in bytes: close views are then less exact or read again.

        Returns None if it takes the least, or is in use now: a read of its file may hang, and nobody waits for that.
        """
        if not self._lock.acquire(blocking=False):
            return None
        try:
            before = self._measure()
            self._blocks.forget()
            for pyramid in self._pyramids.values():
                pyramid.coarsen()
            after = self._measure()
        finally:
            self._lock.release()
        return after if after < before else None

    @property
    def memory(self) -> int:
        """Bytes of memory, roughly."""
        with self._lock:
            return self._measure()

    def _measure(self) -> int:
        pyramids = sum(pyramid.memory for pyramid in self._pyramids.values())
        return _LEAST_BYTES + pyramids + self._axes.memory + self._blocks.memory

    def _add(self, lines: bytes) -> None:
        rows = in_order(parse(lines), self.last_step)
        if not rows:
            return
        self._blocks.add(self._file.offset - len(lines), self._file.offset, rows[0]["step"])
        self._axes.add(rows)
        self._comparisons.extend(row for row in rows if "slowest_rank" in row)
        for key, column in columns(rows, self._keys).items():
            if key not in self._pyramids:
                if all(map(math.isnan, column.values)):  # text, so far at least
                    continue
                self._pyramids[key] = Pyramid()
            self._pyramids[key].add(column.steps, column.values)
        self.last_step = rows[-1]["step"]

    def _between(self, key: str, pyramid: Pyramid, first: float, last: float, width: int) -> tuple[Extremes, int]:
        """All points where they are few enough, else the extremes of chunks; and how many there are.

        Without all points in memory, that number is right to within a chunk at either end.
        """
        n = pyramid.num_points(first, last)
        if n <= _CLOSE * width:
            try:
                every = pyramid.between(first, last) or self._blocks.points(key, first, last)
            except OSError as error:
                raise UserError(f"{self._run}: metrics.jsonl cannot be read: {error.strerror or error}") from None
            if every is not None:
                return Extremes(every, every), len(every.steps)
        return pyramid.view(first, last, width), n
