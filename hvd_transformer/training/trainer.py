"""The training step and the evaluation, for all tasks.

One step of a rank: each accumulation step is cut into micro-batches, which stream through the pipeline:

    accumulation step 1             accumulation step 2
    forward backward | … | forward backward | forward        backward      | update
                                              sums =======    buckets ===== |           (Horovod)
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hvd_transformer.checkpoint.capture import Capture
from hvd_transformer.checkpoint.restore import restore
from hvd_transformer.checkpoint.store import Snapshot
from hvd_transformer.checkpoint.writer import Begun
from hvd_transformer.comm.world import World, agree
from hvd_transformer.config.batch_size import rate_replicas
from hvd_transformer.config.schema import Config, flatten
from hvd_transformer.data.sampler import StepPlan
from hvd_transformer.gradients.optimizer import clip_factor
from hvd_transformer.nn.contracts import MicroBatch
from hvd_transformer.parallel.engine import Engine
from hvd_transformer.parallel.mesh import ParallelMesh
from hvd_transformer.parallel.precision import LossScaler
from hvd_transformer.planning.partition import choose_partition
from hvd_transformer.tasks.metrics import Evaluation, evaluate
from hvd_transformer.tasks.task import Batch, Task, split_batch
from hvd_transformer.training.job_setup import build_model
from hvd_transformer.training.lr_schedule import learning_rate
from hvd_transformer.training.state import NO_WISHES, StepResult, StepTotals, TrainState, Wishes

log = logging.getLogger(__name__)


class Diverged(RuntimeError):
    """The loss or the gradient is no longer a number."""

    def __init__(self, step: int, loss: float, norm: float) -> None:
        super().__init__(
            f"step {step}: the loss is {loss} and the gradient's norm {norm}; a lower "
            "optimizer.lr, more optimizer.warmup_steps or a smaller optimizer.clip_norm may help"
        )


class StepStats:
    """Sums of one step that are sent with the last loss, while backward runs: losses, targets, samples, wishes.

    Of a tensor group, whose ranks see the same samples, one rank counts. `counts` are this rank's targets and samples.
    """

    def __init__(
        self,
        world: World,
        mesh: ParallelMesh,
        num_losses: int,
        counts: tuple[int, int],
        wishes: Wishes,
    ) -> None:
        self._world, self._device, self._counts = world, mesh.devices[-1], mesh.tp_rank == 0
        self._left = num_losses
        self._loss = torch.zeros((), dtype=torch.float64, device=self._device)
        self._numbers = [*(counts if self._counts else (0, 0)), *wishes]
        if not num_losses:  # a rank without samples in this step
            self._send()

    def add_loss(self, loss: Tensor) -> None:
        """Add the loss of a micro-batch; the last stage calls this in their order."""
        if self._counts:
            self._loss += loss
        self._left -= 1
        if self._left == 0:
            self._send()

    def wait(self) -> StepTotals:
        self._wait()
        loss_sum, targets, samples, *wishes = self._sums.tolist()
        return StepTotals(loss_sum / targets, int(targets), int(samples), Wishes(*(ranks > 0 for ranks in wishes)))

    def _send(self) -> None:
        numbers = torch.tensor(self._numbers, dtype=torch.float64).to(self._device, non_blocking=True)
        self._sums = torch.cat([self._loss[None], numbers])
        self._wait: Callable[[], Tensor] = self._world.all_reduce_async_(self._sums, "step.sums")


class Trainer:
    """A job's model, optimizer and state, and what a step and an evaluation do to them.

    Without `draw` the weights are zero until `restore`.
    """

    def __init__(
        self, config: Config, world: World, mesh: ParallelMesh, task: Task, state: TrainState, *, draw: bool = True
    ) -> None:
        self.config, self.world, self.mesh, self.task, self.state = config, world, mesh, task, state
        self._capture: Capture | None = None
        shapes = agree(world, lambda: build_model(config, task, mesh, draw=draw))
        self.engine = Engine(
            config,
            world,
            mesh,
            task.model,
            task.layers,
            partition=choose_partition(config, task, mesh, world),
            splits=task.cuts,
            shapes=shapes,
            num_tokens=task.targets_per_step,
        )
        task.tick = self.engine.timeline.tick
        # Samples are generated outside of the pipeline, which takes a model that is on one device.
        self.num_text_samples = config.training.text_samples if len(set(mesh.devices)) == 1 else 0
        self.loss_scaler = LossScaler(config.training.precision)
        self.lr_replicas = rate_replicas(config.training, mesh.dp)
        self.total_steps = self._count_steps()

    def steps(self) -> Iterator[StepPlan]:
        """The steps that are left, over the epochs; `step` advances the state after each."""
        while self.state.step < self.total_steps:
            for plan in self.task.sampler.epoch(self.state.remaining, self.state.epoch):
                yield plan
                if self.state.step == self.total_steps:
                    return

    def step(self, plan: StepPlan, wishes: Wishes = NO_WISHES) -> StepResult:
        """Take one step: forward and backward, reduce, clip, update, advance.

        `wishes` are this rank's; the result has those of all ranks. Raises `Diverged`.
        """
        began, state, engine, task = time.perf_counter(), self.state, self.engine, self.task
        if not task.model.training:  # `train` visits all modules
            task.model.train()
        accumulation, counts = self._fetch(plan)
        num_micro_batches = sum(map(len, accumulation))
        stats = StepStats(self.world, self.mesh, num_micro_batches, counts, wishes)

        engine.grad_sync.begin_step(num_micro_batches)
        scale = self.loss_scaler.scale / task.targets_per_step
        # Full buffers leave during the last backwards.
        engine.pipeline.forward_backward(accumulation, scale, stats.add_loss)
        engine.wait_params()  # also on a rank without samples in this step
        engine.grad_sync.send_rest()

        waiting = time.perf_counter()
        engine.grad_sync.wait()
        totals = stats.wait()
        waited = time.perf_counter() - waiting

        rate = learning_rate(self.config.optimizer, self.lr_replicas, state.step, state.epoch, self.total_steps)
        factor = task.targets_per_step / (totals.targets * self.loss_scaler.scale)
        norm = factor * engine.grad_norm()
        if math.isfinite(norm) and math.isfinite(totals.loss):
            engine.update(factor * clip_factor(norm, self.config.optimizer.clip_norm), rate)
            self.loss_scaler.good()
            state.updates += 1
        elif engine.overflowed_in_transit():
            log.warning("step %d is skipped: a sum of gradients overflowed in transit", state.step + 1)
        elif not self.loss_scaler.overflowed():
            raise Diverged(state.step + 1, totals.loss, norm)

        seconds = time.perf_counter() - began
        result = StepResult(state.epoch, totals, norm, rate, seconds, seconds - waited)
        state.advance(plan.remaining, totals.samples, totals.targets)
        return result

    def evaluate(self, split: str) -> Evaluation:
        """The loss and metrics of a whole split, shared over the ranks. Collective."""
        self.engine.wait_params()
        self.task.model.eval()
        pipeline, num_stages = self.engine.pipeline, len(self.engine.stages)

        def losses() -> Iterator[tuple[Tensor, int]]:
            batches = self.task.evaluation_batches(split)
            # Enough at a time to keep all stages busy.
            while group := list(islice(batches, 1 if num_stages == 1 else 8 * num_stages)):
                found = pipeline.evaluate([self.task.micro_batch(self._pinned(batch)) for batch in group])
                yield from zip(found, map(self.task.num_targets, group), strict=True)

        sums, count = evaluate(losses(), self.mesh.dp_group, self.task.num_sums)
        metrics = self.task.metrics(sums, count) | self.task.more_metrics(split, self.mesh.dp_group)
        return Evaluation(metrics, count)

    def text_samples(self, split: str) -> Sequence[Mapping[str, str]]:
        """What the model writes after the evaluation of a split; on the ranks of other replicas nothing. Collective."""
        if self.mesh.dp_rank != 0:
            return ()
        # Texts that grow would be compiled anew for many lengths.
        compiled = self.config.training.compile and self.mesh.device.type == "cuda"
        eager: AbstractContextManager[object] = torch.compiler.set_stance("force_eager") if compiled else nullcontext()
        with eager, torch.no_grad():
            return self.task.text_samples(split, self.num_text_samples)

    def capture(self, data_digest: str, checksum: int, best: bool, begun: Begun | None = None) -> Snapshot:
        """This rank's part of a checkpoint of the job as it is now, with the weights' checksum. Collective.

        `best`: of all so far. `begun` says who writes, and that the snapshot before is written: this one takes its
        memory. None: every rank sees the folder.
        """
        task = self.task
        state = {
            "task": self.config.task,
            "config": flatten(self.config),
            "data_digest": data_digest,
            "splits": getattr(task.data, "split_digests", {}),
            "dp": self.mesh.dp,
            "weights_checksum": checksum,
            "position": self.state.state(),
            "loss_scaler": self.loss_scaler.state(),
            "wire": self.engine.wire_states(),
            **task.facts,
        }
        texts = {**task.files, **self.tokenizer_files}
        return self._capture_for(begun).take(self.state.step, state, texts, best)

    def _capture_for(self, begun: Begun | None) -> Capture:
        if begun is None:
            return Capture(self.engine)
        if self._capture is None or self._capture.writers != begun.writers:
            self._capture = None  # frees its memory first
            self._capture = Capture(self.engine, begun.writers)
        return self._capture

    def restore(self, folder: Path | None, saved: Mapping[str, Any]) -> None:
        """Weights, optimizer and scales of a checkpoint, rank 0's `folder`; `saved` is its state. Collective."""
        restore(self.engine, folder, self.state.updates)
        self.loss_scaler.load(saved["loss_scaler"])
        self.engine.load_wire_states(saved.get("wire", []))

    @cached_property
    def tokenizer_files(self) -> dict[str, str]:
        """The tokenizers' texts by the file name that a checkpoint gives them."""
        return {
            f"{prefix}{name}": text
            for prefix, tokenizer in self.task.tokenizers.items()
            for name, text in tokenizer.files().items()
        }

    def _fetch(self, plan: StepPlan) -> tuple[list[list[MicroBatch]], tuple[int, int]]:
        """This rank's micro-batches, one list per accumulation step, and the numbers of their targets and samples."""
        accumulation: list[list[MicroBatch]] = []
        targets = samples = 0
        with self.engine.timeline.span("data", "batches"):
            for items in plan.accumulation:
                batch = self._pinned(self.task.batch(self.state.epoch, items))
                batches = split_batch(batch, self.config.parallel.micro_batches)
                targets += sum(map(self.task.num_targets, batches))
                samples += sum(piece[0].size(0) for piece in batches)
                # Dropout depends on the place in the data: the same on any rank and in any accumulation step.
                key = (self.config.seed, self.state.epoch, items.start)
                accumulation.append(
                    [
                        self.task.micro_batch(piece)._replace(dropout_key=(*key, number))
                        for number, piece in enumerate(batches)
                    ]
                )
        return accumulation, (targets, samples)

    def _count_steps(self) -> int:
        """The job's last step, as far as it is known now: another global batch size in mid-epoch changes it."""
        training, state, sampler = self.config.training, self.state, self.task.sampler
        total = state.step
        if state.epoch < training.epochs:
            total += sampler.num_steps(state.remaining)
            total += (training.epochs - state.epoch - 1) * sampler.num_steps()
        return total if training.max_steps is None else min(total, max(training.max_steps, state.step))

    def _pinned(self, batch: Batch) -> Batch:
        """In memory that a GPU copies from while it computes."""
        return batch if self.mesh.device.type == "cpu" else tuple(tensor.pin_memory() for tensor in batch)
