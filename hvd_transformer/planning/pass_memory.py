"""The memory of passes: what layers hold while micro-batches go forward and backward through them."""

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from hvd_transformer.gradients.weight_grads import WeightGradStore
from hvd_transformer.nn.contracts import Layer, Tensors
from hvd_transformer.parallel.pipeline import Recompute
from hvd_transformer.parallel.pipeline_schedule import Operation


class AllocationTracker(TorchDispatchMode):
    """Counts the bytes of the tensors that this thread creates inside the context, for as long as they live.

    Tensors that share a storage count once. Memory that a kernel allocates and frees internally is not counted.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._lock = threading.RLock()  # another thread may free a tensor

    def take_peak(self) -> int:
        """The peak since the last call, in bytes."""
        peak, self.peak = self.peak, self.now
        return peak

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result) - _storages((args, kwargs)):
            self._add(storage.nbytes())
            weakref.finalize(storage, self._add, -storage.nbytes())
        return result

    def _add(self, num_bytes: int) -> None:
        with self._lock:
            self.now += num_bytes
            self.peak = max(self.peak, self.now)


def _storages(tree: object) -> set[UntypedStorage]:
    return {leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)}


Context = Callable[[], AbstractContextManager[Any]]


class PassMode(NamedTuple):
    """How a micro-batch goes through layers."""

    recompute: bool  # backward computes the forward of blocks again
    defer: bool  # weight gradients are deferred to the end of backward


PASS_MODES = tuple(PassMode(recompute, defer) for recompute in (False, True) for defer in (False, True))


class PassMemory(NamedTuple):
    """Bytes of tensors while one micro-batch goes forward and backward through consecutive layers."""

    inputs: int
    forward: int  # at the peak of forward
    kept: int  # between forward and backward, inputs and outputs included
    backward: int  # at the peak of backward
    late: int  # after backward, for deferred weight gradients


def run_pass(
    layers: Sequence[Layer],
    tensors: Tensors,
    targets: Tensors,
    store: WeightGradStore,
    context: Context,
    mode: PassMode,
) -> tuple[PassMemory, Tensors]:
    """Run forward and backward as a pipeline stage does. Returns the memory, and zeros in the shapes of the outputs.

    `targets` are for the model's last layer, otherwise empty. Call inside `gradients_as_in_training(layers, store)`.
    """
    with AllocationTracker() as allocated:
        inputs = received(tensors)
        input_bytes = allocated.now
        outputs = forward(layers, inputs, targets, context, recompute=mode.recompute)
        forward_peak, kept = allocated.take_peak(), allocated.now
        with store.deferring() if mode.defer else nullcontext():
            backward(outputs)
        backward_peak = allocated.take_peak()
        made = [(tensor.shape, tensor.dtype, tensor.device) for tensor in outputs]
        del inputs, outputs
        late = allocated.now
        if mode.defer:
            store.run_oldest()
    zeros = tuple(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in made)
    return PassMemory(input_bytes, forward_peak, kept, backward_peak, late), zeros


def join_passes(first: PassMemory, second: PassMemory) -> PassMemory:
    """The memory of two neighbours together: the outputs of the first are the inputs of the second."""
    before = first.kept - second.inputs  # what the first holds while the second runs
    return PassMemory(
        first.inputs,
        forward=max(first.forward, before + second.forward),
        kept=before + second.kept,
        backward=max(before + second.backward, first.backward + second.late),
        late=first.late + second.late,
    )


def join_modes(layers: Iterable[Mapping[PassMode, PassMemory]]) -> Mapping[PassMode, PassMemory]:
    """The memory of consecutive layers together, in each mode."""
    return reduce(lambda first, second: {mode: join_passes(first[mode], second[mode]) for mode in first}, layers)


def stage_activations(
    operations: Sequence[Operation], stage: int, recompute: Recompute, passes: Mapping[PassMode, PassMemory]
) -> int:
    """The peak of activation bytes while the stage works through its operations.

    With `recompute` "never", `passes` needs no mode that recomputes.
    """
    last = max(operation.micro_batch for operation in operations)
    split = any(operation.kind == "weights" for operation in operations)
    whole = passes[PassMode(recompute=False, defer=split or stage > 0)]
    recomputed = whole if recompute == "never" else passes[PassMode(recompute=True, defer=split)]
    held = peak = 0
    for kind, micro_batch in operations:
        run = whole if recompute == "except_last" and micro_batch == last else recomputed
        if kind == "forward":
            peak = max(peak, held + run.forward)
            held += run.kept
        elif kind == "backward":
            held -= run.kept
            peak = max(peak, held + run.backward)
            held += run.late if split else 0
        else:
            held -= run.late
    return peak


def forward(
    layers: Sequence[Layer], inputs: Tensors, targets: Tensors, context: Context, *, recompute: bool
) -> Tensors:
    """The outputs of the last layer, which also takes `targets`. Each layer runs inside `context()`, as in training."""

    def call(layer: Layer, *arguments: Tensor) -> Tensors:
        with context():
            result = layer.run(*arguments)
        return result if isinstance(result, tuple) else (result,)

    tensors = inputs
    for layer in layers:
        if layer is layers[-1]:
            tensors += targets
        if recompute and layer.recompute:
            tensors = checkpoint(partial(call, layer), *tensors, use_reentrant=False, preserve_rng_state=False)
        else:
            tensors = call(layer, *tensors)
    return tensors


def backward(outputs: Tensors) -> None:
    """Backward from gradients of one."""
    differentiable: list[Tensor] = [tensor for tensor in outputs if tensor.requires_grad]
    torch.autograd.backward(differentiable, [torch.ones_like(tensor) for tensor in differentiable])


def received(tensors: Tensors) -> Tensors:
    """Copies of the previous stage's outputs, as a stage receives them on its device; gradients are sent back."""
    return tuple(tensor.detach().clone().requires_grad_(tensor.is_floating_point()) for tensor in tensors)
