"""Parameters and gradients in flat buckets: one block of memory a bucket, so one allreduce and one update each.

A bucket holds parameters in the order in which backward finishes them (the reverse of the model's), the ones
with weight decay first:

    parameters  | w7 | w6 | w5 | b7 | b6 | b5 |      model weights are views into it
    gradients   | g7 | g6 | g5 | g7 | g6 | g5 |      filled by backward, sent as a whole
                 `-- decayed --´`- not decayed-´
    shards      |  rank 0  |  rank 1 | rank 2 |      whose optimizer updates what, where that is shared
"""

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class ZeroShard:
    """Which of `count` equal parts of every bucket this rank updates; `gradients`: of those, too, it keeps only its
    part, and the whole bucket's memory is there only while backward fills it."""

    index: int = 0
    count: int = 1
    gradients: bool = False


WHOLE = ZeroShard()
# Each parameter starts at a multiple of this many bytes: vector instructions and matrix kernels like it.
ALIGNMENT = 64


@dataclass(frozen=True)
class ParamSlot:
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


class GradBuffer:
    """A flat block of parameters and the one of their gradients; parameters become views into it.

    `own` is this rank's shard; of a bucket `by_rows`, which holds one matrix alone, each shard is a number of rows.
    `gradients` are those that stay: of the shard alone or of the whole block.
    """

    def __init__(
        self,
        parameters: list[tuple[str, nn.Parameter]],
        no_decay: Set[str],
        shard: ZeroShard = WHOLE,
        *,
        by_rows: bool = False,
    ) -> None:
        decayed = [item for item in parameters if item[0] not in no_decay]
        others = [item for item in parameters if item[0] in no_decay]
        first = parameters[0][1]
        step = ALIGNMENT // first.element_size()
        self.shard = shard
        self.slots: list[ParamSlot] = []
        position = self.decay_stop = 0
        for group in (decayed, others):
            for name, parameter in group:
                self.slots.append(ParamSlot(name, parameter, position))
                position += -(-parameter.numel() // step) * step
            if group is decayed:
                self.decay_stop = position
        if by_rows:
            position, step = first.numel(), first.numel() // first.size(0)
        length = -(-position // (shard.count * step)) * step if shard.count > 1 else position
        self.own = slice(shard.index * length, (shard.index + 1) * length)
        self.parameters = torch.zeros(shard.count * length, dtype=first.dtype, device=first.device)
        self.gradients = torch.zeros_like(self.own_parameters if shard.gradients else self.parameters)
        for slot in self.slots:
            slot.view(self.parameters).copy_(slot.parameter.data)
            slot.parameter.data = slot.view(self.parameters)

    @property
    def own_parameters(self) -> Tensor:
        return self.parameters[self.own]

    @property
    def own_gradients(self) -> Tensor:
        return self.gradients if self.shard.gradients else self.gradients[self.own]

    def own_part(self, start: int, stop: int) -> slice | None:
        """Where these places of the whole block are in this rank's shard; None: nowhere."""
        start, stop = max(start, self.own.start), min(stop, self.own.stop)
        return slice(start - self.own.start, stop - self.own.start) if start < stop else None

    def halves(self) -> Iterator[tuple[slice, bool]]:
        """The parts of the shard with one weight decay each: (place in it, decayed)."""
        decayed = self.own_part(0, self.decay_stop)
        if decayed is not None:
            yield decayed, True
        others = self.own_part(self.decay_stop, self.parameters.numel())
        if others is not None:
            yield others, False

    def gaps(self) -> Iterator[slice]:
        """The places between parameters, which nothing else writes."""
        ends = [slot.stop for slot in self.slots]
        starts = [slot.start for slot in self.slots[1:]]
        for stop, start in zip(ends, [*starts, self.parameters.numel()], strict=True):
            if stop < start:
                yield slice(stop, start)


def make_buckets(
    parameters: Mapping[str, nn.Parameter],
    no_decay: Set[str],
    bucket_bytes: int,
    alone: Set[str] = frozenset(),
    shard: ZeroShard = WHOLE,
) -> list[GradBuffer]:
    """Cuts the model's named parameters (in the model's order) into buckets of about `bucket_bytes`.

    Those named in `alone` are matrices that share a bucket with no other, sharded by rows.
    """
    groups = _cut(reversed(list(parameters.items())), bucket_bytes, alone)
    return [GradBuffer(group, no_decay, shard, by_rows=group[0][0] in alone) for group in groups]


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


class Filling:
    """The parameters' gradients of one step, each written first and added to by the backwards after.

    Where the bucket keeps its shard's alone, the memory for all of them is there from the first gradient to `close`.
    """

    def __init__(self, bucket: GradBuffer) -> None:
        self.bucket = bucket
        self.sending = False  # the bucket goes when nothing is missing
        self.missing = 0  # gradients
        self._slots = {slot.name: slot for slot in bucket.slots}
        self._written: set[str] = set()
        self._flat: Tensor | None = None
        self._places: dict[str, Tensor] = {}
        if not bucket.shard.gradients:
            self._open(bucket.gradients)

    def begin(self) -> None:
        """Forgets the last step's gradients."""
        self.sending = False
        self._written.clear()
        self.drop()

    def place(self, name: str) -> Tensor:
        """The parameter's gradient, in its shape; anything may be there unless it was written."""
        if self._flat is None:
            self._open(torch.empty_like(self.bucket.parameters))
        return self._places[name]

    def first(self, name: str) -> bool:
        """Whether the parameter has no gradient so far; afterwards it has one."""
        if name in self._written:
            return False
        self._written.add(name)
        return True

    def zeroed(self, name: str) -> Tensor:
        """The parameter's gradient so far, to which more can be added: zero if there is none."""
        place = self.place(name)
        return place.zero_() if self.first(name) else place

    def store(self, slot: ParamSlot) -> None:
        """Takes what autograd left as the parameter's gradient; it adds the next ones to that place itself."""
        gradient, place = slot.parameter.grad, self.place(slot.name)
        assert gradient is not None
        if gradient is place:
            return
        add(place, gradient, self.first(slot.name))
        slot.parameter.grad = place

    def close(self) -> Tensor:
        """All of the bucket's gradients, zero where there is none: the next backward writes anew, if memory goes."""
        for name in self._slots.keys() - self._written:  # unused, or a rank without samples
            self.place(name).zero_()
        flat = self._flat
        assert flat is not None
        if self.bucket.shard.gradients:
            for gap in self.bucket.gaps():
                flat[gap].zero_()
            self._written.clear()
            self.drop()
            self._flat, self._places = None, {}
        return flat

    def _open(self, flat: Tensor) -> None:
        self._flat = flat
        self._places = {name: slot.view(flat) for name, slot in self._slots.items()}

    def drop(self) -> None:
        """Leaves no gradient at the parameters."""
        for slot in self.bucket.slots:
            slot.parameter.grad = None


def add(place: Tensor, gradient: Tensor, first: bool) -> None:
    """Adds to what is there; with `first` that is nothing."""
    if first:
        place.copy_(gradient)
    else:
        place.add_(gradient)
