"""One training step of a rank: queued on its devices, then read by the host.

Each accumulation step is cut into micro-batches, which stream through the pipeline:

    accumulation step 1             accumulation step 2
    forward backward | … | forward backward | forward     backward       | update
                                                        buckets, sums ==== |           (Horovod)

On a GPU the update is queued before the host knows norm and loss (`gradients/update_factor.py`), and so is the next
step, where nothing in it depends on them (`Trainer.reads_late`). The GPU always has work:

    GPU    | step 1             | step 2             | step 3
    host    queues 1, queues 2   reads 1, queues 3    reads 2, queues 4
"""

import logging
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvd_transformer.data.sampler import StepPlan
from hvd_transformer.gradients.optimizer import clip_factor
from hvd_transformer.gradients.update_factor import update_factor
from hvd_transformer.training.lr_schedule import learning_rate
from hvd_transformer.training.moment import Moment
from hvd_transformer.training.state import StepResult, StepTotals, Sums, Wishes
from hvd_transformer.training.step_stats import StepStats

if TYPE_CHECKING:
    from hvd_transformer.training.trainer import Trainer

log = logging.getLogger(__name__)


class Diverged(RuntimeError):
    """The loss or the gradient is no longer a number."""

    def __init__(self, step: int, problem: str) -> None:
        super().__init__(
            f"step {step}: {problem}; a lower optimizer.lr, more optimizer.warmup_steps or a smaller "
            "optimizer.clip_norm may help"
        )

    @classmethod
    def in_step(cls, step: int, loss: float, norm: float) -> "Diverged":
        return cls(step, f"the loss is {loss} and the gradient's norm {norm}")


# Skipped steps in a row whose loss, and not only its gradient, is no number: the scale of the loss is not the reason.
_MOST_WITHOUT_LOSS = 3


class TrainingStep:
    """A step of the trainer: the constructor queues it, and a CPU computes it up to the norm. `result` waits for it,
    and does what is not queued.

    `wishes` are this rank's; the result has those of all ranks, and the sums of their `costs`. Without `report`, which
    all ranks give alike, a local step tells the other ranks nothing, and its result has no totals. Collective.
    """

    def __init__(
        self, trainer: "Trainer", plan: StepPlan, wishes: Wishes, costs: Sequence[float], *, report: bool
    ) -> None:
        self._began, self.trainer, self.wishes = time.perf_counter(), trainer, wishes
        state, engine, task, scale = trainer.state, trainer.engine, trainer.task, trainer.loss_scaler.scale
        self._index, self._epoch = state.step, state.epoch
        if not task.model.training:  # `train` visits all modules
            task.model.train()
        accumulation, counts, self._flops = trainer.take_batches(plan)
        self._fetched = time.perf_counter()
        self._local = engine.local_steps.includes(state.step)
        self._sends = report or not self._local
        stats = StepStats(trainer.world, trainer.mesh, counts, wishes, trainer.unsent, costs, sends=self._sends)
        self._stats = stats

        engine.grad_sync.begin_step(sum(map(len, accumulation)), local=self._local)
        engine.grad_sync.wire.begin_step(state.step, trainer.total_steps, scale)
        engine.begin_forward()
        # Full buffers leave during the last backwards.
        engine.pipeline.forward_backward(accumulation, scale / task.targets_per_step, stats.add_loss)
        engine.wait_params()  # also on a rank without samples in this step
        engine.grad_sync.send_rest()
        stats.send()

        self._own_work = Moment(trainer.mesh.devices)
        engine.grad_sync.wait()
        stats.wait()
        self._arrived = Moment(trainer.mesh.devices)
        norm = engine.grad_norm()
        optimizer = trainer.config.optimizer
        self._rate = learning_rate(optimizer, trainer.lr_replicas, state.step, state.epoch, trainer.total_steps)
        self._read = stats.start_reading(norm)
        self._ahead = trainer.updates_ahead and not self._local
        if self._ahead:  # a GPU is busy with it while the host reads
            loss, targets = stats.loss_and_targets()
            of_mean = task.targets_per_step / (targets.clamp(min=1) * scale)
            good = (targets > 0) & loss.isfinite()
            engine.update(update_factor(of_mean, norm, good, optimizer.clip_norm), self._rate)
        state.advance(plan.remaining)

    def result(self) -> StepResult:
        """Wait for the step, and update now what is not updated ahead. Raises `Diverged`. Collective."""
        trainer, stats = self.trainer, self._stats
        state, engine, scaler = trainer.state, trainer.engine, trainer.loss_scaler
        totals, norm = self._read()
        summed = stats.own() if self._local else totals  # of the samples that the gradients are sums over

        factor = trainer.task.targets_per_step / (max(1, summed.targets) * scaler.scale)
        norm *= factor
        if self._local:
            if not math.isfinite(totals.loss):
                raise Diverged.in_step(self._index + 1, totals.loss, norm)
            trainer.unsent = Sums() if self._sends else trainer.unsent.plus(stats.own())
            trainer.steps_without_loss = 0  # the same on all ranks, which save together
        if not summed.targets:
            log.info("step %d: no samples for this replica, whose weights stay", self._index + 1)
        elif math.isfinite(norm) and math.isfinite(summed.loss):
            if not self._ahead:
                engine.update(factor * clip_factor(norm, trainer.config.optimizer.clip_norm), self._rate)
            scaler.good()
            trainer.steps_without_loss = 0
            state.updates += 1
        else:
            engine.grad_sync.wire.skip_step()
            self._skip(totals, norm)
        updated = time.perf_counter()
        if self._local:
            engine.local_steps.exchange(self._index)

        began, ended = max(self._began, trainer.ended), time.perf_counter()  # the step before may have ended later
        trainer.ended = ended
        # What is waited for in the others: a GPU may still be at this rank's own work when its host begins to wait.
        work = updated - began - self._arrived.since(self._own_work)
        data, update = self._fetched - self._began, updated - self._arrived.host
        state.count(totals.samples, totals.targets)
        return StepResult(
            self._index + 1, self._epoch, totals, norm, self._rate, ended - began, work, data, update, self._flops
        )

    def _skip(self, totals: StepTotals, norm: float) -> None:
        """Handle gradients that are not finite: lower the loss scale, or raise `Diverged`. Collective."""
        trainer = self.trainer
        if not self._local:  # a local step's loss is told to all ranks, which then end
            trainer.steps_without_loss = 0 if math.isfinite(totals.loss) else trainer.steps_without_loss + 1
        if trainer.engine.overflowed_in_transit():
            log.warning("step %d is skipped: a sum of gradients overflowed in transit", self._index + 1)
        elif trainer.steps_without_loss >= _MOST_WITHOUT_LOSS or not trainer.loss_scaler.overflowed():
            if not self._local:
                raise Diverged.in_step(self._index + 1, totals.loss, norm)
            trainer.unsent = Sums(loss=math.nan)  # all ranks end alike, when they hear of it
