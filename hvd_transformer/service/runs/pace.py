"""How long a run still takes, by the speed that its metrics.jsonl grows with: evaluations and checkpoints count."""

import math
import time
from typing import NamedTuple

_LEAST_SECONDS = 20.0  # of the window; before that, the speed in the line must do
_SPACING_SECONDS = 5.0
_MOST = 120  # observations: ten minutes


class Progress(NamedTuple):
    """How far a run is. What is not known is None."""

    step: int
    total_steps: int | None
    seconds_left: float | None
    seconds_per_step: float | None = None


class Pace:
    """Seconds per step of one run, from when its lines were written."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, float]] = []  # time of a line, its step; a deque is large where it is empty
        self._last: tuple[float, float] | None = None
        self._line_steps = 0.0  # between the last two lines
        self._told: float | None = None  # seconds per step in the last line

    def saw(self, modified: float, step: float, milliseconds_per_step: float | None) -> None:
        """Note the newest line. A step before those seen means that the run has begun anew."""
        if self._last is not None:
            if step < self._last[1] or modified < self._last[0]:
                self._seen.clear()
            elif step > self._last[1]:
                self._line_steps = step - self._last[1]
        self._last = modified, step
        if milliseconds_per_step is not None:
            self._told = milliseconds_per_step / 1000
        if not self._seen or modified - self._seen[-1][0] >= _SPACING_SECONDS:
            self._seen = [*self._seen[1 - _MOST :], self._last]

    def seconds_per_step(self) -> float | None:
        """Over the last minutes if the run was seen for that long."""
        if self._last is not None and self._seen:
            began, first = self._seen[0]
            if self._last[0] - began >= _LEAST_SECONDS and self._last[1] > first:
                return (self._last[0] - began) / (self._last[1] - first)
        return self._told

    def seconds_left(self, total_steps: int | None) -> float | None:
        """Until the last step, from now on. Steps since the last line count, up to when the next line is due."""
        per_step = self.seconds_per_step()
        if self._last is None or per_step is None or total_steps is None:
            return None
        modified, step = self._last
        since = min(max(0.0, time.time() - modified), per_step * self._line_steps)
        left = max(0.0, (total_steps - step) * per_step - since)
        return left if math.isfinite(left) else None
