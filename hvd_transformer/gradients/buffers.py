"""Parameters and gradients in flat buffers ("buckets"): one allreduce and one optimizer update per buffer.

A buffer holds parameters in the order in which backward finishes them (the reverse of the model's), those with weight
decay first:

    parameters  | w7 | w6 | w5 | b7 | b6 | b5 |      model weights are views into it
    gradients   | g7 | g6 | g5 | g7 | g6 | g5 |      filled by backward, sent as a whole
                 `-- decayed --´`- not decayed-´
    shards      |  rank 0  |  rank 1 | rank 2 |      ZeRO: which rank's optimizer updates what
    shadow      | w7 | w6 | w5 | b7 | b6 | b5 |      mixed precision: the parameters in 16 bits
"""

from collections.abc import Callable, Hashable, Iterator, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hvd_transformer.nn.kernels import Kernels
from hvd_transformer.nn.matmul import weight_grad_


@dataclass(frozen=True)
class ZeroShard:
    """The shard of every buffer that this rank updates: part `index` of `count` equal parts.

    With `gradients` the rank also keeps the gradients of its shard only (ZeRO stage 2).
    """

    index: int = 0
    count: int = 1
    gradients: bool = False


WHOLE = ZeroShard()
# Each parameter starts at a multiple of this many bytes: vector instructions and matrix kernels like it.
ALIGNMENT = 64


@dataclass(frozen=True)
class ParamSlot:
    """One parameter's place in its buffer."""

    name: str
    parameter: nn.Parameter
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.parameter.numel()

    def view(self, flat: Tensor) -> Tensor:
        """This parameter's part of a flat tensor of the buffer's size, in the parameter's shape."""
        return flat[self.start : self.stop].view(self.parameter.shape)


class GradBuffer:
    """A flat block of parameters and the one of their gradients; parameters become views into it.

    `own` is this rank's shard; if `by_rows` (a buffer of one matrix), each shard is a number of rows. `gradients` stay
    between steps: those of the shard only, or of the whole block. Where only the shard's stay, the memory for the whole
    block is there from the first gradient of a backward to `close`.
    """

    def __init__(
        self,
        parameters: list[tuple[str, nn.Parameter]],
        no_decay: Set[str],
        shard: ZeroShard = WHOLE,
        *,
        by_rows: bool = False,
    ) -> None:
        first = parameters[0][1]
        step = ALIGNMENT // first.element_size()
        self.shard = shard
        self.slots: list[ParamSlot] = []
        position = self.decay_stop = 0
        for name, parameter in sorted(parameters, key=lambda item: item[0] in no_decay):
            self.slots.append(ParamSlot(name, parameter, position))
            position += -(-parameter.numel() // step) * step
            if name not in no_decay:
                self.decay_stop = position
        if by_rows:
            position, step = first.numel(), first.numel() // first.size(0)
        length = -(-position // (shard.count * step)) * step if shard.count > 1 else position
        self.own = slice(shard.index * length, (shard.index + 1) * length)
        self.parameters = torch.zeros(shard.count * length, dtype=first.dtype, device=first.device)
        for slot in self.slots:
            slot.view(self.parameters).copy_(slot.parameter.data)
            slot.parameter.data = slot.view(self.parameters)
        self.shadow: Tensor | None = None
        self._shadow_is_old = False
        # The state of one step.
        self.missing = 0  # gradients of the last backward, before the buffer is sent
        self._written: set[str] = set()
        self._norms: dict[str, Tensor] | None = None
        self._views: dict[str, Tensor] = {}
        self._flat: Tensor | None = None
        # After the copies, so that the memory of the weights that were copied can be used again.
        self.place_gradients(torch.zeros_like(self.own_parameters if shard.gradients else self.parameters))

    def place_gradients(self, memory: Tensor) -> None:
        """Keep the gradients in this memory, which is zero: of the whole block, or in ZeRO stage 2 of the shard."""
        self.gradients = memory
        if not self.shard.gradients:
            self._open(memory)
        self._own_views = {
            slot.name: self.own_gradients[own]
            for slot in self.slots
            if (own := self.own_part(slot.start, slot.stop)) is not None
        }

    @property
    def own_parameters(self) -> Tensor:
        return self.parameters[self.own]

    @property
    def own_gradients(self) -> Tensor:
        return self.gradients if self.shard.gradients else self.gradients[self.own]

    def own_part(self, start: int, stop: int) -> slice | None:
        """Where these indices of the whole block are in this rank's shard; None: nowhere."""
        start, stop = max(start, self.own.start), min(stop, self.own.stop)
        return slice(start - self.own.start, stop - self.own.start) if start < stop else None

    def decay_groups(self) -> Iterator[tuple[slice, bool]]:
        """The parts of the shard with one weight decay each: (indices in the shard, decayed)."""
        for start, stop, decays in ((0, self.decay_stop, True), (self.decay_stop, self.parameters.numel(), False)):
            own = self.own_part(start, stop)
            if own is not None:
                yield own, decays

    def add_shadow(self, dtype: torch.dtype) -> Tensor:
        """From now on keep the parameters in this number format, too, for the products of mixed precision."""
        if self.shadow is None:
            self.shadow = torch.empty_like(self.parameters, dtype=dtype)
            self._shadow_is_old = True
        return self.shadow

    def parameters_changed(self) -> None:
        """The shadow is no longer that of the parameters."""
        self._shadow_is_old = True

    def renew_shadow(self) -> None:
        """Write the shadow, if there is one and the parameters have changed."""
        if self.shadow is not None and self._shadow_is_old:
            self.shadow.copy_(self.parameters)
            self._shadow_is_old = False

    def begin_step(self) -> None:
        """Forget the last step's gradients."""
        self.missing = 0
        self._norms = None
        self._written.clear()
        self.drop_grads()

    def store_grad(self, slot: ParamSlot) -> None:
        """Take the gradient that autograd left at the parameter; autograd adds the next ones in place."""
        gradient, view = slot.parameter.grad, self._view(slot)
        assert gradient is not None
        if gradient is not view:
            add(view, gradient, self._is_first(slot))
            slot.parameter.grad = view

    def add_product(self, slot: ParamSlot, values: Tensor, grad: Tensor, kernels: Kernels | None) -> None:
        """Add a weight's gradient `grad.T @ values`, or a bias's: the sum of `grad` over its rows."""
        view, first = self._view(slot), self._is_first(slot)
        if view.ndim == 1:
            if first:
                torch.sum(grad, 0, dtype=view.dtype, out=view)
            else:
                view.add_(grad.sum(0, dtype=view.dtype))
        else:
            weight_grad_(view, grad, values, first=first, kernels=kernels)

    def add_scaled(self, slot: ParamSlot, gradient: Tensor, factor: Tensor) -> None:
        """Add a gradient × the scalar `factor`."""
        view, factor = self._view(slot), factor.to(gradient.dtype)
        if self._is_first(slot):
            torch.mul(gradient, factor, out=view)
        else:
            view.addcmul_(gradient, factor)

    def norms(self) -> dict[str, Tensor]:
        """The norm of each parameter's gradient in this rank's shard, by name; computed once for a step."""
        if self._norms is None:
            own = self._own_views  # of a shard that is only padding there are none
            self._norms = dict(zip(own, torch._foreach_norm(list(own.values())), strict=True)) if own else {}
        return self._norms

    def zeroed(self, slot: ParamSlot) -> Tensor:
        """The parameter's gradient so far, to add to: zeros if there is none."""
        view = self._view(slot)
        return view.zero_() if self._is_first(slot) else view

    def close(self) -> Tensor:
        """All gradients, zero where there is none. If only the shard's stay, the next backward opens a new block."""
        for slot in self.slots:
            if slot.name not in self._written:  # unused, or a rank without samples
                self._view(slot).zero_()
        flat = self._flat
        assert flat is not None
        if self.shard.gradients:
            starts = [*(slot.start for slot in self.slots[1:]), flat.numel()]
            for slot, start in zip(self.slots, starts, strict=True):  # between parameters, where nothing else writes
                if slot.stop < start:
                    flat[slot.stop : start].zero_()
            self._written.clear()
            self.drop_grads()
            self._flat, self._views = None, {}
        return flat

    def drop_grads(self) -> None:
        """Leave no gradient at the parameters."""
        for slot in self.slots:
            slot.parameter.grad = None

    def _view(self, slot: ParamSlot) -> Tensor:
        """The parameter's gradient, in its shape; arbitrary values before it is written."""
        if self._flat is None:
            self._open(torch.empty_like(self.parameters))
        return self._views[slot.name]

    def _is_first(self, slot: ParamSlot) -> bool:
        """Whether the parameter has no gradient so far; afterwards it has one."""
        if slot.name in self._written:
            return False
        self._written.add(slot.name)
        return True

    def _open(self, flat: Tensor) -> None:
        self._flat = flat
        self._views = {slot.name: slot.view(flat) for slot in self.slots}


def add(place: Tensor, gradient: Tensor, first: bool) -> None:
    """Add to what is there; `first`: nothing is, so write."""
    if first:
        place.copy_(gradient)
    else:
        place.add_(gradient)


def make_grad_buffers(
    parameters: dict[str, nn.Parameter],
    no_decay: Set[str],
    bucket_bytes: int,
    alone: Set[str] = frozenset(),
    shard: ZeroShard = WHOLE,
    *,
    apart: Sequence[Set[str]] = (),
) -> list[GradBuffer]:
    """Group named parameters, given in the model's order, into buffers of about `bucket_bytes`.

    A buffer has one dtype and device; a parameter larger than `bucket_bytes` gets one alone. Parameters named in
    `alone` are matrices that get a buffer each, sharded by rows. Each set of names in `apart` shares no buffer with
    others.
    """
    groups: list[list[tuple[str, nn.Parameter]]] = []
    unfinished: dict[Hashable, list[tuple[str, nn.Parameter]]] = {}
    sizes: dict[Hashable, int] = {}
    for name, parameter in reversed(parameters.items()):
        if name in alone:
            groups.append([(name, parameter)])
            continue
        kind = (parameter.dtype, parameter.device, *(name in names for names in apart))
        if kind in unfinished and sizes[kind] + parameter.nbytes > bucket_bytes:
            groups.append(unfinished.pop(kind))
        if kind not in unfinished:
            unfinished[kind], sizes[kind] = [], 0
        unfinished[kind].append((name, parameter))
        sizes[kind] += parameter.nbytes
    groups += unfinished.values()
    return [GradBuffer(group, no_decay, shard, by_rows=group[0][0] in alone) for group in groups]


def place_together(buffers: Sequence[GradBuffer], zeros_like: Callable[[Tensor], Tensor]) -> None:
    """Move the gradients of CPU buffers into one block of memory from `zeros_like`; ZeRO stage 2 keeps its own.

    One block, not one per buffer, as each takes an open file and a mapping in every other rank (`comm.shared_buffers`).
    """
    kinds: dict[torch.dtype, list[GradBuffer]] = {}
    for buffer in buffers:
        if buffer.gradients.device.type == "cpu" and not buffer.shard.gradients:
            kinds.setdefault(buffer.gradients.dtype, []).append(buffer)
    for dtype, group in kinds.items():
        step = ALIGNMENT // dtype.itemsize
        lengths = [-(-buffer.gradients.numel() // step) * step for buffer in group]
        block = zeros_like(torch.empty(sum(lengths), dtype=dtype))
        for buffer, part in zip(group, block.split(lengths), strict=True):
            buffer.place_gradients(part[: buffer.gradients.numel()])
