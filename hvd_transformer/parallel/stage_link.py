"""How tensors travel between pipeline stages: channels between threads, CUDA streams between devices."""

import threading
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor


class Aborted(Exception):
    """Raised in a stage that stops because another stage failed."""


class StageTensors(NamedTuple):
    """Tensors sent to a stage; None stands for a missing gradient."""

    tensors: Sequence[Tensor | None]
    sender: Optional["CudaStageStreams"] = None
    ready: torch.cuda.Event | None = None  # when the sender's GPU has computed them


class Channel:
    """A bounded queue between two threads; `abort` wakes both."""

    def __init__(self, size: int) -> None:
        self._items: deque[StageTensors] = deque()
        self._size, self._aborted = size, False
        self._changed = threading.Condition()

    def put(self, item: StageTensors) -> None:
        """Wait for room, then add the item. Raises `Aborted`."""
        with self._changed:
            self._changed.wait_for(lambda: self._aborted or len(self._items) < self._size)
            self._check()
            self._items.append(item)
            self._changed.notify_all()

    def get(self) -> StageTensors:
        """Wait for an item and remove it. Raises `Aborted`."""
        with self._changed:
            self._changed.wait_for(lambda: self._aborted or self._items)
            self._check()
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def abort(self) -> None:
        """Make every `put` and `get`, now and later, raise `Aborted`."""
        with self._changed:
            self._aborted = True
            self._changed.notify_all()

    def _check(self) -> None:
        if self._aborted:
            raise Aborted


class StageStreams:
    """The streams of a stage on the CPU, or of the only stage on a GPU: it computes on the caller's stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def begin(self) -> None:
        """Called in the caller's thread before the stage's worker starts."""

    def end(self) -> None:
        """Called in the caller's thread after the stage's worker has ended."""

    def computing(self) -> AbstractContextManager[Any]:
        """The context of the worker's computations."""
        return nullcontext()

    def send(self, tensors: Sequence[Tensor | None]) -> StageTensors:
        """Prepare what this stage has just computed for a neighbour."""
        return StageTensors(tensors)

    def receive(self, sent: StageTensors) -> tuple[Tensor | None, ...]:
        """Return the tensors on this stage's device, ready to use."""
        return tuple(None if tensor is None else self._received(tensor, sent) for tensor in sent.tensors)

    def _received(self, tensor: Tensor, sent: StageTensors) -> Tensor:
        return tensor.to(self.device, non_blocking=True)


class CudaStageStreams(StageStreams):
    """The streams of one of several stages on GPUs; stages may share a GPU."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        # What is sent has a stream of its own: nothing that arrives must wait for it.
        self.compute, self.arrivals, self.sends = (torch.cuda.Stream(device) for _ in range(3))

    def begin(self) -> None:
        current = torch.cuda.current_stream(self.device)
        self.compute.wait_stream(current)
        # On the default stream a stage on another GPU looks up rows of this one's tied embedding, just updated.
        torch.cuda.default_stream(self.device).wait_stream(current)

    def end(self) -> None:
        torch.cuda.current_stream(self.device).wait_stream(self.compute)

    def computing(self) -> AbstractContextManager[Any]:
        # The current device of a worker's thread: where it leaves a stream it would else open a context on GPU 0.
        torch.cuda.set_device(self.device)
        return torch.cuda.stream(self.compute)

    def send(self, tensors: Sequence[Tensor | None]) -> StageTensors:
        return StageTensors(tensors, self, self.compute.record_event())

    def _received(self, tensor: Tensor, sent: StageTensors) -> Tensor:
        if tensor.device == self.device:
            if sent.ready is not None:
                self.compute.wait_event(sent.ready)
            tensor.record_stream(self.compute)  # the sender's stream must not reuse its memory earlier
            return tensor
        with ExitStack() as streams:
            if sent.sender is not None and sent.ready is not None:
                # A copy between GPUs runs on the source's current stream.
                streams.enter_context(torch.cuda.stream(sent.sender.sends))
                sent.sender.sends.wait_event(sent.ready)
                tensor.record_stream(sent.sender.sends)
            streams.enter_context(torch.cuda.stream(self.arrivals))
            moved = tensor.to(self.device, non_blocking=True)
        self.compute.wait_stream(self.arrivals)
        moved.record_stream(self.compute)
        return moved


def make_streams(devices: Sequence[torch.device]) -> list[StageStreams]:
    """The streams of the stages on these devices; a GPU has its index."""
    on_gpus = len(devices) > 1 and all(device.type == "cuda" for device in devices)
    return [CudaStageStreams(device) if on_gpus else StageStreams(device) for device in devices]
