"""Streams micro-batches through the stages of one rank's model, one worker thread per stage.

    stage 0   F0 F1 | F2 B0 | F3 B1 | …      each worker follows its list of the schedule
                 \\      /
    stage 1      F0 B0 | F1 B1 | …           activations go down the channels, their gradients up

A backward sends the gradient up before the weight gradients of linear layers are computed, which nobody waits for.

A stage runs its backwards in the order of the micro-batches, so gradients add up as without a pipeline, bit for bit.
With one stage everything runs in the caller's thread. `parallel.pipeline_schedule` has the schedules.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hvd_transformer.comm.group import PeerLost
from hvd_transformer.gradients.buffers import GradBuffer
from hvd_transformer.gradients.param_all_gather import ParamWaits
from hvd_transformer.gradients.sync import GradSync
from hvd_transformer.gradients.weight_grads import WeightGradStore
from hvd_transformer.monitoring.timeline import Timeline
from hvd_transformer.nn.contracts import Layer, MicroBatch, Tensors
from hvd_transformer.nn.dropout import dropout_key
from hvd_transformer.parallel.pipeline_schedule import Operation, Schedule, ScheduleName, forward_only, make_schedule
from hvd_transformer.parallel.precision import Precision, autocast
from hvd_transformer.parallel.stage_link import Aborted, Channel, StageTensors, make_streams

Recompute = Literal["never", "always", "except_last"]
Result = TypeVar("Result")


class Stage:
    """Neighbouring layers on one device."""

    def __init__(self, layers: Sequence[Layer], device: torch.device) -> None:
        self.layers, self.device = layers, device
        self.weight_grads = WeightGradStore()
        self.buffers: Sequence[GradBuffer] = ()
        self.waits: ParamWaits = {}


class StageFailed(RuntimeError):
    """Raised with the names of the stage, the layer and the micro-batch; its cause is the original error."""


def worker_threads(num_stages: int) -> int:
    """Torch threads per stage worker: together as many as this process has."""
    return max(1, torch.get_num_threads() // num_stages)


@contextmanager
def layer_context(precision: Precision, device: torch.device, key: Sequence[int]) -> Iterator[None]:
    """The context of each call of a layer: autocast, and the dropout key."""
    with autocast(precision, device), dropout_key(*key):
        yield


class Pipeline:
    """The stages and their workers, of `threads` torch threads each. The last layer returns a loss.

    `grad_sync` is told of each stage's last backward; `timeline` records what each stage does when.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        *,
        schedule: ScheduleName = "1f1b",
        recompute: Recompute = "never",
        precision: Precision = "fp32",
        grad_sync: GradSync | None = None,
        threads: int = 1,
        timeline: Timeline | None = None,
    ) -> None:
        self.stages, self.schedule, self.recompute = stages, schedule, recompute
        self.precision, self.grad_sync = precision, grad_sync
        self.timeline = timeline or Timeline(0, [])
        self.streams = make_streams([stage.device for stage in stages])
        self._workers = [
            ThreadPoolExecutor(1, f"stage-{stage}", torch.set_num_threads, (threads,))
            for stage in range(len(stages) if len(stages) > 1 else 0)
        ]

    def forward_backward(
        self, accumulation: Sequence[Sequence[MicroBatch]], scale: float, add_loss: Callable[[Tensor], None]
    ) -> None:
        """Run all micro-batches of a step, one accumulation step after the other; raises `StageFailed`.

        The last stage's worker gives each micro-batch's loss to `add_loss`, in order. Gradients are those of `scale` ×
        the sum of the losses. In the last accumulation step full gradient buffers are sent while backward goes on.
        """
        first_number = 0
        for number, micro_batches in enumerate(accumulation, start=1):
            schedule = make_schedule(self.schedule, len(self.stages), len(micro_batches))
            grad_sync = self.grad_sync if number == len(accumulation) else None
            run = ScheduleRun(self, micro_batches, schedule, add_loss, first_number, scale, grad_sync)
            self.map(run.work)
            first_number += len(micro_batches)

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return the losses of forward passes without gradients; raises `StageFailed`."""
        losses: list[Tensor] = []
        run = ScheduleRun(self, micro_batches, forward_only(len(self.stages), len(micro_batches)), losses.append)
        self.map(torch.no_grad()(run.work))  # in each stage's own thread
        return losses

    def map(self, function: Callable[[int], Result]) -> list[Result]:
        """Call `function(stage)` for all stages in parallel, each in its own worker; returns the results."""
        if not self._workers:
            return [function(0)]

        def work(stage: int) -> Result:
            with self.streams[stage].computing():
                return function(stage)

        for streams in self.streams:
            streams.begin()
        waiting = [worker.submit(work, stage) for stage, worker in enumerate(self._workers)]
        errors = [error for future in waiting if (error := future.exception()) is not None]
        if errors:  # all workers have ended; `Aborted` ones ended because another stage failed
            raise next((error for error in errors if not isinstance(error, Aborted)), errors[0])
        for streams in self.streams:
            streams.end()
        return [future.result() for future in waiting]

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.shutdown()


@dataclass
class ScheduleRun:
    """One pass of some micro-batches through all stages."""

    pipeline: Pipeline
    micro_batches: Sequence[MicroBatch]
    schedule: Schedule
    add_loss: Callable[[Tensor], None]
    first_number: int = 0  # of the first micro-batch, within the step
    scale: float = 1.0
    grad_sync: GradSync | None = None

    def __post_init__(self) -> None:
        num_stages = len(self.schedule)
        # This capacity avoids deadlocks: no stage waits for room in a channel while its neighbour waits for it.
        self.down, self.up = ([Channel(num_stages) for _ in range(num_stages)] for _ in range(2))

    def work(self, stage: int) -> None:
        """Run all operations of one stage; an error ends the other stages, too."""
        runner = StageRunner(self, stage)
        for operation in self.schedule[stage]:
            try:
                runner.run(operation)
            except BaseException as error:
                for channel in (*self.down, *self.up):
                    channel.abort()
                if isinstance(error, (Aborted, PeerLost)) or len(self.schedule) == 1:
                    raise
                where = runner.where(operation, error)
                raise StageFailed(f"{where}: {error or type(error).__name__}") from error


class StageRunner:
    """The work of one stage in one `ScheduleRun`."""

    def __init__(self, schedule_run: ScheduleRun, index: int) -> None:
        pipeline = schedule_run.pipeline
        self._run, self._index, self._lane = schedule_run, index, f"stage {index}"
        self._stage, self._streams, self._timeline = pipeline.stages[index], pipeline.streams[index], pipeline.timeline
        self._is_first, self._is_last = index == 0, index == len(pipeline.stages) - 1
        self._splits_backward = any(operation.kind == "weights" for operation in schedule_run.schedule[0])
        self._saved: dict[int, tuple[Tensors, Tensors]] = {}  # inputs and outputs, from forward to backward
        self._stage.weight_grads.clear()

    def run(self, operation: Operation) -> None:
        kind, number = operation
        if kind == "forward":
            self._forward(number)
        elif kind == "backward":
            self._backward(number)
        if kind == ("weights" if self._splits_backward else "backward") and self._defers(number):
            with self._timeline.span(self._lane, f"weights {self._run.first_number + number}"):
                self._stage.weight_grads.run_oldest()

    def where(self, operation: Operation, error: BaseException) -> str:
        """Describe the place of an error."""
        layers, name = self._stage.layers, getattr(error, "failed_layer", None)
        layer = f"layer {name}" if name else f"layers {layers[0].name} to {layers[-1].name}"
        number = self._run.first_number + operation.micro_batch
        return f"stage {self._index}, {layer}, micro-batch {number}, {operation.kind}"

    def _forward(self, number: int) -> None:
        micro, layers, trains = self._run.micro_batches[number], self._stage.layers, torch.is_grad_enabled()
        received = self._receive(StageTensors(micro.inputs) if self._is_first else self._run.down[self._index].get())
        inputs = tuple(tensor.detach() for tensor in received if tensor is not None)
        if not self._is_first and trains:
            inputs = tuple(tensor.requires_grad_(tensor.is_floating_point()) for tensor in inputs)
        targets = self._receive(StageTensors(micro.targets)) if self._is_last else ()
        recomputes = trains and self._recomputes(number)
        tensors = inputs
        with self._timeline.span(self._lane, f"forward {self._run.first_number + number}"):
            for layer in layers:
                if self._is_last and layer is layers[-1]:
                    tensors += tuple(tensor for tensor in targets if tensor is not None)
                tensors = self._call(layer, tensors, micro, recomputes and layer.recompute)
        if self._is_last:
            self._run.add_loss(tensors[0].detach())
        else:
            self._run.down[self._index + 1].put(self._streams.send([tensor.detach() for tensor in tensors]))
        if trains:
            self._saved[number] = (inputs, tensors)

    def _backward(self, number: int) -> None:
        grads = None if self._is_last else self._receive(self._run.up[self._index].get())
        if self._run.grad_sync is not None and number == len(self._run.micro_batches) - 1:
            self._run.grad_sync.expect_last_backward(self._stage.buffers)
        inputs, outputs = self._saved.pop(number)
        if grads is None:  # a gradient given for the loss would make torch import sympy, which takes a second
            pairs: list[tuple[Tensor, Tensor | None]] = [(outputs[0] * self._run.scale, None)]
        else:
            pairs = [
                (tensor, grad)
                for tensor, grad in zip(outputs, grads, strict=True)
                if tensor.requires_grad and grad is not None
            ]
        span = self._timeline.span(self._lane, f"backward {self._run.first_number + number}")
        with span, self._stage.weight_grads.deferring() if self._defers(number) else nullcontext():
            torch.autograd.backward([tensor for tensor, _ in pairs], [grad for _, grad in pairs])
        if not self._is_first:
            self._run.up[self._index - 1].put(self._streams.send([tensor.grad for tensor in inputs]))

    def _receive(self, sent: StageTensors) -> Sequence[Tensor | None]:
        if all(tensor is None or tensor.device == self._streams.device for tensor in sent.tensors):
            return self._streams.receive(sent)
        with self._timeline.span(f"copies to {self._lane}", "copy"):
            return self._streams.receive(sent)

    def _call(self, layer: Layer, tensors: Tensors, micro: MicroBatch, recomputes: bool) -> Tensors:
        def run(*inputs: Tensor) -> Tensors:
            # The context is inside: a recomputed layer must see the same.
            with layer_context(self._run.pipeline.precision, self._stage.device, micro.dropout_key):
                try:
                    for all_gather, place in self._stage.waits.get(layer.name, ()):
                        all_gather.wait(place)
                    result = layer.run(*inputs)
                except Exception as error:
                    error.failed_layer = layer.name  # type: ignore[attr-defined]
                    raise
            return result if isinstance(result, tuple) else (result,)

        if not recomputes:
            return run(*tensors)
        # Nothing here draws from torch's own generators, so there is no random state to restore.
        result: Tensors = checkpoint(run, *tensors, use_reentrant=False, preserve_rng_state=False)
        return result

    def _recomputes(self, number: int) -> bool:
        kind = self._run.pipeline.recompute  # except_last: the last backward follows its forward at once
        return kind == "always" or (kind == "except_last" and number < len(self._run.micro_batches) - 1)

    def _defers(self, number: int) -> bool:
        """Whether weight gradients are deferred until the end of backward.

        That takes memory, which recomputation should save; and the first stage has no stage to send a gradient to.
        """
        return self._splits_backward or (not self._is_first and not self._recomputes(number))
