"""The memory of passes: what layers hold while micro-batches go forward and backward through them."""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, reduce
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from hvd_transformer.gradients.weight_grads import WeightGradStore
from hvd_transformer.nn.contracts import Layer, Tensors
from hvd_transformer.parallel.pipeline import Recompute
from hvd_transformer.parallel.pipeline_schedule import Operation

aten = torch.ops.aten
# With which a compiler fuses elementwise operations: of one pass over memory, too.
_FUSED = {
    aten._to_copy.default,
    aten.cat.default,
    aten.clone.default,
    aten.native_dropout_backward.default,
    aten.native_layer_norm.default,
    aten.roll.default,
}


_PRODUCTS = {
    aten.addmm.default,
    aten.bmm.default,
    aten.mm.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
}


class AllocationTracker(TorchDispatchMode):
    """Counts the bytes of the tensors that this thread creates inside the context, for as long as they live.

    Tensors that share a storage count once. Memory that a kernel allocates and frees internally is not counted.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        # Of a compiled layer: what the results of elementwise operations come from, by their storage, and what products
        # have read: those read it in backward, too.
        self._fuses = False
        self._sources: WeakKeyDictionary[UntypedStorage, list[Tensor]] = WeakKeyDictionary()
        self._read: WeakSet[UntypedStorage] = WeakSet()
        self._packed: list[_Kept] = []
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
        given = _storages((args, kwargs))
        for storage in _storages(result) - given:
            self._add(storage.nbytes())
            weakref.finalize(storage, self._add, -storage.nbytes())
            if self._fuses and _is_elementwise(func):
                self._sources[storage] = self._roots((args, kwargs))
        if self._fuses and func in _PRODUCTS:
            self._read.update(given)
        return result

    @contextmanager
    def compiled(self) -> Iterator[None]:
        """Around the forward of a compiled layer. It keeps a result of elementwise operations only for a matrix product
        or attention: for others backward computes it again, from what it comes from."""
        self._fuses = True
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
            yield
        self._fuses = False
        for kept in self._packed:  # by now all have been read
            kept.choose(self._read)
        self._sources.clear()
        self._read.clear()
        self._packed.clear()

    def _pack(self, tensor: Tensor) -> "Tensor | _Kept":
        roots = self._sources.get(tensor.untyped_storage())
        if roots is None:
            return tensor
        self._packed.append(_Kept(tensor, roots))
        return self._packed[-1]

    def _roots(self, tree: object) -> list[Tensor]:
        """Tensors that these are computed from by elementwise operations alone."""
        found: dict[int, Tensor] = {}
        for leaf in tree_leaves(tree):
            if isinstance(leaf, Tensor):
                found |= {id(root): root for root in self._sources.get(leaf.untyped_storage(), [leaf])}
        return list(found.values())

    def _add(self, num_bytes: int) -> None:
        with self._lock:
            self.now += num_bytes
            self.peak = max(self.peak, self.now)


def _is_elementwise(func: Any) -> bool:
    return torch.Tag.pointwise in func.tags or func in _FUSED


class _Kept:
    """What a compiled layer keeps of a tensor for backward: the tensor, or what it comes from."""

    def __init__(self, tensor: Tensor, roots: list[Tensor]) -> None:
        self._size, self._stride, self._dtype, self._device = (
            tensor.size(),
            tensor.stride(),
            tensor.dtype,
            tensor.device,
        )
        self._tensor: Tensor | None = tensor
        self._roots = roots

    def choose(self, read: WeakSet[UntypedStorage]) -> None:
        """The tensor if products read it, too."""
        assert self._tensor is not None
        if self._tensor.untyped_storage() in read:
            self._roots = []
        else:
            self._tensor = None

    def tensor(self) -> Tensor:
        if self._tensor is not None:
            return self._tensor
        return torch.empty_strided(self._size, self._stride, dtype=self._dtype, device=self._device)


def _unpack(kept: Tensor | _Kept) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept.tensor()


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
    *,
    compiled: bool = False,
) -> tuple[PassMemory, Tensors]:
    """Run forward and backward as a pipeline stage does. Returns the memory, and zeros in the shapes of the outputs.

    With `compiled` blocks are compiled for a GPU. `targets` are for the model's last layer, otherwise empty. Call
    inside `gradients_as_in_training(layers, store)`.
    """
    with AllocationTracker() as allocated:
        inputs = received(tensors)
        input_bytes = allocated.now
        around = allocated.compiled if compiled else nullcontext
        outputs = forward(layers, inputs, targets, context, recompute=mode.recompute, around_block=around)
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

    If nothing is recomputed, `passes` needs no mode that does.
    """
    last = max(operation.micro_batch for operation in operations)
    split = any(operation.kind == "weights" for operation in operations)
    whole = passes[PassMode(recompute=False, defer=split or stage > 0)]
    again = recompute == "always" or (recompute == "except_last" and last > 0)
    recomputed = passes[PassMode(recompute=True, defer=split)] if again else whole
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
    layers: Sequence[Layer],
    inputs: Tensors,
    targets: Tensors,
    context: Context,
    *,
    recompute: bool,
    around_block: Context = nullcontext,
) -> Tensors:
    """The outputs of the last layer, which also takes `targets`. Each layer runs inside `context()`, as in training,
    and each block also inside `around_block()`."""

    def call(layer: Layer, *arguments: Tensor) -> Tensors:
        with context(), around_block() if layer.recompute else nullcontext():
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
