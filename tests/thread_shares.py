"""Ranks of a tensor group as threads of one process, each with shares of the same layers."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
_SECONDS = 60.0  # then a rank that waits alone gives up


class ThreadShares:
    """One thread's: implements `models.shares.Shares`. All threads call the same, in the same order."""

    def __init__(self, index: int, slots: list[Tensor | None], barrier: threading.Barrier) -> None:
        self.index, self.count = index, len(slots)
        self._slots, self._barrier = slots, barrier

    def sum_(self, values: Tensor) -> Callable[[], None]:
        assert values.is_contiguous()
        values.copy_(self.gather(values).sum(0))
        return lambda: None

    def gather(self, values: Tensor) -> Tensor:
        self._slots[self.index] = values.detach()
        self._barrier.wait(_SECONDS)
        result = torch.stack([slot for slot in self._slots if slot is not None])
        self._barrier.wait(_SECONDS)
        return result


def together(count: int, work: Callable[[ThreadShares], Result]) -> list[Result]:
    """What `work` returns on each of so many ranks, side by side; the first error of any."""
    slots: list[Tensor | None] = [None] * count
    barrier = threading.Barrier(count)

    def run(index: int) -> Result:
        try:
            return work(ThreadShares(index, slots, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(count) as pool:
        waiting = [pool.submit(run, index) for index in range(count)]
        errors = [error for future in waiting if (error := future.exception()) is not None]
        if errors:
            raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
        return [future.result() for future in waiting]
