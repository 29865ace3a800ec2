"""What this rank is doing right now, for the watchdog thread to read.

The training thread writes plain attributes: no lock, no file and no clock within a step.
"""

import time
from collections import deque
from typing import Protocol

from hvd_transformer.monitoring.timeline import Timeline

RESULTS = "results"  # of a step: what the host waits for when other ranks are late and a GPU waits for them


class Collectives(Protocol):
    """What a heartbeat reads of this rank's `comm.group.Link`, which it may not import: that takes torch."""

    ended: int  # collectives that this rank has waited for, and other signs of progress

    @property
    def waiting(self) -> dict[str, int]:
        """The collectives that it is waiting for, by name, each with the thread that waits."""


class Heartbeat:
    """The state of one rank. `phase` may be written at any time; `enter_phase` and `stepped` also begin a new period.

    period   start                  | step | step | evaluation   | step | checkpoint    | step
    phase    start | data … update  | data … update | evaluation | data … update | …
    """

    def __init__(self) -> None:
        self.phase = self.period = "start"
        self.step = self.total_steps = 0  # `step` counts completed steps
        self.ahead = 0  # steps that are queued on a GPU before the one that the host is at
        self.loss: float | None = None
        self.tokens_per_second: float | None = None
        self.mfu: float | None = None  # on rank 0, where it is known
        self.unit = "tokens"  # what `tokens_per_second` counts: `Task.unit`
        self.work_seconds: float | None = None  # per step, when the ranks' work was last compared: `Stragglers`
        self.link: Collectives | None = None  # a rank is watched before it has joined the world
        self.timeline: Timeline | None = None
        self.backward_has_threads = False  # of its own, autograd's, which have no span: on a GPU
        # Seconds of the last 100 periods of each kind. The step after an evaluation or a checkpoint counts toward that
        # period, because a rank waits there for slower ranks. Periods that happen once (start, end) are not recorded.
        self.lasted = {period: deque[float](maxlen=100) for period in ("step", "evaluation", "checkpoint")}
        self._began = time.monotonic()
        self._ticks = 0

    def enter_phase(self, phase: str) -> None:
        """Begin a phase outside the steps; its time limit follows from earlier phases of the same kind."""
        now = time.monotonic()
        if self.period in self.lasted:
            self.lasted[self.period].append(now - self._began)
        self.phase = self.period = phase
        self._began = now
        self.tick()

    def stepped(self, step: int, loss: float | None, tokens_per_second: float | None) -> None:
        """Record the end of a step; None: not known yet."""
        self.enter_phase("step")
        self.phase = "log"
        self.step, self.loss, self.tokens_per_second = step, loss, tokens_per_second

    def tick(self) -> None:
        """Record a sign of progress within a phase."""
        self._ticks += 1

    def forgive(self, seconds: float) -> None:
        """Do not count `seconds` for which this process was suspended."""
        self._began += seconds

    def signs(self) -> int:
        """A counter of progress: it changes whenever a span, a collective or a phase ends."""
        spans = self.timeline.ended if self.timeline else 0
        return self._ticks + spans + (self.link.ended if self.link else 0)

    def place(self) -> tuple[str, str | None]:
        """The phase, and the collective that this rank is waiting for in it, such as "bucket 4", or None."""
        spans = self.timeline.now.copy() if self.timeline else {}
        waiting = self.link.waiting.copy() if self.link else {}
        if spans:
            # Of several stages one that works, if any does. What other threads wait for is not in the way of a span.
            waits = {thread: collective for collective, thread in waiting.items()}
            owners = {thread for _, thread in spans.values()}
            rest = (collective for thread, collective in waits.items() if thread not in owners)
            of_backward = next(rest, None) if self.backward_has_threads else None

            def found(span: tuple[str, int]) -> tuple[str, str | None]:
                kind, thread = span[0].split()[0], span[1]
                phase = {"batches": "data", "weights": "backward"}.get(kind, kind)
                return phase, waits.get(thread) or (of_backward if phase == "backward" else None)

            phase, waits_for = min(map(found, spans.values()), key=lambda place: place[1] is not None)
            phase = "evaluation" if self.phase == "evaluation" else phase
        else:
            phase, waits_for = self.phase, next(iter(waiting), None)
            if phase == "step":
                phase = "update" if waits_for in (None, RESULTS) else "allreduce"
        return phase, waits_for and waits_for.replace(".", " ")
