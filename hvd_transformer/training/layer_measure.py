"""Measures each layer of a model on the device that will run it: its time, and the memory that it holds.

Round by round over all layers, so that what slows the machine down for a while slows all of them. Everything is as in
training: the workers' threads, autocast and dropout anew in each call, gradients added where they are, and a
recomputed layer's forward once more in its backward.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch

from hvd_transformer.parallel.later import Later
from hvd_transformer.parallel.pipeline import Layer, MicroBatch, Tensors
from hvd_transformer.training.activations import (
    WAYS,
    Context,
    Pass,
    Way,
    backward,
    forward,
    gradients_as_in_training,
    run_pass,
)

# Rounds are repeated for so long, but at least and at most so often.
_SECONDS = 2.0
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 100

Visit = Callable[[int, Layer, Tensors, Tensors], Tensors]


class MeasuredLayer(NamedTuple):
    """What one layer needs for one micro-batch; memory in bytes."""

    seconds: float  # forward and backward
    weights: int  # a tied one counts at the last layer that has it
    passes: dict[Way, Pass]  # where nothing is recomputed, without those ways


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
    passes: list[dict[Way, Pass]] = [{} for _ in layers]
    times: list[list[float]] = [[] for _ in layers]

    def weigh(index: int, layer: Layer, inputs: Tensors, targets: Tensors) -> Tensors:
        forward([layer], inputs, targets, context, again=False)  # warms up, and makes tables that stay
        outputs: Tensors = ()
        for way in WAYS:
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

    later = Later()
    with _threads(threads), gradients_as_in_training(layers, later):
        _round(layers, micro_batch, device, weigh)
        end = time.perf_counter() + seconds
        for number in range(_MOST_ROUNDS):
            if number < _LEAST_ROUNDS or time.perf_counter() < end:
                _round(layers, micro_batch, device, clock)
    # The least: other work on the machine only ever adds.
    return [
        MeasuredLayer(
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
