"""What the ranks tell each other of a step while its last backward runs."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hvd_transformer.comm.world import World
from hvd_transformer.parallel.layout import Layout
from hvd_transformer.training.task import Batch, Task


class StepSums:
    """Losses, targets, samples and wishes of a step, summed over all ranks; of a tensor group, which sees the same
    samples, one counts. Nothing waits for the losses before `result`. `work` is this rank's of the step before, in
    seconds."""

    def __init__(self, world: World, layout: Layout, stop: bool, save: bool, work: float) -> None:
        self._world, self._device, self._counts = world, layout.devices[-1], layout.shard == 0
        device = self._device
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._numbers = [0.0, 0.0, float(stop), float(save), *[0.0] * world.size]
        self._numbers[4 + world.rank] = work
        self._sums: Tensor | None = None
        self._wait: Callable[[], None] | None = None

    def add_batches(self, batches: Sequence[Batch], task: Task) -> None:
        for batch in batches if self._counts else ():
            self._numbers[0] += task.num_targets(batch)
            self._numbers[1] += batch[0].size(0)

    def add_losses(self, losses: Sequence[Tensor]) -> None:
        for loss in losses if self._counts else ():
            self._loss += loss

    def send(self, losses: Sequence[Tensor]) -> None:
        """With the last losses."""
        self.add_losses(losses)
        numbers = torch.tensor(self._numbers, dtype=torch.float64).to(self._device, non_blocking=True)
        self._sums = torch.cat([self._loss[None], numbers])
        self._wait = self._world.all_reduce_async_(self._sums, "step.sums")

    def result(self) -> tuple[float, float, float, float, float, list[float]]:
        """(losses, targets, samples, wishes to stop, wishes to save) of all ranks, and the work of each."""
        assert self._wait is not None and self._sums is not None
        self._wait()
        loss, count, samples, stops, saves, *work = self._sums.tolist()
        return loss, count, samples, stops, saves, work
