"""Measures each layer of a model on the device that will run it: its time, and the memory that it holds.

Round by round over all layers, so that what slows the machine down for a while slows all of them. Everything is as in
training: the workers' threads, autocast and dropout anew in each call, gradients added where they are, and a
recomputed layer's forward once more in its backward.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from hvd_transformer.models.embedding import Embedding
from hvd_transformer.models.linear import Product
from hvd_transformer.parallel.pipeline import Layer, MicroBatch, Tensors

# Rounds are repeated for so long, but at least and at most so often.
_SECONDS = 2.0
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 100

Context = Callable[[], AbstractContextManager[Any]]
Visit = Callable[[int, Layer, Tensors], Tensors]


class MeasuredLayer(NamedTuple):
    """What one layer needs for one micro-batch; memory in bytes."""

    seconds: float  # forward and backward
    weights: int  # a tied one counts at the last layer that has it
    held: int  # from forward to backward: its input and, unless it is recomputed, what autograd saves
    again: int  # what a recomputed layer holds beside that during its backward


def measure_layers(
    layers: Sequence[Layer],
    micro_batch: MicroBatch,
    device: torch.device,
    *,
    context: Context = nullcontext,
    recompute: bool = False,
    threads: int = 1,
    seconds: float = _SECONDS,
) -> list[MeasuredLayer]:
    """Leaves no gradient behind. A GPU has one layer at a time, as all may not fit; at the end they are on the CPU.

    `context` surrounds each call of a layer, as in the pipeline.
    """
    owner = {id(weight): layer.name for layer in layers for weight in layer.module.parameters()}
    memory: list[tuple[int, int, int]] = []
    times: list[list[float]] = [[] for _ in layers]

    def weigh(index: int, layer: Layer, inputs: Tensors) -> Tensors:
        outputs, held, saved = _hold(layer, inputs, context)
        own = [weight for weight in layer.module.parameters() if owner[id(weight)] == layer.name]
        again = recompute and layer.recompute
        weights = sum(weight.numel() * weight.element_size() for weight in own)
        memory.append((weights, held if again else held + saved, saved if again else 0))
        _backward(outputs)
        return outputs

    def clock(index: int, layer: Layer, inputs: Tensors) -> Tensors:
        _wait(device)
        began = time.perf_counter()
        outputs = _call(layer, inputs, context, recompute and layer.recompute)
        _backward(outputs)
        _wait(device)
        times[index].append(time.perf_counter() - began)
        return outputs

    with _threads(threads), _gradients_as_in_training(layers):
        _round(layers, micro_batch, device, weigh)  # warms up, too
        end = time.perf_counter() + seconds
        for number in range(_MOST_ROUNDS):
            if number < _LEAST_ROUNDS or time.perf_counter() < end:
                _round(layers, micro_batch, device, clock)
    # The least: other work on the machine only ever adds.
    return [MeasuredLayer(min(own), *sizes) for own, sizes in zip(times, memory, strict=True)]


def _round(layers: Sequence[Layer], micro_batch: MicroBatch, device: torch.device, visit: Visit) -> None:
    """Visits each layer with what the one before it returned."""
    tensors = _moved(micro_batch.inputs, device)
    for index, layer in enumerate(layers):
        if layer is layers[-1]:
            tensors += _moved(micro_batch.targets, device)
        layer.module.to(device)
        outputs = visit(index, layer, tensors)
        layer.module.to("cpu")
        tensors = tuple(tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in outputs)


def _call(layer: Layer, inputs: Tensors, context: Context, again: bool) -> Tensors:
    """Forward, as the pipeline does it."""

    def run(*tensors: Tensor) -> Tensors:
        with context():
            result = layer.run(*tensors)
        return result if isinstance(result, tuple) else (result,)

    if not again:
        return run(*inputs)
    outputs: Tensors = checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False)
    return outputs


def _backward(outputs: Tensors) -> None:
    wanting: list[Tensor] = [tensor for tensor in outputs if tensor.requires_grad]
    torch.autograd.backward(wanting, [torch.ones_like(tensor) for tensor in wanting])


def _hold(layer: Layer, inputs: Tensors, context: Context) -> tuple[Tensors, int, int]:
    """Forward: (outputs, bytes of the inputs, bytes that autograd saves beside inputs and weights)."""
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = _call(layer, inputs, context, again=False)
    given = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in inputs}
    lasting = {weight.untyped_storage().data_ptr() for weight in layer.module.parameters()}
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in saved}
    return outputs, sum(given.values()), sum(storages[key] for key in storages.keys() - given.keys() - lasting)


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


@contextmanager
def _gradients_as_in_training(layers: Sequence[Layer]) -> Iterator[None]:
    """Lookups give rows away, and linear layers' products go right into the gradients that are there."""
    modules = [module for layer in layers for module in layer.module.modules()]
    embeddings = [module for module in modules if isinstance(module, Embedding)]
    linears = [module for module in modules if isinstance(module, Product)]
    before = [embedding.take_rows for embedding in embeddings], [linear.take_product for linear in linears]
    for weight in (weight for layer in layers for weight in layer.module.parameters()):
        weight.grad = torch.zeros_like(weight)
    for embedding in embeddings:
        embedding.take_rows = lambda tokens, gradients: None
    for linear in linears:
        linear.take_product = linear.add_product
    try:
        yield
    finally:
        for embedding, take_rows in zip(embeddings, before[0], strict=True):
            embedding.take_rows = take_rows
        for linear, take_product in zip(linears, before[1], strict=True):
            linear.take_product = take_product
        for weight in (weight for layer in layers for weight in layer.module.parameters()):
            weight.grad = None
