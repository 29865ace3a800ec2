"""The one training loop, for all tasks.

One step of a rank: its rounds are cut into micro-batches, and each round is streamed through the stages:

    round 1                         round 2
    forward backward | … | forward backward | forward        backward      | update
                                              sums =======    buckets ===== |           (Horovod)
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import chain, islice

import torch
from torch import Tensor

from hvd_transformer.checkpoint.tensor_file import StridedBlocks
from hvd_transformer.comm.world import World
from hvd_transformer.config.batch_size import rate_replicas
from hvd_transformer.config.schema import Config
from hvd_transformer.data.sampler import StepPlan
from hvd_transformer.gradients.buffers import make_buckets
from hvd_transformer.gradients.embedding_grads import plan_embedding_grads
from hvd_transformer.gradients.optimizer import GradientNorm, names_without_decay
from hvd_transformer.gradients.param_all_gather import waiting_stages
from hvd_transformer.gradients.sync import GradSync
from hvd_transformer.monitoring.timeline import Timeline
from hvd_transformer.nn.dropout import dropout_key
from hvd_transformer.parallel.engine import StageWeights, make_stages, stage_parameters, take_products
from hvd_transformer.parallel.mesh import ParallelMesh
from hvd_transformer.parallel.pipeline import Pipeline, worker_threads
from hvd_transformer.parallel.precision import LossScaler, autocast
from hvd_transformer.parallel.replica_check import check_replicas
from hvd_transformer.parallel.tensor_group import connect_tensor_group, shard_model
from hvd_transformer.tasks.metrics import Evaluation, evaluate
from hvd_transformer.tasks.task import Batch, Task, split_batch
from hvd_transformer.training.lr_schedule import learning_rate
from hvd_transformer.training.state import StepResult, TrainState


class StepStats:
    """Losses, targets, samples and wishes of a step, summed over all ranks; of a tensor group, which sees the same
    samples, one counts. Nothing waits for the losses before `result`. `work` is this rank's of the step before, in
    seconds."""

    def __init__(self, world: World, layout: ParallelMesh, stop: bool, save: bool, work: float) -> None:
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


class Diverged(RuntimeError):
    """The loss or the gradient is no longer a number."""


class Trainer:
    """Weights, optimizer and position of a job, and what a step and an evaluation do to them."""

    def __init__(
        self,
        config: Config,
        world: World,
        layout: ParallelMesh,
        task: Task,
        position: TrainState,
    ) -> None:
        self.config, self.world, self.layout, self.task, self.position = config, world, layout, task, position
        communication, model = config.communication, task.model
        self.shapes = {name: weight.shape for name, weight in model.named_parameters()}  # of the whole weights
        self.cuts = task.cuts
        # What this rank has of each weight: the whole one's shape, and where its own numbers lie in it.
        self.pieces = {
            name: (tuple(shape), StridedBlocks.of(shape, self.cuts.get(name), layout.shard, layout.tp))
            for name, shape in self.shapes.items()
        }
        shard_model(task, self.cuts, layout, self.shapes)
        self.stages = make_stages(config, task, layout, world)
        connect_tensor_group(task, self.cuts, layout, self.shapes)
        rows = plan_embedding_grads(model, communication.embedding_rows, task.targets_per_step)
        self.weights = self._stage_weights(alone={name for name, row in rows.items() if row.gather})
        self.buckets = [bucket for weights in self.weights for bucket in weights.buckets]
        self.gatherings = [weights.gathering for weights in self.weights if weights.gathering is not None]
        if self.gatherings:
            self.stages = waiting_stages(self.stages, self.gatherings)
        self._norm = GradientNorm(list(self.shapes), self.cuts, self.buckets[0].gradients.dtype, layout, world)
        self.timeline = Timeline(world.rank, [f"stage {stage}" for stage in range(len(self.stages))])
        self.pipeline = Pipeline(
            self.stages,
            schedule=config.parallel.schedule,
            recompute=config.parallel.recompute,
            context=self._context,
            threads=worker_threads(len(self.stages)),
            timeline=self.timeline,
        )
        self.scaler = LossScaler(config.training.precision)
        self.reducer = GradSync(
            self.buckets,
            layout.data_group,
            overlap=communication.overlap,
            compression=communication.compression,
            rows={name: row.plan for name, row in rows.items()},
            timeline=self.timeline,
            stages=[weights.indices for weights in self.weights],
        )
        for name, row in rows.items():
            for embedding in row.embeddings:
                embedding.take_rows = self.reducer.take_rows(name)
        if not config.training.compile:  # its graphs have no place for a call back
            take_products(model, zip(self.stages, self.pipeline.later, strict=True), self.reducer)
        self.total_steps = self._count_steps()
        self._work = 0.0  # seconds, of the last step
        self._places: list[tuple[int, int]] = []  # of this step's micro-batches: first unit of the round, and piece

    def steps(self) -> Iterator[StepPlan]:
        """The steps that are left, over the epochs; the position moves on after each."""
        while self.position.step < self.total_steps:
            for step in self.task.sampler.epoch(self.position.remaining):
                yield step
                if self.position.step == self.total_steps:
                    return

    def step(self, plan: StepPlan, *, stop: bool = False, save: bool = False) -> StepResult:
        """One step: forward, backward, reduce, update. `stop` and `save` are this rank's wishes, told to all."""
        began = time.perf_counter()
        position = self.position
        if not self.task.model.training:  # goes through all modules
            self.task.model.train()
        sums = StepStats(self.world, self.layout, stop, save, self._work)
        usual = self.task.targets_per_step
        rounds = self._rounds(plan)
        for batches in rounds:
            sums.add_batches(batches, self.task)
        self.reducer.begin(len(self._places))
        self._forward_backward(rounds, self.scaler.scale / usual, sums)
        self.settle()
        self.reducer.finish()
        began_waiting = time.perf_counter()
        loss_total, count_total, samples, stops, saves, work = sums.result()
        waited = self.reducer.waited + time.perf_counter() - began_waiting
        replicas = rate_replicas(self.config.training, self.layout.dp)
        rate = learning_rate(self.config.optimizer, replicas, position.step, position.epoch, self.total_steps)
        norm = self._update(usual / (count_total * self.scaler.scale), rate, loss_total / count_total)
        epoch = position.epoch
        self._advance(plan, int(samples), int(count_total))
        seconds = time.perf_counter() - began
        self._work = seconds - waited
        return StepResult(
            epoch=epoch,
            loss=loss_total / count_total,
            count=int(count_total),
            grad_norm=norm,
            learning_rate=rate,
            stop=stops > 0,
            save=saves > 0,
            seconds=seconds,
            work=work,
        )

    def evaluate(self, split: str) -> Evaluation:
        """The whole split, shared over the ranks."""
        self.settle()
        self.task.model.eval()

        def losses() -> Iterator[tuple[Tensor, int]]:
            batches = self.task.evaluation_batches(split)
            # Enough at a time to keep all stages busy.
            while group := list(islice(batches, 1 if len(self.stages) == 1 else 8 * len(self.stages))):
                found = self.pipeline.evaluate([self.task.micro_batch(self._pinned(batch)) for batch in group])
                yield from zip(found, map(self.task.num_targets, group), strict=True)

        found = evaluate(losses(), self.layout.data_group, self.task.num_sums)
        metrics = self.task.metrics(found.sums, found.count)
        return replace(found, metrics=metrics | self.task.more_metrics(split, self.layout.data_group))

    def optimizer_state(self) -> list[dict[str, Tensor]]:
        """The optimizer's state of each bucket, as flat tensors like its own parameters: {"exp_avg": …}."""
        return [state for weights in self.weights for state in weights.optimizer.state]

    def optimizer_state_loaded(self) -> None:
        """Tells the optimizers, whose state was written, the position's number of updates."""
        for weights in self.weights:
            weights.optimizer.set_updates(self.position.updates)

    def settle(self) -> None:
        """Returns when the weights are whole, which after a step may still be on their way from other ranks."""
        for gathering in self.gatherings:
            gathering.settle()

    @cached_property
    def tokenizer_files(self) -> dict[str, str]:
        """The tokenizers' texts by the name that a checkpoint gives them."""
        return {
            f"{prefix}{name}": text
            for prefix, tokenizer in self.task.tokenizers.items()
            for name, text in tokenizer.files().items()
        }

    @property
    def num_parameters(self) -> int:
        """Of the whole model."""
        return sum(shape.numel() for shape in self.shapes.values())

    def check_replicas(self, when: str) -> int:
        """The weights' checksum. Raises `ReplicasDiffer`. Collective."""
        self.settle()
        return check_replicas(self.buckets, self.world, when, self.layout.tp, self.cuts)

    def close(self) -> None:
        """Ends the threads of the stages."""
        self.pipeline.close()
        self.timeline.close()

    def _rounds(self, plan: StepPlan) -> list[list[Batch]]:
        """This rank's samples of a step, each round of them cut into micro-batches."""
        with self.timeline.span("data", "batches"):
            rounds = [
                split_batch(
                    self._pinned(self.task.batch(self.position.epoch, items)), self.config.parallel.micro_batches
                )
                for items in plan.accumulation
            ]
        self._places = [
            (items.start, piece)
            for items, batches in zip(plan.accumulation, rounds, strict=True)
            for piece in range(len(batches))
        ]
        return rounds

    def _forward_backward(self, rounds: Sequence[Sequence[Batch]], scale: float, sums: StepStats) -> None:
        """Gradients of scale × the sum of all losses; in the last round they are sent as they become complete."""

        def before_last_backward(stage: int, losses: Sequence[Tensor]) -> None:
            if stage == len(self.stages) - 1:
                sums.send(losses)
            self.reducer.last(self.weights[stage].indices)

        number = 0
        for batches in rounds:
            last = batches is rounds[-1]
            losses = self.pipeline.train(
                [self.task.micro_batch(batch) for batch in batches],
                scale,
                first_number=number,
                before_last_backward=before_last_backward if last else None,
            )
            if not last:
                sums.add_losses(losses)
            number += len(batches)
        if not rounds:  # a rank that has no sample in this step
            sums.send([])

    def _stage_weights(self, alone: set[str]) -> list[StageWeights]:
        """Of every stage, in buckets of its own, so that it can send and update without the others."""
        model, config = self.task.model, self.config
        places = {name: number for number, (name, _) in enumerate(model.named_parameters())}
        no_decay, size = names_without_decay(model), int(config.communication.bucket_mb * 2**20)
        result: list[StageWeights] = []
        for parameters in stage_parameters(model, self.stages):
            first = result[-1].indices.stop if result else 0
            buckets = make_buckets(parameters, no_decay, size, alone, self.layout.update_shard)
            result.append(StageWeights(config.optimizer, buckets, self.layout.data_group, first, places))
        return result

    def _update(self, factor: float, rate: float, loss: float) -> float:
        """Scales the summed gradients to the mean, clips, and steps the optimizer; returns the norm."""
        norms = self.pipeline.map(lambda stage: self.weights[stage].norms())
        norm = factor * self._norm(dict(chain.from_iterable(norms)))
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

        def update(stage: int) -> None:
            with self.timeline.span(f"stage {stage}", "update"):
                self.weights[stage].update(factor, rate)

        self.pipeline.map(update)
        self.scaler.good()
        self.position.updates += 1
        return norm

    def _advance(self, plan: StepPlan, samples: int, targets: int) -> None:
        position = self.position
        position.step += 1
        position.samples += samples
        position.targets += targets
        position.remaining = plan.remaining
        if not plan.remaining:
            position.epoch += 1
            position.remaining = None

    def _count_steps(self) -> int:
        """The job's last step, as far as it can be known now (another size of a step in mid-epoch changes it)."""
        training, position, sampler = self.config.training, self.position, self.task.sampler
        total = position.step
        if position.epoch < training.epochs:
            total += sampler.num_steps(position.remaining)
            total += (training.epochs - position.epoch - 1) * sampler.num_steps()
        return total if training.max_steps is None else min(total, max(training.max_steps, position.step))

    @contextmanager
    def _context(self, number: int) -> Iterator[None]:
        """Around the layers of this step's micro-batch `number`."""
        # Its place in the data: the same on any rank and in any round. Evaluation drops nothing.
        place = self._places[number] if self.task.model.training else ()
        dropout = dropout_key(self.config.seed, self.position.epoch, *place)
        with autocast(self.config.training.precision, self.layout.device), dropout:
            yield

    def _pinned(self, batch: Batch) -> Batch:
        """In memory that a GPU copies from while it computes."""
        return batch if self.layout.device.type == "cpu" else tuple(tensor.pin_memory() for tensor in batch)
