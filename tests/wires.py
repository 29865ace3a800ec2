"""Formats of gradients in transit over ranks that are threads: what all ranks receive in some steps."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from thread_world import make_worlds, on_ranks
from torch import Tensor, nn

from hvd_transformer.comm.world import World
from hvd_transformer.gradients.buffers import ParamSlot
from hvd_transformer.gradients.wire.plain import Layout, Wire


def layouts(shapes: Mapping[str, int | Sequence[int]]) -> dict[str, Layout]:
    """A buffer for each name, with one parameter of this shape and the same name."""
    found = {}
    for name, shape in shapes.items():
        weight = nn.Parameter(torch.zeros(shape))
        found[name] = Layout(weight.data.view(-1), [ParamSlot(name, weight, 0)])
    return found


def all_reduced(wire: Wire, gradients: Mapping[str, Tensor], step: int, num_steps: int = 1000) -> dict[str, Tensor]:
    """One step: the sums of these gradients over all ranks, as this one receives them."""
    wire.begin_step(step, num_steps, 1.0)
    sent = {name: wire.all_reduce_async(own.flatten(), name) for name, own in gradients.items()}
    wire.finish_sending()
    found = {name: message.wait().view(gradients[name].shape) for name, message in sent.items()}
    wire.end_step()
    return found


def of_ranks(size: int, action: Callable[[World], Any]) -> list[Any]:
    """What `action` returns on each of the ranks, of which none may fail."""
    results: list[Any] = on_ranks(make_worlds(size), action)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
