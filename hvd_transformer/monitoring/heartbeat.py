"""What this rank is doing at this moment, for the watchdog's thread to read.

The training thread writes plain attributes: no lock, no file, no clock within a step.
"""

import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a rank is watched before it has these: importing torch takes seconds
    from hvd_transformer.comm.world import World
    from hvd_transformer.monitoring.timeline import Timeline


class Heartbeat:
    """One rank's. `phase` is written at will; `enter` and `stepped` also begin another period.

    period   start                  | step | step | evaluation   | step | checkpoint    | step
    phase    start | data … update  | data … update | evaluation | data … update | …
    """

    def __init__(self) -> None:
        self.phase = self.period = "start"
        self.step = self.total_steps = 0  # steps that have ended
        self.loss: float | None = None
        self.tokens_per_second: float | None = None
        self.unit = "tokens"  # that these are: `Task.unit`
        self.world: World | None = None
        self.timeline: Timeline | None = None
        # Seconds of the last 100 of each; the step after an evaluation or a checkpoint counts to that, as a rank waits
        # there for a slower one. What happens once is not known.
        self.lasted = {period: deque[float](maxlen=100) for period in ("step", "evaluation", "checkpoint")}
        self._began = time.monotonic()
        self._marks = 0

    def enter(self, phase: str) -> None:
        """A phase outside of the steps begins; it lasts as long as its own kind did before."""
        now = time.monotonic()
        if self.period in self.lasted:
            self.lasted[self.period].append(now - self._began)
        self.phase = self.period = phase
        self._began = now
        self.mark()

    def stepped(self, step: int, loss: float, tokens_per_second: float) -> None:
        """A step has ended."""
        self.enter("step")
        self.phase = "log"
        self.step, self.loss, self.tokens_per_second = step, loss, tokens_per_second

    def mark(self) -> None:
        """A sign of progress within a phase."""
        self._marks += 1

    def forgive(self, seconds: float) -> None:
        """This process was stopped for so long and goes on."""
        self._began += seconds

    def signs(self) -> int:
        """Of progress: another number each time that anything has ended."""
        spans = self.timeline.ended if self.timeline else 0
        return self._marks + spans + (self.world.link.ended if self.world else 0)

    def place(self) -> tuple[str, str | None]:
        """The phase, and what this rank waits for in it: a collective such as "bucket 4", or nothing."""
        spans = self.timeline.now.copy() if self.timeline else {}
        if spans:
            name = next(iter(spans.values())).split()[0]
            doing = {"batches": "data", "weights": "backward"}.get(name, name)
            return (self.phase if self.phase == "evaluation" else doing), None
        waits_for = next(iter(self.world.link.waiting.copy()), None) if self.world else None
        phase = self.phase
        if phase == "step":
            phase = "allreduce" if waits_for else "update"
        return phase, waits_for and waits_for.replace(".", " ")
