"""Makes the batches of the next step in a thread of its own while this step runs.

step     | 1           | 2           | 3
thread   |  batches 2  |  batches 3  |  batches 4
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

from hvd_transformer.data.sampler import StepPlan

Batches = TypeVar("Batches")


class Prefetch(Generic[Batches]):
    """`make` makes the batches of a step of this epoch; the thread calls it, so never twice at the same time."""

    def __init__(self, make: Callable[[StepPlan, int], Batches]) -> None:
        self._make = make
        self._thread = ThreadPoolExecutor(1, "prefetch")
        self._next: tuple[StepPlan, Future[Batches]] | None = None

    def start(self, plan: StepPlan | None, epoch: int) -> None:
        """Begin with the batches of the step that comes next, if there is one."""
        self._next = None if plan is None else (plan, self._thread.submit(self._make, plan, epoch))

    def take(self, plan: StepPlan, epoch: int) -> Batches:
        """The batches of this step, which are made now if `start` was not called for it. Raises what `make` raised."""
        self.wait()
        ready, self._next = self._next, None
        return ready[1].result() if ready is not None and ready[0] is plan else self._make(plan, epoch)

    def wait(self) -> None:
        """Return when the thread has nothing to do: what reads the data, too, does not run beside it."""
        if self._next is not None and not self._next[1].done():
            wait([self._next[1]])

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()
