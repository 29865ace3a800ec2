"""Weight gradients of linear layers, computed right into the gradient buffers: now, or when the stage has time.

A backward through a linear layer is two products of the same size: one makes the gradient of its input, for the stage
before; the other the gradient of its weight, for the optimizer (Qi et al. 2023, "Zero Bubble Pipeline Parallelism",
arXiv 2401.10241, section 2). Only the first is urgent.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from hvd_transformer.gradients.buffers import GradBuffer, ParamSlot
from hvd_transformer.gradients.sync import GradSync
from hvd_transformer.nn.kernels import Kernels
from hvd_transformer.nn.parallel_layers import VocabParallelEmbedding, WeightGradLayer


class WeightGradStore:
    """Holds one stage's deferred weight gradients. What comes outside of `deferring` is computed at once."""

    def __init__(self) -> None:
        self._waiting: deque[list[Callable[[], None]]] = deque()
        self._deferring: list[Callable[[], None]] | None = None

    def put(self, compute: Callable[[], None]) -> None:
        """Called in backward with what computes the gradients of a layer's weight and bias."""
        if self._deferring is None:
            compute()
        else:
            self._deferring.append(compute)

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Around one backward: its weight gradients wait for `run_oldest`."""
        self._deferring = []
        try:
            yield
            self._waiting.append(self._deferring)
        finally:
            self._deferring = None

    @torch.no_grad()
    def run_oldest(self) -> None:
        """Compute the weight gradients of the oldest backward that waits, freeing its tensors one by one."""
        work = self._waiting.popleft()
        work.reverse()
        while work:
            work.pop()()

    def clear(self) -> None:
        """Drop what an unfinished step left."""
        self._waiting.clear()


class BufferedWeightGrads:
    """The weight gradients of one layer, whose weight and bias have these slots: implements `WeightGrads`."""

    def __init__(self, store: WeightGradStore, sync: GradSync, slots: Sequence[tuple[GradBuffer, ParamSlot]]) -> None:
        self._store, self._sync, self._slots = store, sync, slots

    def put(self, values: Tensor, grad: Tensor, kernels: Kernels | None) -> None:
        # Asked now: by the time that a deferred product is added, the buffer may expect a later backward's.
        counted = [buffer.missing > 0 for buffer, _ in self._slots]
        self._store.put(partial(self._add, values, grad, kernels, counted))

    def put_formed(self, weight_grad: Tensor, bias_grad: Tensor | None, factor: Tensor) -> None:
        for (buffer, slot), gradient in zip(self._slots, (weight_grad, bias_grad), strict=False):
            assert gradient is not None
            self._sync.check_unsent(buffer, slot)
            buffer.add_scaled(slot, gradient, factor)
            if buffer.missing > 0:
                self._sync.count_grad(buffer, slot)

    def _add(self, values: Tensor, grad: Tensor, kernels: Kernels | None, counted: Sequence[bool]) -> None:
        for (buffer, slot), counts in zip(self._slots, counted, strict=True):
            self._sync.check_unsent(buffer, slot)
            buffer.add_product(slot, values, grad, kernels)
            if counts:
                self._sync.count_grad(buffer, slot)


def install_stores(
    model: nn.Module, stages: Sequence[tuple[Sequence[nn.Module], WeightGradStore]], sync: GradSync
) -> None:
    """Give the linear layers of each stage's modules their buffers' slots, by way of the stage's store.

    Weights that several modules share (lookups apart, which give rows), or that are not trained, are left to autograd,
    and so are modules that are in several layers: their gradients come more than once in a backward.
    """
    slots = {id(slot.parameter): (buffer, slot) for buffer in sync.buffers for slot in buffer.slots}
    users = Counter(
        id(weight)
        for module in model.modules()
        if not isinstance(module, VocabParallelEmbedding)
        for weight in module.parameters(recurse=False)
    )
    places = Counter(inner for modules, _ in stages for outer in modules for inner in outer.modules())
    for modules, store in stages:
        for module in (inner for outer in modules for inner in outer.modules()):
            if not isinstance(module, WeightGradLayer) or places[module] > 1:
                continue
            weights = [weight for weight in (module.weight, module.bias) if weight is not None]
            if all(weight.requires_grad and users[id(weight)] == 1 for weight in weights):
                module.weight_grads = BufferedWeightGrads(store, sync, [slots[id(weight)] for weight in weights])
