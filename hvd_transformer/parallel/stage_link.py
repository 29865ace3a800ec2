"""How tensors travel between pipeline stages: channels between threads, CUDA streams between devices."""

import threading
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Generic, NamedTuple, Optional, TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")


class Aborted(Exception):
    """Another stage failed: this one has nothing more to do."""


class Channel(Generic[Item]):
    """One thread puts, one gets; both wait, and `abort` wakes both."""

    def __init__(self, size: int) -> None:
        self._items: deque[Item] = deque()
        self._size, self._aborted = size, False
        self._changed = threading.Condition()

    def put(self, item: Item) -> None:
        """Waits for room. Raises `Aborted`."""
        with self._changed:
            self._changed.wait_for(lambda: self._aborted or len(self._items) < self._size)
            self._check()
            self._items.append(item)
            self._changed.notify_all()

    def get(self) -> Item:
        """Waits for an item. Raises `Aborted`."""
        with self._changed:
            self._changed.wait_for(lambda: self._aborted or self._items)
            self._check()
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def abort(self) -> None:
        """Every `put` and `get`, now and later, raises `Aborted`."""
        with self._changed:
            self._aborted = True
            self._changed.notify_all()

    def _check(self) -> None:
        if self._aborted:
            raise Aborted


class StageTensors(NamedTuple):
    """Tensors on their way to a stage; None stands for the gradient of one that has none."""

    tensors: Sequence[Tensor | None]
    sender: Optional["CudaStageStreams"] = None
    ready: torch.cuda.Event | None = None  # when the sender's GPU has made them


class StageStreams:
    """Of a stage on the CPU, or alone on its GPU: it computes on the caller's stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def begin(self) -> None:
        """In the caller's thread, before the stage's worker starts."""

    def end(self) -> None:
        """In the caller's thread, when the stage's worker has ended."""

    def computing(self) -> AbstractContextManager[Any]:
        """Around what the stage's worker does."""
        return nullcontext()

    def send(self, tensors: Sequence[Tensor | None]) -> StageTensors:
        """What this stage has just computed, for a neighbour."""
        return StageTensors(tensors)

    def receive(self, parcel: StageTensors) -> tuple[Tensor | None, ...]:
        """The tensors on this stage's device, to be computed with from now on."""
        return tuple(None if tensor is None else self._received(tensor, parcel) for tensor in parcel.tensors)

    def _received(self, tensor: Tensor, parcel: StageTensors) -> Tensor:
        return tensor.to(self.device, non_blocking=True)


class CudaStageStreams(StageStreams):
    """Of one of several stages, each on a GPU; several may share one."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.compute, self.copies = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def begin(self) -> None:
        self.compute.wait_stream(torch.cuda.current_stream(self.device))

    def end(self) -> None:
        torch.cuda.current_stream(self.device).wait_stream(self.compute)

    def computing(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self.compute)

    def send(self, tensors: Sequence[Tensor | None]) -> StageTensors:
        return StageTensors(tensors, self, self.compute.record_event())

    def _received(self, tensor: Tensor, parcel: StageTensors) -> Tensor:
        if tensor.device == self.device:
            if parcel.ready is not None:
                self.compute.wait_event(parcel.ready)
            tensor.record_stream(self.compute)  # its memory is the sender's stream's: not to be used again before
            return tensor
        with ExitStack() as streams:
            if parcel.sender is not None and parcel.ready is not None:
                # A copy between GPUs runs on the source's current stream.
                streams.enter_context(torch.cuda.stream(parcel.sender.copies))
                parcel.sender.copies.wait_event(parcel.ready)
                tensor.record_stream(parcel.sender.copies)
            streams.enter_context(torch.cuda.stream(self.copies))
            moved = tensor.to(self.device, non_blocking=True)
        self.compute.wait_stream(self.copies)
        moved.record_stream(self.compute)
        return moved


def make_streams(devices: Sequence[torch.device]) -> list[StageStreams]:
    """Of the stages on these devices."""
    if len(devices) > 1 and all(device.type == "cuda" for device in devices):
        here = torch.cuda.current_device()
        return [
            CudaStageStreams(torch.device("cuda", here if device.index is None else device.index)) for device in devices
        ]
    return [StageStreams(device) for device in devices]
