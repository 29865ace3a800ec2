"""The sums of a step over all ranks, in one small message: losses, targets, samples, what the ranks wish for, and, in
a step that is logged, what steps cost."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from hvd_transformer.comm.streams import has_streams, start_copy
from hvd_transformer.comm.world import World
from hvd_transformer.monitoring.heartbeat import RESULTS
from hvd_transformer.parallel.mesh import ParallelMesh
from hvd_transformer.training.state import NO_WISHES, StepTotals, Sums, Wishes


class StepStats:
    """Sums of one step over the ranks: losses, targets, samples, wishes, `costs`.

    Of a tensor group, whose ranks see the same samples, one rank counts. `counts` are this rank's targets and samples.
    They carry `unsent`, the sums of local steps before. Without `sends` nothing is told to the other ranks.
    """

    def __init__(
        self,
        world: World,
        mesh: ParallelMesh,
        counts: tuple[int, int],
        wishes: Wishes,
        unsent: Sums,
        costs: Sequence[float] = (),
        *,
        sends: bool = True,
    ) -> None:
        self._world, self._device, self._counts = world, mesh.devices[-1], mesh.tp_rank == 0
        self._tp = mesh.tp
        self._loss = torch.zeros((), dtype=torch.float64, device=self._device)
        self._own_counts, self._unsent, self._wishes, self._sends = counts, unsent, wishes, sends
        self._costs = costs

    def add_loss(self, loss: Tensor) -> None:
        """Add the loss of a micro-batch; the last stage calls this in their order."""
        self._loss += loss

    def send(self) -> None:
        """Start to sum, once all losses are there: with the last gradients, so that backward is not interrupted."""
        if not self._sends:
            return
        sums = self._unsent.plus(Sums(0.0, *self._own_counts)) if self._counts else Sums()
        values = torch.tensor([*sums, *self._wishes, *self._costs], dtype=torch.float64)
        self._sums = values.to(self._device, non_blocking=True)
        if self._counts:
            self._sums[0] += self._loss
        name = "step.costs" if self._costs else "step.sums"  # Horovod caches the shape by the name
        self._wait: Callable[[], Tensor] = self._world.all_reduce_async_(self._sums, name)

    def wait(self) -> None:
        """Return when the sums of all ranks are there."""
        if self._sends:
            self._wait()

    def loss_and_targets(self) -> tuple[Tensor, Tensor]:
        """The sums over the ranks of these two, scalars on the device; with `sends` only."""
        loss_sum, num_targets, *_ = self._sums.unbind()
        return loss_sum, num_targets

    def start_reading(self, norm: Tensor) -> Callable[[], tuple[StepTotals, float]]:
        """Start to copy the sums of all ranks, zeros without `sends`, and the norm to the host.

        The function returned waits for them, and not for what is queued on the device in between.
        """
        sums = self._sums if self._sends else self._loss.new_zeros(0)
        copied = start_copy(torch.cat([norm.to(sums.device, torch.float64)[None], sums]))

        def read() -> tuple[StepTotals, float]:
            # On a GPU this waits for the other ranks, too: its collectives end when they have begun them.
            waits = has_streams(sums.device) and self._world.size > 1 and (self._sends or self._tp > 1)
            with self._world.link.waits_for(RESULTS) if waits else nullcontext():
                own, *found = copied().tolist()
            return self._totals(found) if self._sends else StepTotals(0.0, 0, 0, NO_WISHES), own

        return read

    def _totals(self, sums: Sequence[float]) -> StepTotals:
        loss_sum, targets, samples, *rest = sums
        wishes, costs = rest[: len(self._wishes)], rest[len(self._wishes) :]
        found = Wishes(*(ranks > 0 for ranks in wishes))
        mean = loss_sum / targets if targets else loss_sum  # a task may have no target in all samples of a step
        return StepTotals(mean, int(targets), int(samples), found, costs)

    def own(self) -> Sums:
        """This replica's sums of this step."""
        return Sums(float(self._loss), *self._own_counts)
