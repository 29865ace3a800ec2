"""A job's model, optimizer and data on one rank: steps, evaluations, and what a checkpoint holds, for all tasks."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hvd_transformer.checkpoint.capture import Capture
from hvd_transformer.checkpoint.restore import restore, restore_outer_state, restore_wire
from hvd_transformer.checkpoint.store import Snapshot
from hvd_transformer.checkpoint.task_entries import check_task_entries
from hvd_transformer.checkpoint.writer import Begun
from hvd_transformer.comm.streams import has_streams
from hvd_transformer.comm.world import World, agree
from hvd_transformer.config.batch_size import rate_replicas
from hvd_transformer.config.schema import Config, flatten
from hvd_transformer.data.sampler import StepPlan
from hvd_transformer.errors import UserError
from hvd_transformer.models.lora import CHANGED_BASE
from hvd_transformer.nn.contracts import MicroBatch
from hvd_transformer.parallel.engine import Engine
from hvd_transformer.parallel.layer_inputs import inputs_moved
from hvd_transformer.parallel.mesh import ParallelMesh
from hvd_transformer.parallel.precision import LossScaler
from hvd_transformer.planning.partition import choose_partition
from hvd_transformer.tasks.metrics import Evaluation, evaluate, together
from hvd_transformer.tasks.task import Batch, Task, split_batch
from hvd_transformer.training.job_setup import build_model
from hvd_transformer.training.prefetch import Prefetch
from hvd_transformer.training.state import NO_WISHES, StepResult, Sums, TrainState, Wishes
from hvd_transformer.training.training_step import TrainingStep


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
            num_tokens=task.lookups_per_step,
        )
        task.tick = self.engine.timeline.tick
        self.loss_scaler = LossScaler(config.training.precision)
        local_steps = config.communication.local_steps
        self.lr_replicas = rate_replicas(config.training, mesh.dp, local_steps, state.rate_batch_size)
        self.total_steps = self._count_steps()
        self.updates_ahead = has_streams(mesh.device) and self.engine.takes_factor
        self.prefetch = Prefetch(self._fetch)
        self._next: StepPlan | None = None  # of the same epoch
        self.unsent = Sums()  # of the local steps that the other ranks do not know of
        self.steps_without_loss = 0  # the last steps in a row; the weights may be no numbers any more
        self.ended = -math.inf  # when the last result was read; the host's clock

    def steps(self) -> Iterator[StepPlan]:
        """The steps that are left, over the epochs; `queue` advances the state."""
        while self.state.step < self.total_steps:
            plans = self.task.sampler.epoch(self.state.remaining, self.state.epoch)
            self._next = next(plans, None)
            while (plan := self._next) is not None:
                self._next = next(plans, None) if self.state.step + 1 < self.total_steps else None
                yield plan

    @property
    def reads_late(self) -> bool:
        """Whether the next step may be queued before this one's result is read: on GPUs, unless something in it depends
        on the result, such as float16's loss scale or what replicas exchange after local steps."""
        return self.updates_ahead and not self.loss_scaler.active and not self.engine.local_steps.active

    def queue(
        self, plan: StepPlan, wishes: Wishes = NO_WISHES, costs: Sequence[float] = (), *, report: bool = True
    ) -> TrainingStep:
        """Start one step, and advance the state. Call its `result` before anything else; with `reads_late` the next
        step may be queued first. Collective."""
        return TrainingStep(self, plan, wishes, costs, report=report)

    def step(
        self, plan: StepPlan, wishes: Wishes = NO_WISHES, costs: Sequence[float] = (), *, report: bool = True
    ) -> StepResult:
        """Take one step. Raises `Diverged`. Collective."""
        return self.queue(plan, wishes, costs, report=report).result()

    def take_batches(self, plan: StepPlan) -> tuple[list[list[MicroBatch]], tuple[int, int], float]:
        """This rank's micro-batches of a step, as `_fetch` returns them; then the next step's are fetched."""
        found = self.prefetch.take(plan, self.state.epoch)
        self.prefetch.start(self._next, self.state.epoch)
        return found

    def synchronize(self) -> None:
        """Make the replicas equal after local steps, with their optimizer states and loss scales. Collective."""
        if not self.engine.local_steps.average_all(self.engine.optimizer_state()):
            return
        own = [self.loss_scaler.scale, self.loss_scaler.good_steps, self.state.updates]
        numbers = torch.tensor(own, dtype=torch.float64)
        scale, good_steps, updates = self.mesh.dp_group.all_reduce_(numbers, "average.scales", "min").tolist()
        self.loss_scaler.load({"scale": scale, "good_steps": good_steps})
        self.state.updates = int(updates)
        self.engine.set_updates(self.state.updates)

    def evaluate(self, split: str) -> Evaluation:
        """The loss and metrics of a whole split, shared over the ranks, and the loss of each of its parts that has a
        name. Collective."""
        self.prefetch.wait()
        self.engine.wait_params()
        self.engine.local_steps.average()
        self.engine.begin_forward()
        self.task.model.eval()
        pipeline, num_stages = self.engine.pipeline, len(self.engine.stages)

        def losses(batches: Iterator[Batch]) -> Iterator[tuple[Tensor, int]]:
            # Enough at a time to keep all stages busy.
            while group := list(islice(batches, 1 if num_stages == 1 else 8 * num_stages)):
                found = pipeline.evaluate([self._pinned(self.task.micro_batch(batch)) for batch in group])
                yield from zip(found, map(self.task.num_targets, group), strict=True)

        parts = self.task.evaluation_parts(split)
        found = evaluate(map(losses, parts.values()), self.mesh.dp_group, self.task.num_sums)
        sums, count = together(found)
        with self._eager(), inputs_moved(self.engine.stages):
            more = self.task.more_metrics(split, self.mesh.dp_group)
        metrics = self.task.metrics(sums, count) | more
        for name, part in zip(parts, found, strict=True):
            if name and part.num_targets:  # none in an evaluation of few samples
                metrics[f"{name}_loss"] = self.task.metrics(*part)["loss"]
        # A task of one's own may give them as NumPy's numbers or tensors, which JSON and messages do not take.
        return Evaluation({name: float(value) for name, value in metrics.items()}, count)

    def text_samples(self, split: str) -> Sequence[Mapping[str, str]]:
        """Text samples after the evaluation of a split; empty on the ranks of other replicas. Collective."""
        if self.mesh.dp_rank != 0:
            return ()
        with self._eager(), torch.no_grad(), inputs_moved(self.engine.stages):
            return self.task.text_samples(split, self.config.training.text_samples)

    def _eager(self) -> AbstractContextManager[object]:
        """For decoding: texts that grow would be compiled anew for many lengths."""
        compiled = self.config.training.compile and self.mesh.device.type == "cuda"
        return torch.compiler.set_stance("force_eager") if compiled else nullcontext()

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
            "frozen_checksum": self.engine.frozen_checksum,
            **task.facts,
        }
        texts = {**task.files, **self.tokenizer_files}
        with self.engine.averaged_weights():
            return self._capture_for(begun).take(self.state.step, state, texts, best)

    def check_task_entries(self) -> None:
        """Raise `UserError` for what the task wants in a checkpoint that cannot be there."""
        check_task_entries(self.task.facts, self.task.files, self.tokenizer_files)

    def _capture_for(self, begun: Begun | None) -> Capture:
        if begun is None:
            return Capture(self.engine)
        wire = self.engine.grad_sync.wire
        if self._capture is None or (self._capture.writers, self._capture.compression) != (begun.writers, wire.format):
            self._capture = None  # frees its memory first
            self._capture = Capture(self.engine, begun.writers)
        return self._capture

    def restore(self, folder: Path | None, saved: Mapping[str, Any]) -> None:
        """Load what a checkpoint has, rank 0's `folder`; `saved` is its state. Collective.

        Raises `UserError` if the weights that are not trained differ from those it was trained with.
        """
        self.check_frozen(saved)
        restore(self.engine, folder, self.state.updates)
        if self.engine.local_steps.active and saved["dp"] > 1:  # a single replica has no outer weights
            restore_outer_state(self.engine, folder, self.state.step)
        self.loss_scaler.load(saved["loss_scaler"])
        self.engine.load_wire_states(saved.get("wire", []))
        restore_wire(self.engine, folder)

    def check_frozen(self, saved: Mapping[str, Any]) -> None:
        """Raise `UserError` if the weights that are not trained differ from those of a checkpoint. Collective."""

        def check() -> None:
            if saved.get("frozen_checksum") == self.engine.frozen_checksum:
                return
            if (pretrained := self.config.model.pretrained) is not None:
                raise UserError(f"model.pretrained={pretrained}: {CHANGED_BASE}")
            raise UserError(
                f"task={self.config.task}: the weights in `frozen` are not those that the checkpoint was trained with"
            )

        agree(self.world, check)

    @cached_property
    def tokenizer_files(self) -> dict[str, str]:
        """The tokenizers' texts by the file name that a checkpoint gives them."""
        return {
            f"{prefix}{name}": text
            for prefix, tokenizer in self.task.tokenizers.items()
            for name, text in tokenizer.files().items()
        }

    def close(self) -> None:
        """End the threads of the stages and of the data."""
        self.prefetch.close()
        self.engine.close()

    def _fetch(self, plan: StepPlan, epoch: int) -> tuple[list[list[MicroBatch]], tuple[int, int], float]:
        """This rank's micro-batches, one list per accumulation step; how many targets and samples; FLOPs."""
        accumulation: list[list[MicroBatch]] = []
        targets, samples, flops = 0, 0, 0.0
        with self.engine.timeline.span("data", "batches"):
            for items in plan.accumulation:
                batch = self.task.batch(epoch, items)
                flops += self.task.flops(batch)
                batches = split_batch(batch, self.config.parallel.micro_batches)
                targets += sum(map(self.task.num_targets, batches))
                samples += sum(piece[0].size(0) for piece in batches)
                # Dropout depends on the place in the data: the same on any rank and in any accumulation step.
                key = (self.config.seed, epoch, items.start)
                accumulation.append(
                    [
                        self._pinned(self.task.micro_batch(piece))._replace(dropout_key=(*key, number))
                        for number, piece in enumerate(batches)
                    ]
                )
        return accumulation, (targets, samples), flops

    def _count_steps(self) -> int:
        """The job's last step, as far as it is known now: another global batch size in mid-epoch changes it."""
        training, state, sampler = self.config.training, self.state, self.task.sampler
        total = state.step
        if state.epoch < training.epochs:
            total += sampler.num_steps(state.remaining)
            total += (training.epochs - state.epoch - 1) * sampler.num_steps()
        return total if training.max_steps is None else min(total, max(training.max_steps, state.step))

    def _pinned(self, batch: MicroBatch) -> MicroBatch:
        """In memory that a GPU copies from while it computes; torch keeps it until those copies are done."""
        if self.mesh.device.type == "cpu":
            return batch
        inputs, targets = (tuple(tensor.pin_memory() for tensor in part) for part in (batch.inputs, batch.targets))
        return batch._replace(inputs=inputs, targets=targets)
