"""Work that a stage's backward leaves for later: the gradients of weights, which no other stage waits for.

A backward through a linear layer is two products of the same size: one makes the gradient of its input, for the stage
before; the other the gradient of its weight, for the optimizer (Qi et al. 2023, "Zero Bubble Pipeline Parallelism",
arXiv 2401.10241, section 2).
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

Work = Callable[[], None]


class WeightGradStore:
    """One stage's. What is given outside of `collect` is done at once."""

    def __init__(self) -> None:
        self._waiting: deque[list[Work]] = deque()
        self._collecting: list[Work] | None = None

    def __call__(self, work: Work) -> None:
        if self._collecting is None:
            work()
        else:
            self._collecting.append(work)

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Around one backward: its work waits for `run`."""
        self._collecting = []
        try:
            yield
            self._waiting.append(self._collecting)
        finally:
            self._collecting = None

    @torch.no_grad()
    def run(self) -> None:
        """Does the work of the oldest backward that waits, and lets go of its tensors one by one."""
        work = self._waiting.popleft()
        work.reverse()
        while work:
            work.pop()()

    def clear(self) -> None:
        """Forgets what an unfinished step left."""
        self._waiting.clear()
