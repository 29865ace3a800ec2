"""What a rank does when, in Chrome's trace format (chrome://tracing, ui.perfetto.dev).

stage 0      | forward 0 | forward 1 | …
stage 1              | forward 0 | backward 0 | …      one lane a stage and one a bucket
allreduce 0                         | bucket.0 |
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

Result = TypeVar("Result")


class Timeline:
    """Spans of this rank while `recording`. Lanes appear in the order of `lanes`, then of their first span.

    Times are the host's: on a GPU a span is the time it takes to queue the work. `now` holds the spans that are open,
    by lane, and `ended` counts the others, recording or not: another thread may read both.
    """

    def __init__(self, rank: int, lanes: Sequence[str]) -> None:
        self.rank, self.recording, self.written = rank, False, False
        self.now: dict[str, str] = {}
        self.ended = 0
        self._lanes = list(lanes)
        self._events: list[dict[str, Any]] = []
        self._watchers: dict[str, ThreadPoolExecutor] = {}

    @contextmanager
    def span(self, lane: str, name: str) -> Iterator[None]:
        """Around something that this thread does."""
        began = time.perf_counter() if self.recording else None
        self.now[lane] = name
        try:
            yield
        finally:
            del self.now[lane]
            self.ended += 1
        if began is not None:
            self._add(lane, name, began)

    def watch(self, lane: str, name: str, wait: Callable[[], Result]) -> Callable[[], Result]:
        """Records from now until `wait` returns, which another thread calls; use the function returned in its place."""
        if not self.recording:
            return wait
        began = time.perf_counter()

        def end() -> Result:
            result = wait()
            self._add(lane, name, began)
            return result

        watcher = self._watchers.setdefault(lane, ThreadPoolExecutor(1, "timeline"))
        return watcher.submit(end).result

    @property
    def has_spans(self) -> bool:
        return bool(self._events)

    def trace(self) -> str:
        """The whole as JSON."""
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
        """Ends the watching threads."""
        for watcher in self._watchers.values():
            watcher.shutdown()

    def _add(self, lane: str, name: str, began: float) -> None:
        ended = time.perf_counter()
        if lane not in self._lanes:
            self._lanes.append(lane)
        place = self._lanes.index(lane)
        # Microseconds, as the format has it.
        self._events.append(
            {"name": name, "ph": "X", "pid": self.rank, "tid": place, "ts": began * 1e6, "dur": (ended - began) * 1e6}
        )
