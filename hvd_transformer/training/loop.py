"""The one training loop, for all tasks.

One step of a rank, with `accumulation` rounds cut into micro-batches:

    round 1                         round 2
    forward backward | … | forward backward | forward        backward      | update
                                              sums =======    buckets ===== |           (Horovod)
"""

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from hvd_transformer.comm.world import World
from hvd_transformer.config.schema import Config
from hvd_transformer.data.sampler import Intervals, Step
from hvd_transformer.evaluation.evaluate import Evaluation, evaluate
from hvd_transformer.parallel.flat import make_buckets
from hvd_transformer.parallel.layout import Layout
from hvd_transformer.parallel.reducer import GradientReducer
from hvd_transformer.training.embedding_rows import row_parameters
from hvd_transformer.training.optimizer import FlatOptimizer, names_without_decay
from hvd_transformer.training.precision import LossScaler, autocast
from hvd_transformer.training.schedule import learning_rate
from hvd_transformer.training.task import Batch, Task


class Diverged(RuntimeError):
    """The loss or the gradient is no longer a number."""


@dataclass
class Position:
    """How far the job is: all that the next step depends on beside weights and optimizer state."""

    step: int = 0
    updates: int = 0  # steps less the ones left out because a float16 gradient overflowed
    epoch: int = 0
    remaining: Intervals | None = None  # of this epoch; None: all of it
    samples: int = 0
    targets: int = 0  # what the losses were the mean of: tokens
    seconds: float = 0.0
    best_loss: float | None = None
    best_step: int | None = None
    evaluated_step: int | None = None
    train_loss: float | None = None  # of the last line of metrics.jsonl
    # Since the last line of metrics.jsonl.
    interval: dict[str, float] = field(default_factory=lambda: {"loss": 0.0, "count": 0.0, "seconds": 0.0})

    def state(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def load(cls, state: dict[str, Any]) -> "Position":
        position = cls(**state)
        if position.remaining is not None:
            position.remaining = [(start, stop) for start, stop in position.remaining]
        return position


@dataclass(frozen=True)
class StepResult:
    """What one step brought, the same on every rank."""

    epoch: int  # counted from 0
    loss: float
    count: int
    grad_norm: float
    learning_rate: float
    stop: bool  # some rank was asked to stop
    save: bool  # some rank asks for a checkpoint
    seconds: float


class Trainer:
    """Weights, optimizer and position of a job, and what a step and an evaluation do to them."""

    def __init__(
        self,
        config: Config,
        world: World,
        layout: Layout,
        task: Task,
        position: Position,
    ) -> None:
        self.config, self.world, self.layout, self.task, self.position = config, world, layout, task, position
        communication, model = config.communication, task.model
        num_tokens = task.usual_count * config.training.accumulation * layout.dp  # a step
        rows = row_parameters(model, communication.embedding_rows, num_tokens)
        self.buckets = make_buckets(
            dict(model.named_parameters()),
            names_without_decay(model),
            int(communication.bucket_mb * 2**20),
            alone=rows.keys(),
        )
        self.optimizer = FlatOptimizer(config.optimizer, self.buckets)
        self.scaler = LossScaler(config.training.precision)
        self.reducer = GradientReducer(
            self.buckets,
            world,
            overlap=communication.overlap,
            compression=communication.compression,
            rows={name: row.dense for name, row in rows.items()},
        )
        for name, row in rows.items():
            for embedding in row.embeddings:
                embedding.take_rows = self.reducer.take_rows(name)
        self.total_steps = self._count_steps()

    def steps(self) -> Iterator[Step]:
        """The steps that are left, over the epochs; the position moves on after each."""
        while self.position.step < self.total_steps:
            for step in self.task.sampler.epoch(self.position.remaining):
                yield step
                if self.position.step == self.total_steps:
                    return

    def step(self, plan: Step, *, stop: bool = False, save: bool = False) -> StepResult:
        """One step: forward, backward, reduce, update. `stop` and `save` are this rank's wishes, told to all."""
        began = time.perf_counter()
        position = self.position
        self.task.model.train()
        self.reducer.begin()
        # Sums of losses, targets, samples and wishes: float64, reduced while the last backward runs.
        sums = torch.zeros(5, dtype=torch.float64)
        sums[3:] = torch.tensor([float(stop), float(save)])
        wait = None
        usual = self.task.usual_count * self.config.training.accumulation * self.layout.dp
        for number, (micro, last) in enumerate(self._micro_batches(plan)):
            self._seed_dropout(number)
            with autocast(self.config.training.precision, self.layout.device):
                loss_sum, count = self.task.loss(micro)
            sums[:3] += torch.tensor([loss_sum.item(), count, micro[0].size(0)], dtype=torch.float64)
            if last:
                wait = self.world.all_reduce_async_(sums, "step.sums")
                self.reducer.last()
            (loss_sum * (self.scaler.scale / usual)).backward()
        if wait is None:  # a rank that has no sample in an epoch's last step
            wait = self.world.all_reduce_async_(sums, "step.sums")
        self.reducer.finish()
        wait()
        loss_total, count_total, samples, stops, saves = sums.tolist()
        rate = learning_rate(self.config.optimizer, self.layout.dp, position.step, position.epoch, self.total_steps)
        norm = self._update(usual / (count_total * self.scaler.scale), rate, loss_total / count_total)
        epoch = position.epoch
        self._advance(plan, int(samples), int(count_total))
        return StepResult(
            epoch=epoch,
            loss=loss_total / count_total,
            count=int(count_total),
            grad_norm=norm,
            learning_rate=rate,
            stop=stops > 0,
            save=saves > 0,
            seconds=time.perf_counter() - began,
        )

    def evaluate(self, split: str) -> Evaluation:
        """The whole split, shared over the ranks."""
        self.task.model.eval()

        def loss(batch: Batch) -> tuple[torch.Tensor, int]:
            with autocast(self.config.training.precision, self.layout.device):
                return self.task.loss(self._to_device(batch))

        return evaluate(loss, self.task.evaluation_batches(split), self.world)

    def _micro_batches(self, plan: Step) -> Iterator[tuple[Batch, bool]]:
        """The step's pieces, each with whether it is the last."""
        pending: Batch | None = None
        for units in plan.rounds:
            if not units:
                continue
            batch = self._to_device(self.task.batch(self.position.epoch, units))
            size = -(-batch[0].size(0) // self.config.parallel.micro_batches)
            for micro in zip(*(tensor.split(size) for tensor in batch), strict=True):
                if pending is not None:
                    yield pending, False
                pending = micro
        if pending is not None:
            yield pending, True

    def _update(self, factor: float, rate: float, loss: float) -> float:
        """Scales the summed gradients to the mean, clips, and steps the optimizer; returns the norm."""
        norms = [torch.linalg.vector_norm(bucket.gradients) for bucket in self.buckets]
        norm = factor * float(torch.linalg.vector_norm(torch.stack(norms)))
        if not math.isfinite(norm) or not math.isfinite(loss):
            if self.scaler.active and self.scaler.scale > 1:
                self.scaler.overflow()
                return norm
            raise Diverged(
                f"step {self.position.step + 1}: the loss is {loss} and the gradient's norm {norm}; a lower "
                "optimizer.lr, more optimizer.warmup_steps or a smaller optimizer.clip_norm may help"
            )
        clip_norm = self.config.optimizer.clip_norm
        if clip_norm is not None:
            factor *= min(1.0, clip_norm / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_
        if factor != 1.0:
            for bucket in self.buckets:
                bucket.gradients.mul_(factor)
        self.optimizer.step(rate)
        self.scaler.good()
        self.position.updates += 1
        return norm

    def _advance(self, plan: Step, samples: int, targets: int) -> None:
        position = self.position
        position.step += 1
        position.samples += samples
        position.targets += targets
        position.remaining = plan.remaining
        if not plan.remaining:
            position.epoch += 1
            position.remaining = None

    def _count_steps(self) -> int:
        """The job's last step, as far as it can be known now (a change of dp in mid-epoch changes it)."""
        training, position, sampler = self.config.training, self.position, self.task.sampler
        total = position.step
        if position.epoch < training.epochs:
            total += sampler.num_steps(position.remaining)
            total += (training.epochs - position.epoch - 1) * sampler.num_steps()
        return total if training.max_steps is None else min(total, max(training.max_steps, position.step))

    def _seed_dropout(self, number: int) -> None:
        """Dropout depends on the place in the job alone: there is no random state to save."""
        if self.config.model.dropout:
            place = (self.config.seed, self.position.step, self.layout.replica, number)
            torch.manual_seed(int(np.random.SeedSequence(place).generate_state(1, np.uint64)[0]))

    def _to_device(self, batch: Batch) -> Batch:
        if self.layout.device.type == "cpu":
            return batch
        return tuple(tensor.pin_memory().to(self.layout.device, non_blocking=True) for tensor in batch)
