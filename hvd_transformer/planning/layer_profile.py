"""Measures the memory and the time of layers, as the pipeline would run them."""

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from hvd_transformer.gradients.weight_grads import WeightGradStore
from hvd_transformer.nn.contracts import Layer, MicroBatch, Tensors
from hvd_transformer.nn.parallel_layers import VocabParallelEmbedding, WeightGradLayer
from hvd_transformer.parallel.pipeline import Recompute
from hvd_transformer.parallel.pipeline_schedule import Operation


class AllocationTracker(TorchDispatchMode):
    """What this thread's operations make while inside, as long as it lives.

    A storage counts once, whichever tensors share it. What a kernel takes and frees within itself is not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._lock = threading.RLock()  # another thread may be the one that lets go

    def take_peak(self) -> int:
        """Since the last call."""
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
# Whether backward computes the layers again, and whether the weights' gradients wait for the end of it.
PassMode = tuple[bool, bool]
PASS_MODES: tuple[PassMode, ...] = tuple((again, waits) for again in (False, True) for waits in (False, True))


class PassMemory(NamedTuple):
    """Bytes that are alive while one micro-batch goes forward and backward through neighbouring layers."""

    inputs: int
    forward: int  # at the peak of forward
    kept: int  # from forward to backward, inputs and outputs among it
    backward: int  # at the peak of backward
    late: int  # after it, where the weights' gradients wait


def run_pass(
    layers: Sequence[Layer], tensors: Tensors, targets: Tensors, later: WeightGradStore, context: Context, way: PassMode
) -> tuple[PassMemory, Tensors]:
    """As a stage of the pipeline does it; what it found, and empty tensors like the last layer's outputs.

    `targets` are for the model's last layer. Inside `gradients_as_in_training(layers, later)`.
    """
    again, waits = way
    with AllocationTracker() as allocated:
        inputs = received(tensors)
        input_bytes = allocated.now
        outputs = forward(layers, inputs, targets, context, again=again)
        forward_peak, kept = allocated.take_peak(), allocated.now
        with later.deferring() if waits else nullcontext():
            backward(outputs)
        backward_peak = allocated.take_peak()
        made = [(tensor.shape, tensor.dtype, tensor.device) for tensor in outputs]
        del inputs, outputs
        late = allocated.now
        if waits:
            later.run_oldest()
    empty = tuple(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in made)
    return PassMemory(input_bytes, forward_peak, kept, backward_peak, late), empty


def join(passes: Sequence[PassMemory]) -> PassMemory:
    """Of neighbouring layers, from those of each alone: what one hands on is the next one's input."""
    inputs = kept = passes[0].inputs
    forward_peak = backward_peak = late = 0
    for one in passes:
        forward_peak = max(forward_peak, kept + one.forward - one.inputs)
        kept += one.kept - one.inputs
    before = kept
    for one in reversed(passes):
        before -= one.kept - one.inputs
        backward_peak = max(backward_peak, before + one.backward - one.inputs + late)
        late += one.late
    return PassMemory(inputs, forward_peak, kept, backward_peak, late)


def stage_activations(
    operations: Sequence[Operation], stage: int, recompute: Recompute, passes: Mapping[PassMode, PassMemory]
) -> int:
    """The most bytes that this stage holds while it works through its operations; who recomputes nothing needs no pass
    of that way."""
    split = any(operation.kind == "weights" for operation in operations)
    whole = passes[False, split or stage > 0]
    return peak_activations(operations, recompute, whole, whole if recompute == "never" else passes[True, split])


def peak_activations(
    operations: Sequence[Operation], recompute: Recompute, whole: PassMemory, again: PassMemory
) -> int:
    """The same; `again`: where its blocks are recomputed."""
    last = max(operation.micro_batch for operation in operations)
    split = any(operation.kind == "weights" for operation in operations)
    held = peak = 0
    for kind, micro_batch in operations:
        kept_whole = recompute == "never" or (recompute == "except_last" and micro_batch == last)
        run = whole if kept_whole else again
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


def forward(layers: Sequence[Layer], inputs: Tensors, targets: Tensors, context: Context, *, again: bool) -> Tensors:
    """The last one's outputs. `context` surrounds each call of a layer, as in the pipeline."""
    tensors = inputs
    for layer in layers:
        if layer is layers[-1]:
            tensors += targets
        call = partial(_call, layer, context)
        if again and layer.recompute:
            tensors = checkpoint(call, *tensors, use_reentrant=False, preserve_rng_state=False)
        else:
            tensors = call(*tensors)
    return tensors


def backward(outputs: Tensors) -> None:
    """From gradients of one."""
    wanting: list[Tensor] = [tensor for tensor in outputs if tensor.requires_grad]
    torch.autograd.backward(wanting, [torch.ones_like(tensor) for tensor in wanting])


def received(tensors: Tensors) -> Tensors:
    """A stage's device has its own of what comes from the stage before, whose gradients go back."""
    return tuple(tensor.detach().clone().requires_grad_(tensor.is_floating_point()) for tensor in tensors)


@contextmanager
def gradients_as_in_training(
    layers: Sequence[Layer], later: WeightGradStore, *, products: bool = True
) -> Iterator[None]:
    """Gradients are there before, lookups give rows away, and linear layers leave their products to `later`."""
    modules = {module for layer in layers for module in layer.module.modules()}
    weights = {weight for layer in layers for weight in layer.module.parameters()}
    embeddings = [module for module in modules if isinstance(module, VocabParallelEmbedding)]
    linears = [module for module in modules if isinstance(module, WeightGradLayer) and products]
    before = [embedding.embedding_grads for embedding in embeddings], [linear.weight_grads for linear in linears]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    for embedding in embeddings:
        embedding.embedding_grads = NoRows()
    for linear in linears:
        linear.weight_grads = ParameterGrads(linear, later)
    try:
        yield
    finally:
        for embedding, embedding_grads in zip(embeddings, before[0], strict=True):
            embedding.embedding_grads = embedding_grads
        for linear, weight_grads in zip(linears, before[1], strict=True):
            linear.weight_grads = weight_grads
        for weight in weights:
            weight.grad = None


class NoRows:
    """Embedding gradients that are dropped."""

    def put(self, tokens: Tensor, rows: Tensor) -> None:
        pass


class ParameterGrads:
    """The weight gradients of a layer, added to the parameters' own as autograd does: implements `WeightGrads`."""

    def __init__(self, layer: WeightGradLayer, store: WeightGradStore) -> None:
        self._layer, self._store = layer, store

    def put(self, values: Tensor, grad: Tensor) -> None:
        self._store.put(self, values, grad)

    @torch.no_grad()
    def add_product(self, values: Tensor, grad: Tensor, counted: Sequence[bool]) -> None:
        layer = self._layer
        weight, bias = layer.weight.grad, None if layer.bias is None else layer.bias.grad
        assert weight is not None
        if weight.dtype == grad.dtype:
            weight.addmm_(grad.t(), values)
        else:
            weight.add_(grad.t() @ values)
        if bias is not None:
            bias.add_(grad.sum(0, dtype=bias.dtype))


def _call(layer: Layer, context: Context, *inputs: Tensor) -> Tensors:
    with context():
        result = layer.run(*inputs)
    return result if isinstance(result, tuple) else (result,)


# Rounds are repeated for so long, but at least and at most so often.
_SECONDS = 2.0
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 100

Visit = Callable[[int, Layer, Tensors, Tensors], Tensors]


class LayerProfile(NamedTuple):
    """What one layer needs for one micro-batch; memory in bytes."""

    seconds: float  # forward and backward
    weights: int  # a tied one counts at the last layer that has it
    passes: dict[PassMode, PassMemory]  # where nothing is recomputed, without those ways


def measure_layers(
    layers: Sequence[Layer],
    micro_batch: MicroBatch,
    device: torch.device,
    *,
    context: Context = nullcontext,
    recompute: bool = False,
    threads: int = 1,
    seconds: float = _SECONDS,
) -> list[LayerProfile]:
    """Leaves no gradient behind. A GPU has one layer at a time, as all may not fit; at the end they are on the CPU.

    `context` surrounds each call of a layer, as in the pipeline.
    """
    owner = {id(weight): layer.name for layer in layers for weight in layer.module.parameters()}
    passes: list[dict[PassMode, PassMemory]] = [{} for _ in layers]
    times: list[list[float]] = [[] for _ in layers]

    def weigh(index: int, layer: Layer, inputs: Tensors, targets: Tensors) -> Tensors:
        forward([layer], inputs, targets, context, again=False)  # warms up, and makes tables that stay
        outputs: Tensors = ()
        for way in PASS_MODES:
            if recompute or not way[0]:
                passes[index][way], outputs = run_pass([layer], inputs, targets, later, context, way)
        return outputs

    def clock(index: int, layer: Layer, inputs: Tensors, targets: Tensors) -> Tensors:
        _wait(device)
        began = time.perf_counter()
        outputs = forward([layer], inputs, targets, context, again=recompute)
        backward(outputs)
        _wait(device)
        times[index].append(time.perf_counter() - began)
        return outputs

    later = WeightGradStore()
    with _threads(threads), gradients_as_in_training(layers, later):
        _round(layers, micro_batch, device, weigh)
        end = time.perf_counter() + seconds
        for number in range(_MOST_ROUNDS):
            if number < _LEAST_ROUNDS or time.perf_counter() < end:
                _round(layers, micro_batch, device, clock)
    # The least: other work on the machine only ever adds.
    return [
        LayerProfile(
            min(times[index]),
            sum(weight.nbytes for weight in layer.module.parameters() if owner[id(weight)] == layer.name),
            passes[index],
        )
        for index, layer in enumerate(layers)
    ]


def _round(layers: Sequence[Layer], micro_batch: MicroBatch, device: torch.device, visit: Visit) -> None:
    """Visits each layer with what the one before it returned."""
    tensors = _moved(micro_batch.inputs, device)
    for index, layer in enumerate(layers):
        targets = _moved(micro_batch.targets, device) if layer is layers[-1] else ()
        layer.module.to(device)
        outputs = visit(index, layer, tensors, targets)
        layer.module.to("cpu")
        tensors = tuple(tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in outputs)


def _moved(tensors: Tensors, device: torch.device) -> Tensors:
    return tuple(tensor.to(device) for tensor in tensors)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
