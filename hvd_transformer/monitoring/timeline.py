"""What a rank does over time, in Chrome's trace format (chrome://tracing, ui.perfetto.dev).

stage 0      | forward 0 | forward 1 | …
stage 1              | forward 0 | backward 0 | …      one lane per stage and per bucket
allreduce 0                         | bucket.0 |
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

Result = TypeVar("Result")


class Timeline:
    """Records the spans of this rank while `recording`. Lanes are shown in the order of `lanes`, then of first use.

    Times are the host's: on a GPU a span is the time it takes to queue the work. `now` holds the open spans by lane,
    each with its thread; `ended` counts the closed ones, and ticks, whether recording or not. Other threads may read
    both.
    """

    def __init__(self, rank: int, lanes: Sequence[str]) -> None:
        self.rank, self.recording = rank, False
        self.now: dict[str, tuple[str, int]] = {}
        self.ended = 0
        self._lanes = list(lanes)
        self._events: list[dict[str, Any]] = []
        self._watchers: dict[str, ThreadPoolExecutor] = {}

    @contextmanager
    def span(self, lane: str, name: str) -> Iterator[None]:
        """A context manager around work that this thread does."""
        began = time.perf_counter() if self.recording else None
        self.now[lane] = name, threading.get_ident()
        try:
            yield
        finally:
            del self.now[lane]
            self.ended += 1
        if began is not None:
            self._add(lane, name, began)

    def watch(self, lane: str, name: str, wait: Callable[[], Result], *, aside: bool = True) -> Callable[[], Result]:
        """Record a span from now until `wait` returns; call the result instead of `wait`.

        `aside`: another thread calls `wait`, at once.
        """
        if not self.recording:
            return wait
        began = time.perf_counter()

        def end() -> Result:
            result = wait()
            self._add(lane, name, began)
            return result

        if not aside:
            return end
        watcher = self._watchers.setdefault(lane, ThreadPoolExecutor(1, "timeline"))
        return watcher.submit(end).result

    def tick(self) -> None:
        """Record progress without a span."""
        self.ended += 1

    @property
    def has_spans(self) -> bool:
        return bool(self._events)

    def trace(self) -> str:
        """The trace as JSON."""
        rank = self.rank
        names = [
            {"name": "thread_name", "ph": "M", "pid": rank, "tid": number, "args": {"name": lane}}
            for number, lane in enumerate(self._lanes)
        ]
        order = [
            {"name": "thread_sort_index", "ph": "M", "pid": rank, "tid": number, "args": {"sort_index": number}}
            for number in range(len(self._lanes))
        ]
        process = {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
        return json.dumps({"traceEvents": [process, *names, *order, *self._events], "displayTimeUnit": "ms"})

    def close(self) -> None:
        """End the threads that `watch` started."""
        for watcher in self._watchers.values():
            watcher.shutdown()

    def _add(self, lane: str, name: str, began: float) -> None:
        ended = time.perf_counter()
        if lane not in self._lanes:
            self._lanes.append(lane)
        place = self._lanes.index(lane)
        # The format has microseconds.
        self._events.append(
            {"name": name, "ph": "X", "pid": self.rank, "tid": place, "ts": began * 1e6, "dur": (ended - began) * 1e6}
        )
