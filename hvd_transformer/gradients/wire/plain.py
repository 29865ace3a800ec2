"""Gradients in transit as they are, and the interface of all formats."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from hvd_transformer.comm.group import Group
from hvd_transformer.gradients.buffers import ParamSlot

Result = TypeVar("Result")


class Layout(NamedTuple):
    """What travels under one name: a tensor of this kind, and the parameters in it.

    Without slots it is rows of an embedding, of other tokens in each step.
    """

    values: Tensor
    slots: Sequence[ParamSlot] = ()


@dataclass(frozen=True)
class WireOptions:
    """What a format may depend on, equal on all ranks.

    `world` has the ranks that choose a format together, on `num_hosts` hosts; None: the group that sends.
    """

    seed: int = 0
    powersgd_rank: int = 4
    sharded: bool = False  # gradients are reduced to shards (ZeRO)
    world: Group | None = None
    num_hosts: int = 1


class InTransit(NamedTuple):
    """A message on its way: the bytes that this rank handed over, and the function that waits for the result."""

    nbytes: int
    wait: Callable[[], Tensor]


class Wire:
    """Sends gradients as they are; the base of the other formats.

    `layouts` says what is sent under each name. In a step, `begin_step` comes first, `finish_sending` follows the last
    message's start, and `end_step` the last wait. Pipeline stages may send side by side.
    """

    format = "none"

    def __init__(self, group: Group, layouts: Mapping[str, Layout], options: WireOptions | None = None) -> None:
        self.group, self.layouts, self.options = group, dict(layouts), options or WireOptions()
        self._to_start: list[_Once[Any]] = []

    @property
    def overflowed(self) -> bool:
        """Whether in the last step a sum may have overflowed because of the format, not because it diverged."""
        return False

    def begin_step(self, step: int, total_steps: int, scale: float) -> None:
        """Before the first message of step `step` (from 0): its gradients are multiplied by `scale`."""

    def all_reduce_async(self, gradients: Tensor, name: str) -> InTransit:
        """Start to sum a 1-D tensor over the ranks. It may be overwritten."""
        return InTransit(gradients.nbytes, self.group.all_reduce_async_(gradients, name))

    def reduce_scatter_async(self, gradients: Tensor, name: str) -> InTransit:
        """Start to sum a 1-D tensor over the ranks; the result is this rank's equal part of the sum."""
        return InTransit(gradients.nbytes, self.group.reduce_scatter_async(gradients, name))

    def all_gather_async(self, rows: Tensor, name: str) -> InTransit:
        """Start to concatenate the ranks' rows, whose numbers may differ, in rank order."""
        return InTransit(rows.nbytes, self.group.all_gather_async(rows, f"{name}.rows"))

    def finish_sending(self) -> None:
        """Everything of this step is on its way: start what had to wait for that. It may wait for other ranks."""
        pending, self._to_start = self._to_start, []
        for start in pending:
            start()

    def end_step(self) -> None:
        """Everything of this step has arrived."""

    def skip_step(self) -> None:
        """The sum was not finite: no update is made, and nothing of it may reach a later step."""

    def take_news(self) -> str | None:
        """What the user should know, once."""
        return None

    def state(self) -> dict[str, Any]:
        """What the next step depends on besides `tensors`, as JSON for a checkpoint; the same on all ranks."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the state. Ignores that of other buffers or another format."""

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that the next step depends on, 1-D, by name: they stay where they are. They may differ by rank.

        Of those that begin with `feedback.ERROR` only the sum over the ranks matters; others are equal on all ranks.
        """
        return {}

    def _when_sent(self, start: Callable[[], Result]) -> Callable[[], Result]:
        """`start` begins a second message: in `finish_sending`, or when its result is needed before that."""
        once = _Once(start)
        self._to_start.append(once)
        return once


class _Once(Generic[Result]):
    """Calls a function once, whichever thread comes first; later calls have the same result."""

    def __init__(self, function: Callable[[], Result]) -> None:
        self._function, self._lock = function, threading.Lock()
        self._result: list[Result] = []

    def __call__(self) -> Result:
        with self._lock:
            if not self._result:
                self._result.append(self._function())
            return self._result[0]


def chunks(values: Tensor, multiple: int = 1) -> list[slice]:
    """Parts of a 1-D tensor for which several passes stay in a core's cache; a GPU takes larger ones."""
    size = chunk_size(values.device) // multiple * multiple
    return [slice(start, min(start + size, values.numel())) for start in range(0, values.numel(), size)]


def chunk_size(device: torch.device) -> int:
    """The largest number of values of a chunk."""
    return 1 << (22 if device.type == "cuda" else 18)
