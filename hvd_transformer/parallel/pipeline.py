r"""Streams micro-batches through the stages of one rank's model, a worker thread a stage.

    stage 0   F0 F1 | F2 B0 | F3 B1 | …      each worker follows its list of the schedule
                 \      /
    stage 1      F0 B0 | F1 B1 | …           tuples of tensors go down the channels, their gradients up

A backward hands the gradient up before it adds up those of linear layers' weights, which nobody waits for.

A stage runs its backwards in the order of the micro-batches, so gradients add up as without a pipeline, bit for bit.
With one stage everything runs in the caller's thread. (GPipe: Huang et al. 2019, arXiv 1811.06965; 1F1B: Narayanan et
al. 2021, arXiv 2104.04473.)
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hvd_transformer.comm.group import PeerLost
from hvd_transformer.gradients.weight_grads import WeightGradStore
from hvd_transformer.monitoring.timeline import Timeline
from hvd_transformer.nn.contracts import Layer, MicroBatch, Stage, Tensors
from hvd_transformer.parallel.pipeline_schedule import Operation, Schedule, ScheduleName, forward_only, make_schedule
from hvd_transformer.parallel.stage_link import Aborted, Channel, StageTensors, make_streams

Recompute = Literal["never", "always", "except_last"]
Result = TypeVar("Result")
# Called with the stage and the losses so far.
BeforeLastBackward = Callable[[int, Sequence[Tensor]], None]


class StageFailed(RuntimeError):
    """Names the stage, the layer and the micro-batch; the cause is the original error."""


def worker_threads(num_stages: int) -> int:
    """Threads of torch for each stage's worker: together as many as this process has."""
    return max(1, torch.get_num_threads() // num_stages)


class Pipeline:
    """The stages and their workers. The last layer returns a loss.

    `context(number)` surrounds the layers of micro-batch `number`: autocast, the place of dropout. `threads`: the
    torch threads of each worker. `timeline` gets what each stage does when.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        *,
        schedule: ScheduleName = "1f1b",
        recompute: Recompute = "never",
        context: Callable[[int], AbstractContextManager[Any]],
        threads: int = 1,
        timeline: Timeline | None = None,
    ) -> None:
        self.stages, self.schedule, self.recompute, self.context = stages, schedule, recompute, context
        self.timeline = timeline or Timeline(0, [])
        self.later = [WeightGradStore() for _ in stages]
        self.streams = make_streams([stage.device for stage in stages])
        self._workers = [
            ThreadPoolExecutor(1, f"stage-{stage}", torch.set_num_threads, (threads,))
            for stage in range(len(stages) if len(stages) > 1 else 0)
        ]

    def train(
        self,
        micro_batches: Sequence[MicroBatch],
        scale: float,
        *,
        first_number: int = 0,
        before_last_backward: BeforeLastBackward | None = None,
    ) -> list[Tensor]:
        """Forward and backward of all; returns their losses. Gradients are those of scale × the sum of the losses.

        `first_number` is the first micro-batch's number within the step. `before_last_backward(stage, losses)` is
        called by each stage's worker; in the last stage's call all losses are there. Raises `StageFailed`.
        """
        schedule = make_schedule(self.schedule, len(self.stages), len(micro_batches))
        run = ScheduleRun(self, micro_batches, schedule, first_number, scale, before_last_backward)
        self.map(run.work)
        return run.losses

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """The losses alone. Raises `StageFailed`."""
        run = ScheduleRun(self, micro_batches, forward_only(len(self.stages), len(micro_batches)))

        @torch.no_grad()  # it counts for its own thread alone
        def work(stage: int) -> None:
            run.work(stage)

        self.map(work)
        return run.losses

    def map(self, function: Callable[[int], Result]) -> list[Result]:
        """`function(stage)` of all stages side by side, each by its own worker."""
        if not self._workers:
            return [function(0)]

        def work(stage: int) -> Result:
            with self.streams[stage].computing():
                return function(stage)

        for streams in self.streams:
            streams.begin()
        waiting = [worker.submit(work, stage) for stage, worker in enumerate(self._workers)]
        errors = [error for future in waiting if (error := future.exception()) is not None]
        if errors:  # all have ended by now; who was only broken off has nothing to say
            raise next((error for error in errors if not isinstance(error, Aborted)), errors[0])
        for streams in self.streams:
            streams.end()
        return [future.result() for future in waiting]

    def close(self) -> None:
        """Ends the workers."""
        for worker in self._workers:
            worker.shutdown()


class SavedActivations(NamedTuple):
    """What a stage keeps of a micro-batch from its forward to its backward."""

    inputs: Tensors
    outputs: Tensors


class ScheduleRun:
    """One pass of some micro-batches through all stages."""

    def __init__(
        self,
        pipeline: Pipeline,
        micro_batches: Sequence[MicroBatch],
        schedule: Schedule,
        first_number: int = 0,
        scale: float = 1.0,
        before_last_backward: BeforeLastBackward | None = None,
    ) -> None:
        self.pipeline, self.micro_batches, self.schedule = pipeline, micro_batches, schedule
        self.first_number, self.scale, self.before_last_backward = first_number, scale, before_last_backward
        self.losses: list[Tensor] = []
        self._split = any(operation.kind == "weights" for operation in schedule[0])
        num_stages = len(pipeline.stages)
        # Of this size no schedule ever waits for room with its neighbour waiting for it.
        self._down: list[Channel[StageTensors]] = [Channel(num_stages) for _ in range(num_stages)]
        self._up: list[Channel[StageTensors]] = [Channel(num_stages) for _ in range(num_stages)]

    def work(self, stage: int) -> None:
        """All operations of one stage."""
        held: dict[int, SavedActivations] = {}
        self.pipeline.later[stage].clear()
        for operation in self.schedule[stage]:
            try:
                if operation.kind == "forward":
                    self._forward(stage, operation.micro_batch, held)
                elif operation.kind == "backward":
                    self._backward(stage, operation.micro_batch, held)
                if operation.kind == ("weights" if self._split else "backward"):
                    self._weights(stage, operation.micro_batch)
            except BaseException as error:
                self._abort()
                if isinstance(error, (Aborted, PeerLost)) or len(self.schedule) == 1:
                    raise
                raise StageFailed(f"{self._where(stage, operation, error)}: {error or type(error).__name__}") from error

    def _abort(self) -> None:
        for down in self._down:
            down.abort()
        for up in self._up:
            up.abort()

    def _forward(self, stage: int, number: int, held: dict[int, SavedActivations]) -> None:
        layers, _ = self.pipeline.stages[stage]
        micro = self.micro_batches[number]
        first, last = stage == 0, stage == len(self.pipeline.stages) - 1
        received = self._received(stage, StageTensors(micro.inputs) if first else self._down[stage].get())
        inputs = tuple(tensor.detach() for tensor in received if tensor is not None)
        if not first and torch.is_grad_enabled():
            inputs = tuple(tensor.requires_grad_(tensor.is_floating_point()) for tensor in inputs)
        targets = self._received(stage, StageTensors(micro.targets)) if last else ()
        again = torch.is_grad_enabled() and self._recomputes(number)
        tensors = inputs
        with self.pipeline.timeline.span(f"stage {stage}", f"forward {self.first_number + number}"):
            for layer in layers:
                if last and layer is layers[-1]:
                    tensors += tuple(tensor for tensor in targets if tensor is not None)
                tensors = self._call(layer, tensors, self.first_number + number, again and layer.recompute)
        if last:
            self.losses.append(tensors[0].detach())
        else:
            self._down[stage + 1].put(self.pipeline.streams[stage].send([tensor.detach() for tensor in tensors]))
        if torch.is_grad_enabled():
            held[number] = SavedActivations(inputs, tensors)

    def _backward(self, stage: int, number: int, held: dict[int, SavedActivations]) -> None:
        last = stage == len(self.pipeline.stages) - 1
        grads = None if last else self._received(stage, self._up[stage].get())
        if self.before_last_backward is not None and number == len(self.micro_batches) - 1:
            self.before_last_backward(stage, self.losses)
        inputs, outputs = held.pop(number)
        if grads is None:  # a gradient given for the loss would have torch import sympy, for a second
            pairs: list[tuple[Tensor, Tensor | None]] = [(outputs[0] * self.scale, None)]
        else:
            pairs = [
                (tensor, grad)
                for tensor, grad in zip(outputs, grads, strict=True)
                if tensor.requires_grad and grad is not None
            ]
        span = self.pipeline.timeline.span(f"stage {stage}", f"backward {self.first_number + number}")
        with span, self.pipeline.later[stage].collect() if self._waits(stage, number) else nullcontext():
            torch.autograd.backward([tensor for tensor, _ in pairs], [grad for _, grad in pairs])
        if stage > 0:
            self._up[stage - 1].put(self.pipeline.streams[stage].send([tensor.grad for tensor in inputs]))

    def _received(self, stage: int, parcel: StageTensors) -> Sequence[Tensor | None]:
        streams = self.pipeline.streams[stage]
        if all(tensor is None or tensor.device == streams.device for tensor in parcel.tensors):
            return streams.receive(parcel)
        with self.pipeline.timeline.span(f"copies to stage {stage}", "copy"):
            return streams.receive(parcel)

    def _waits(self, stage: int, number: int) -> bool:
        """Whether the weights' gradients wait for the end of backward. It takes memory, which who recomputes wants
        most; and the first stage has nobody to hand a gradient to."""
        return self._split or (stage > 0 and not self._recomputes(number))

    def _weights(self, stage: int, number: int) -> None:
        if self._waits(stage, number):
            with self.pipeline.timeline.span(f"stage {stage}", f"weights {self.first_number + number}"):
                self.pipeline.later[stage].run()

    def _call(self, layer: Layer, tensors: Tensors, number: int, again: bool) -> Tensors:
        def run(*inputs: Tensor) -> Tensors:
            # Inside, as a layer computed again in backward must see the same.
            with self.pipeline.context(number):
                try:
                    result = layer.run(*inputs)
                except Exception as error:
                    error.failed_layer = layer.name  # type: ignore[attr-defined]
                    raise
            return result if isinstance(result, tuple) else (result,)

        if not again:
            return run(*tensors)
        # Nothing here draws from torch's own generators, so there is no random state to restore.
        result: Tensors = checkpoint(run, *tensors, use_reentrant=False, preserve_rng_state=False)
        return result

    def _recomputes(self, number: int) -> bool:
        """ "except_last": the last micro-batch's backward comes at once after its forward (on the last stage)."""
        kind = self.pipeline.recompute
        return kind == "always" or (kind == "except_last" and number < len(self.micro_batches) - 1)

    def _where(self, stage: int, operation: Operation, error: BaseException) -> str:
        layers = self.pipeline.stages[stage].layers
        name = getattr(error, "failed_layer", None)
        layer = f"layer {name}" if name else f"layers {layers[0].name} to {layers[-1].name}"
        return f"stage {stage}, {layer}, micro-batch {self.first_number + operation.micro_batch}, {operation.kind}"
