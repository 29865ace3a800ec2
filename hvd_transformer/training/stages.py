"""Cuts a task's layers into the stages of the pipeline."""

import time
from collections.abc import Sequence
from statistics import median

import torch
from torch import Tensor

from hvd_transformer.comm.world import World, agree
from hvd_transformer.config.schema import Config
from hvd_transformer.parallel import partition
from hvd_transformer.parallel.layout import Layout
from hvd_transformer.parallel.pipeline import Layer, MicroBatch, Stage, Tensors
from hvd_transformer.training.language_model_task import layer_names
from hvd_transformer.training.precision import autocast
from hvd_transformer.training.task import Task

# Each layer is timed so often; the median counts.
_REPEATS = 5


def check_partition(config: Config) -> None:
    """Raises `UserError` where the model cannot be cut so. Needs no data and no model."""
    given_partition(config, layer_names(config.model))


def make_stages(config: Config, task: Task, layout: Layout, world: World) -> list[Stage]:
    """The stages, moved to their devices; the same cut on all ranks. Collective. Raises `UserError` on all ranks."""
    layers = task.layers
    own = agree(world, lambda: _counts(config, task, layout, world.rank == 0))
    counts = world.all_gather_objects(own)[0]
    stages, start = [], 0
    for count, device in zip(counts, layout.devices, strict=True):
        stages.append(Stage(layers[start : start + count], device))
        start += count
        for layer in stages[-1].layers:
            layer.module.to(device)
    return stages


def _counts(config: Config, task: Task, layout: Layout, measures: bool) -> list[int]:
    """Layers a stage. Rank 0 alone measures, as another rank would measure something else."""
    layers, num_stages = task.layers, config.parallel.pipeline
    given = given_partition(config, [layer.name for layer in layers])
    if given is not None or num_stages == 1 or not measures:
        return given or partition.uniform(len(layers), num_stages)
    units = next(units for step in task.sampler.epoch() for units in step.rounds if units)
    samples = task.batch(0, units)
    size = -(-samples[0].size(0) // config.parallel.micro_batches)
    batch = tuple(tensor[:size] for tensor in samples)
    with autocast(config.training.precision, layout.device):
        return partition.balanced(layer_seconds(layers, task.micro_batch(batch), layout.device), num_stages)


def given_partition(config: Config, names: Sequence[str]) -> list[int] | None:
    """The layers a stage where the configuration says so; None where the best cut is to be found ("auto").

    Raises `UserError` where the named layers cannot be cut so.
    """
    wanted, num_stages = config.parallel.partition, config.parallel.pipeline
    even = partition.uniform(len(names), num_stages)  # refuses more stages than layers
    if isinstance(wanted, list):
        return partition.explicit(wanted, len(names), num_stages)
    if ":" in wanted:
        return partition.by_function(wanted, names, num_stages)
    return even if wanted == "uniform" else None


def layer_seconds(layers: Sequence[Layer], micro_batch: MicroBatch, device: torch.device) -> list[float]:
    """Seconds of each layer's forward and backward of this micro-batch on the device; no gradient is left behind."""
    tensors = tuple(tensor.to(device) for tensor in micro_batch.inputs)
    result = []
    for layer in layers:
        layer.module.to(device)
        if layer is layers[-1]:
            tensors += tuple(tensor.to(device) for tensor in micro_batch.targets)
        seconds = []
        for _ in range(_REPEATS):
            _wait(device)
            began = time.perf_counter()
            outputs = _once(layer, tensors)
            _wait(device)
            seconds.append(time.perf_counter() - began)
        for weight in layer.module.parameters():
            weight.grad = None
        result.append(median(seconds))
        tensors = tuple(tensor.detach() for tensor in outputs)
    return result


def _once(layer: Layer, tensors: Tensors) -> Tensors:
    inputs = tuple(tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in tensors)
    outputs = layer.run(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    wanting: list[Tensor] = [tensor for tensor in outputs if tensor.requires_grad]
    torch.autograd.backward(wanting, [torch.ones_like(tensor) for tensor in wanting])
    return outputs


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
