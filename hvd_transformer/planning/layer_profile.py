"""Measures the time and memory of each layer, run as the pipeline runs it."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from hvd_transformer.gradients.weight_grads import WeightGradStore
from hvd_transformer.nn.contracts import Layer, MicroBatch, Tensors
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

Visit = Callable[[int, Layer, Tensors, Tensors], Tensors]


class LayerProfile(NamedTuple):
    """What one layer needs for one micro-batch."""

    seconds: float  # forward and backward
    weights: int  # bytes; a tied weight counts at the last layer that uses it
    passes: dict[PassMode, PassMemory]  # modes that recompute are missing if `measure_layers` did not recompute


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
    passes: list[dict[PassMode, PassMemory]] = [{} for _ in layers]
    times: list[list[float]] = [[] for _ in layers]
    store = WeightGradStore()

    def measure_memory(index: int, layer: Layer, inputs: Tensors, targets: Tensors) -> Tensors:
        forward([layer], inputs, targets, context, recompute=False)  # warm-up; creates position tables, which stay
        outputs: Tensors = ()
        for mode in PASS_MODES:
            if recompute or not mode.recompute:
                passes[index][mode], outputs = run_pass([layer], inputs, targets, store, context, mode)
        return outputs

    def measure_time(index: int, layer: Layer, inputs: Tensors, targets: Tensors) -> Tensors:
        _synchronize(device)
        began = time.perf_counter()
        outputs = forward([layer], inputs, targets, context, recompute=recompute)
        backward(outputs)
        _synchronize(device)
        times[index].append(time.perf_counter() - began)
        return outputs

    with _num_threads(threads), gradients_as_in_training(layers, store):
        _round(layers, micro_batch, device, measure_memory)
        end = time.perf_counter() + seconds
        for number in range(_MAX_ROUNDS):
            if number < _MIN_ROUNDS or time.perf_counter() < end:
                _round(layers, micro_batch, device, measure_time)
    return [
        LayerProfile(
            min(times[index]),  # other work on the machine only ever adds time
            sum(weight.nbytes for weight in layer.module.parameters() if owner[id(weight)] == layer.name),
            passes[index],
        )
        for index, layer in enumerate(layers)
    ]


def _round(layers: Sequence[Layer], micro_batch: MicroBatch, device: torch.device, visit: Visit) -> None:
    """Visit each layer with the outputs of the previous one."""
    tensors = _moved(micro_batch.inputs, device)
    for index, layer in enumerate(layers):
        targets = _moved(micro_batch.targets, device) if layer is layers[-1] else ()
        layer.module.to(device)
        outputs = visit(index, layer, tensors, targets)
        layer.module.to("cpu")
        tensors = tuple(tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in outputs)


def _moved(tensors: Tensors, device: torch.device) -> Tensors:
    return tuple(tensor.to(device) for tensor in tensors)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _num_threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def gradients_as_in_training(
    layers: Sequence[Layer], store: WeightGradStore, *, weight_grads: bool = True
) -> Iterator[None]:
    """Handle gradients as training does, and remove them at the end.

    Gradients of weights exist from the start, and those of embedding lookups are dropped. With `weight_grads`, linear
    layers put their weight gradients into `store`; otherwise autograd computes them.
    """
    modules = {module for layer in layers for module in layer.module.modules()}
    weights = {weight for layer in layers for weight in layer.module.parameters()}
    embeddings = [module for module in modules if isinstance(module, VocabParallelEmbedding)]
    linears = [module for module in modules if isinstance(module, WeightGradLayer) and weight_grads]
    before = [embedding.embedding_grads for embedding in embeddings], [linear.weight_grads for linear in linears]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    for embedding in embeddings:
        embedding.embedding_grads = NoRows()
    for linear in linears:
        linear.weight_grads = ParameterGrads(linear, store)
    try:
        yield
    finally:
        for embedding, old_embedding_grads in zip(embeddings, before[0], strict=True):
            embedding.embedding_grads = old_embedding_grads
        for linear, old_weight_grads in zip(linears, before[1], strict=True):
            linear.weight_grads = old_weight_grads
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

    def put(self, values: Tensor, grad: Tensor) -> None:
        self._store.put(partial(self._add, values, grad))

    @torch.no_grad()
    def _add(self, values: Tensor, grad: Tensor) -> None:
        layer = self._layer
        weight, bias = layer.weight.grad, None if layer.bias is None else layer.bias.grad
        assert weight is not None
        if weight.dtype == grad.dtype:
            weight.addmm_(grad.t(), values)
        else:
            weight.add_(grad.t() @ values)
        if bias is not None:
            bias.add_(grad.sum(0, dtype=bias.dtype))
