"""Parameters and gradients in flat buckets: one block of memory a bucket, so one allreduce and one update each.

A bucket holds parameters in the order in which backward finishes them (the reverse of the model's), the ones
with weight decay first:

    parameters  | w7 | w6 | w5 | b7 | b6 | b5 |      model weights are views into it
    gradients   | g7 | g6 | g5 | g7 | g6 | g5 |      filled by backward, sent as a whole
                 `-- decayed --´`- not decayed-´
"""

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# Each parameter starts at a multiple of this many bytes: vector instructions and matrix kernels like it.
ALIGNMENT = 64


@dataclass(frozen=True)
class Slot:
    """One parameter's place in its bucket."""

    name: str
    parameter: nn.Parameter
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.parameter.numel()

    def view(self, flat: Tensor) -> Tensor:
        """This parameter's part of a flat tensor of the bucket, in the parameter's shape."""
        return flat[self.start : self.stop].view(self.parameter.shape)


class Bucket:
    """A flat block of parameters and the one of their gradients; parameters become views into it."""

    def __init__(self, parameters: list[tuple[str, nn.Parameter]], no_decay: Set[str]) -> None:
        decayed = [item for item in parameters if item[0] not in no_decay]
        others = [item for item in parameters if item[0] in no_decay]
        first = parameters[0][1]
        step = ALIGNMENT // first.element_size()
        self.slots: list[Slot] = []
        position = self.decay_stop = 0
        for group in (decayed, others):
            for name, parameter in group:
                self.slots.append(Slot(name, parameter, position))
                position += -(-parameter.numel() // step) * step
            if group is decayed:
                self.decay_stop = position
        self.parameters = torch.zeros(position, dtype=first.dtype, device=first.device)
        self.gradients = torch.zeros_like(self.parameters)
        for slot in self.slots:
            slot.view(self.parameters).copy_(slot.parameter.data)
            slot.parameter.data = slot.view(self.parameters)

    def halves(self) -> Iterator[tuple[slice, bool]]:
        """The parts of the block with one weight decay each: (place, decayed)."""
        if self.decay_stop:
            yield slice(0, self.decay_stop), True
        if self.decay_stop < self.parameters.numel():
            yield slice(self.decay_stop, self.parameters.numel()), False


def make_buckets(
    parameters: Mapping[str, nn.Parameter], no_decay: Set[str], bucket_bytes: int, alone: Set[str] = frozenset()
) -> list[Bucket]:
    """Cuts the model's named parameters (in the model's order) into buckets of about `bucket_bytes`.

    Those named in `alone` share a bucket with no other.
    """
    return [Bucket(group, no_decay) for group in _cut(reversed(list(parameters.items())), bucket_bytes, alone)]


def _cut(
    parameters: Iterable[tuple[str, nn.Parameter]], bucket_bytes: int, alone: Set[str]
) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Groups of one dtype and device, of at most the size; a parameter beyond it has a bucket of its own."""
    groups: dict[tuple[torch.dtype, torch.device], list[tuple[str, nn.Parameter]]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for name, parameter in parameters:
        if name in alone:
            yield [(name, parameter)]
            continue
        kind = (parameter.dtype, parameter.device)
        size = parameter.numel() * parameter.element_size()
        if kind in groups and sizes[kind] + size > bucket_bytes:
            yield groups.pop(kind)
        if kind not in groups:
            groups[kind], sizes[kind] = [], 0
        groups[kind].append((name, parameter))
        sizes[kind] += size
    yield from groups.values()
