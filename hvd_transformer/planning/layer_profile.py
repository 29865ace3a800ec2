"""Measures the time and memory of each layer, run as the pipeline runs it."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from hvd_transformer.gradients.muon import hidden_matrices
from hvd_transformer.gradients.weight_grads import WeightGradStore
from hvd_transformer.nn.contracts import Layer, MicroBatch, Tensors
from hvd_transformer.nn.kernels import Kernels
from hvd_transformer.nn.matmul import weight_grad_
from hvd_transformer.nn.parallel_layers import VocabParallelEmbedding, WeightGradLayer
from hvd_transformer.planning.pass_memory import (
    PASS_MODES,
    Context,
    PassMemory,
    PassMode,
    backward,
    forward,
    run_pass,
)

# Timing rounds are repeated for this many seconds, within these limits on their number.
_SECONDS = 2.0
_MIN_ROUNDS, _MAX_ROUNDS = 3, 100

Result = TypeVar("Result")


class LayerProfile(NamedTuple):
    """What one layer needs for one micro-batch."""

    seconds: float  # forward and backward
    weights: int  # bytes; a tied weight counts at the last layer that uses it
    passes: dict[PassMode, PassMemory]  # modes that recompute are missing if `measure_layers` did not recompute
    hidden: int = 0  # of the weights' bytes, those that Muon updates, if it is the optimizer
    shadow: int = 0  # bytes of the weights in 16 bits that mixed precision keeps beside them


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
    """Measure each layer; no gradients are left behind. Each layer runs inside `context()`, as in training.

    On a GPU the layers are moved there one by one, as they may not all fit; at the end they are on the CPU.
    """
    owner = {id(weight): layer.name for layer in layers for weight in layer.module.parameters()}
    store = WeightGradStore()

    def measure_memory(layer: Layer, inputs: Tensors, targets: Tensors) -> tuple[dict[PassMode, PassMemory], Tensors]:
        outputs = forward([layer], inputs, targets, context, recompute=False)  # creates position tables, which stay
        passes = {}
        for mode in PASS_MODES:
            if recompute or not mode.recompute:
                passes[mode], outputs = run_pass([layer], inputs, targets, store, context, mode)
        return passes, outputs

    def measure_time(layer: Layer, inputs: Tensors, targets: Tensors) -> tuple[float, Tensors]:
        _synchronize(device)
        began = time.perf_counter()
        outputs = forward([layer], inputs, targets, context, recompute=recompute)
        backward(outputs)
        _synchronize(device)
        return time.perf_counter() - began, outputs

    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(threads)
        stack.enter_context(gradients_as_in_training(layers, store))
        passes = _round(layers, micro_batch, device, measure_memory)
        end = time.perf_counter() + seconds
        rounds = [_round(layers, micro_batch, device, measure_time) for _ in range(_MIN_ROUNDS)]
        while len(rounds) < _MAX_ROUNDS and time.perf_counter() < end:
            rounds.append(_round(layers, micro_batch, device, measure_time))
    times = [min(of_layer) for of_layer in zip(*rounds, strict=True)]  # other work on the machine only ever adds time
    hidden = {id(weight) for weight in hidden_matrices([layer.module for layer in layers])}
    linears = (module for layer in layers for module in layer.module.modules() if isinstance(module, WeightGradLayer))
    shadowed = {id(linear.weight) for linear in linears}
    profiles = []
    for layer, seconds_of_layer, passes_of_layer in zip(layers, times, passes, strict=True):
        own = [weight for weight in layer.module.parameters() if owner[id(weight)] == layer.name]
        profiles.append(
            LayerProfile(
                seconds_of_layer,
                sum(weight.nbytes for weight in own),
                passes_of_layer,
                hidden=sum(weight.nbytes for weight in own if id(weight) in hidden),
                shadow=sum(2 * weight.numel() for weight in own if id(weight) in shadowed),
            )
        )
    return profiles


def _round(
    layers: Sequence[Layer],
    micro_batch: MicroBatch,
    device: torch.device,
    measure: Callable[[Layer, Tensors, Tensors], tuple[Result, Tensors]],
) -> list[Result]:
    """Measure each layer with the outputs of the previous one."""
    tensors, results = _moved(micro_batch.inputs, device), []
    for layer in layers:
        targets = _moved(micro_batch.targets, device) if layer is layers[-1] else ()
        layer.module.to(device)
        result, outputs = measure(layer, tensors, targets)
        layer.module.to("cpu")
        results.append(result)
        tensors = tuple(tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in outputs)
    return results


def _moved(tensors: Tensors, device: torch.device) -> Tensors:
    return tuple(tensor.to(device) for tensor in tensors)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def gradients_as_in_training(layers: Sequence[Layer], store: WeightGradStore, *, blocks: bool = True) -> Iterator[None]:
    """Handle gradients as training does, and remove them at the end.

    Gradients of weights exist from the start, and those of embedding lookups are dropped. Linear layers put their
    weight gradients into `store`; without `blocks`, autograd computes those of blocks.
    """
    modules = {module for layer in layers for module in layer.module.modules()}
    weights = {weight for layer in layers for weight in layer.module.parameters()}
    embeddings = [module for module in modules if isinstance(module, VocabParallelEmbedding)]
    linears = [
        module
        for layer in layers
        if blocks or not layer.recompute
        for module in layer.module.modules()
        if isinstance(module, WeightGradLayer)
    ]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    for embedding in embeddings:
        embedding.embedding_grads = NoRows()
    for linear in linears:
        linear.weight_grads = ParameterGrads(linear, store)
    try:
        yield
    finally:
        for embedding in embeddings:
            embedding.embedding_grads = None
        for linear in linears:
            linear.weight_grads = None
        for weight in weights:
            weight.grad = None


class NoRows:
    """Drops the gradients of embedding lookups: implements `EmbeddingGrads`."""

    def put(self, tokens: Tensor, rows: Tensor) -> None:
        pass


class ParameterGrads:
    """Adds a layer's weight gradients to its parameters' `grad`, as autograd does: implements `WeightGrads`."""

    def __init__(self, layer: WeightGradLayer, store: WeightGradStore) -> None:
        self._layer, self._store = layer, store

    def put(self, values: Tensor, grad: Tensor, kernels: Kernels | None) -> None:
        self._store.put(partial(self._add, values, grad))

    @torch.no_grad()
    def put_formed(self, weight_grad: Tensor, bias_grad: Tensor | None, factor: Tensor) -> None:
        for weight, formed in ((self._layer.weight, weight_grad), (self._layer.bias, bias_grad)):
            if formed is not None:
                assert weight.grad is not None
                weight.grad.addcmul_(formed, factor.to(formed.dtype))

    @torch.no_grad()
    def _add(self, values: Tensor, grad: Tensor) -> None:
        layer = self._layer
        weight, bias = layer.weight.grad, None if layer.bias is None else layer.bias.grad
        assert weight is not None
        weight_grad_(weight, grad, values, first=False)
        if bias is not None:
            bias.add_(grad.sum(0, dtype=bias.dtype))
