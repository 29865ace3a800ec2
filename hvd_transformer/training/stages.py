"""Cuts a task's layers into the stages of the pipeline."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import accumulate

import torch

from hvd_transformer.comm.world import World, agree
from hvd_transformer.config.schema import Config
from hvd_transformer.models.dropout import dropout_place
from hvd_transformer.parallel import partition
from hvd_transformer.parallel.layout import Layout
from hvd_transformer.parallel.pipeline import Stage, worker_threads
from hvd_transformer.parallel.schedule import make_schedule
from hvd_transformer.training.activations import Pass, Way, join, stage_activations
from hvd_transformer.training.layer_cache import cached_costs
from hvd_transformer.training.layer_measure import MeasuredLayer, measure_layers
from hvd_transformer.training.optimizer import copies
from hvd_transformer.training.precision import autocast
from hvd_transformer.training.task import Task, cut
from hvd_transformer.training.tasks import task_class

# Of a GPU's memory: for the libraries, buffers for sending, what is held only for a moment, and gaps.
_RESERVE = 0.1

log = logging.getLogger("hvd_transformer")


def check_partition(config: Config) -> None:
    """Raises `UserError` where the model cannot be cut so. Needs no data and no model; one whose layers are not known
    without is checked later."""
    names = task_class(config).layer_names(config)
    if names is not None:
        given_partition(config, names)


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
    if given is not None or num_stages == 1 or not measures or not task.sampler.num_steps():  # in evaluation alone
        return given or partition.uniform(len(layers), num_stages)
    units = next(iter(task.sampler.epoch())).rounds[0]  # rank 0's first round is the largest of all
    batches = cut(task.batch(0, units), config.parallel.micro_batches)
    micro_batch, threads = task.micro_batch(batches[0]), worker_threads(num_stages)

    @contextmanager
    def context() -> Iterator[None]:
        with autocast(config.training.precision, layout.device), dropout_place(config.seed):
            yield

    def measure() -> list[MeasuredLayer]:
        recompute = config.parallel.recompute
        again = recompute == "always" or (recompute == "except_last" and len(batches) > 1)
        return measure_layers(layers, micro_batch, layout.device, context=context, recompute=again, threads=threads)

    costs, cached = cached_costs(config, layers, micro_batch, layout.device, threads, measure)
    counts = best_cut(config, costs, len(batches), _device_bytes(layout.devices), layout.dp)
    seconds = sum(cost.seconds for cost in costs)
    origin = "measured before" if cached else "measured now"
    log.info("partition %s: layers of %.1f ms a micro-batch, %s", counts, 1000 * seconds, origin)
    return counts


def best_cut(
    config: Config, costs: Sequence[MeasuredLayer], num_micro_batches: int, device_bytes: int | None, dp: int
) -> list[int]:
    """Layers a stage such that the slowest stage is fastest, and each fits a device of this memory (None: no limit).

    `dp` replicas may share the optimizer.

    Raises `UserError` where nothing fits.
    """
    parallel, num_stages = config.parallel, config.parallel.pipeline
    seconds = [cost.seconds for cost in costs]
    if device_bytes is None:
        return partition.balanced(seconds, num_stages)
    numbers = 1 + sum(copies(config, dp))  # of each weight
    schedule = make_schedule(parallel.schedule, num_stages, num_micro_batches)

    weights = [0, *accumulate(cost.weights for cost in costs)]

    @cache
    def passes_from(start: int) -> list[dict[Way, Pass]]:
        """Of the first layer from here on, of the first two, and so on."""
        result = [costs[start].passes]
        for cost in costs[start + 1 :]:
            result.append({way: join([found, cost.passes[way]]) for way, found in result[-1].items()})
        return result

    @cache
    def need(stage: int, start: int, stop: int) -> int:
        activations = stage_activations(
            schedule[stage], stage, parallel.recompute, passes_from(start)[stop - start - 1]
        )
        return round(numbers * (weights[stop] - weights[start])) + activations

    return partition.balanced(seconds, num_stages, need, (1 - _RESERVE) * device_bytes)


def _device_bytes(devices: Sequence[torch.device]) -> int | None:
    """Of the smallest GPU. A CPU's stages share the host's memory, and no cut needs less of that than another."""
    if devices[0].type != "cuda":
        return None
    return min(torch.cuda.get_device_properties(device).total_memory for device in devices)


def given_partition(config: Config, names: Sequence[str]) -> list[int] | None:
    """The layers a stage where the configuration says so; None where the best cut is to be found ("auto").

    Raises `UserError` where the named layers cannot be cut so.
    """
    wanted, num_stages = config.parallel.partition, config.parallel.pipeline
    even = partition.uniform(len(names), num_stages)  # refuses more stages than layers
    if isinstance(wanted, list):
        return partition.explicit(wanted, len(names), num_stages)
    if ":" in wanted:
        return list(_by_function(wanted, tuple(names), num_stages))
    return even if wanted == "uniform" else None


@cache
def _by_function(path: str, names: tuple[str, ...], num_stages: int) -> tuple[int, ...]:
    """The user's function is asked once, though the cut is checked before there is a model."""
    return tuple(partition.by_function(path, names, num_stages))
