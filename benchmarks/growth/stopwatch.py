"""Seconds that an action takes on a shared machine."""

import time
from collections.abc import Callable
from pathlib import Path

_SCHEDULER = Path("/proc/thread-self/schedstat")


class Stopwatch:
    """Begins when it is made. The time in which this thread could have run, but another process had its core, does not
    count; where it sleeps or waits for a disk counts."""

    def __init__(self) -> None:
        self._began = _now()

    def seconds(self) -> float:
        return _now() - self._began


def seconds(action: Callable[[], object]) -> float:
    """How long it takes."""
    watch = Stopwatch()
    action()
    return watch.seconds()


def _now() -> float:
    try:
        waited = int(_SCHEDULER.read_text().split()[1]) / 1e9  # seconds on a run queue
    except OSError:
        waited = 0.0
    return time.perf_counter() - waited
