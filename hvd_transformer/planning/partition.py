"""Partitions a model's layers into pipeline stages."""

import logging
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from functools import cache
from itertools import accumulate, pairwise

import torch

from hvd_transformer.config.schema import Config
from hvd_transformer.errors import UserError
from hvd_transformer.gradients.optimizer import copies_per_weight
from hvd_transformer.nn.dropout import dropout_key
from hvd_transformer.parallel.mesh import ParallelMesh
from hvd_transformer.parallel.pipeline import worker_threads
from hvd_transformer.parallel.pipeline_schedule import make_schedule
from hvd_transformer.parallel.precision import autocast
from hvd_transformer.planning.layer_profile import (
    LayerProfile,
    PassMemory,
    PassMode,
    join,
    measure_layers,
    stage_activations,
)
from hvd_transformer.planning.profile_cache import cached_costs
from hvd_transformer.plugin import first_line, load_plugin
from hvd_transformer.tasks.registry import task_class
from hvd_transformer.tasks.task import Task, split_batch

# Of a stage and its first and last layer (exclusive); None where it may not be.
Price = Callable[[int, int, int], float | None]


def uniform(num_layers: int, num_stages: int) -> list[int]:
    """As even as possible. The remainder goes to the first stages: the last one often has the heavy output layer."""
    _check_number(num_layers, num_stages)
    share, rest = divmod(num_layers, num_stages)
    return [share + (stage < rest) for stage in range(num_stages)]


def balanced(
    costs: Sequence[float],
    num_stages: int,
    need: Callable[[int, int, int], float] | None = None,
    limit: float = math.inf,
) -> list[int]:
    """The partition whose costliest stage costs least; of several such, the one with the smallest sum of squared
    stage costs, and of several such, the one with more layers in earlier stages.

    `need` are the bytes of a stage with its first and last layer (exclusive); none may need more than `limit`. Raises
    UserError where nothing fits.
    """
    num_layers = len(costs)
    _check_number(num_layers, num_stages)
    work = [0, *accumulate(_whole(costs))]

    def cost(stage: int, start: int, stop: int) -> int | None:
        fits = need is None or need(stage, start, stop) <= limit
        return work[stop] - work[start] if fits else None

    cut = _best_cut(num_layers, num_stages, cost, max)
    if cut is None:
        assert need is not None
        least = _best_cut(num_layers, num_stages, need, max)
        assert least is not None
        raise UserError(
            f"parallel.partition=auto: no cut into {num_stages} stages fits {_size(limit)} a stage; "
            f"at least {_size(least[0])} would do"
        )
    largest = cut[0]

    def squared(stage: int, start: int, stop: int) -> int | None:
        own = cost(stage, start, stop)
        return own**2 if own is not None and own <= largest else None

    # A second search: in one, the best end of the model would depend on what its beginning costs.
    cut = _best_cut(num_layers, num_stages, squared, operator.add)
    assert cut is not None
    return cut[1]


def explicit(parts: Sequence[int], num_layers: int, num_stages: int) -> list[int]:
    """A user's own list, checked."""
    origin = f"parallel.partition={list(parts)}"
    if len(parts) != num_stages:
        raise UserError(f"{origin}: {len(parts)} stages; parallel.pipeline={num_stages} needs {num_stages}")
    for stage, part in enumerate(parts):
        if part < 1:
            raise UserError(f"{origin}: stage {stage} has {part} layers; each needs at least 1")
    if sum(parts) != num_layers:
        raise UserError(f"{origin}: adds up to {sum(parts)} layers; the model has {num_layers}")
    return list(parts)


def by_function(path: str, names: Sequence[str], num_stages: int) -> list[int]:
    """Asks the user's function `package.module:function` for each layer's stage, by the layer's name."""
    _check_number(len(names), num_stages)
    origin = f"parallel.partition={path}"
    function = load_plugin(path, origin, "function")
    stages: list[int] = []
    for name in names:
        try:
            stage = function(name)
        except Exception as error:
            raise UserError(f"{origin}: layer {name}: {first_line(error)}") from error
        if not isinstance(stage, int) or isinstance(stage, bool):
            raise UserError(f"{origin}: layer {name}: returned {stage!r}; must be a stage's number")
        if not 0 <= stage < num_stages:
            raise UserError(f"{origin}: layer {name}: stage {stage}; must be 0 to {num_stages - 1}")
        stages.append(stage)
    if stages[0] != 0:
        raise UserError(f"{origin}: layer {names[0]}: stage {stages[0]}; the first layer must be on stage 0")
    for name, (before, stage) in zip(names[1:], pairwise(stages), strict=True):
        if stage not in (before, before + 1):
            allowed = f"{before} or {before + 1}" if before + 1 < num_stages else before
            raise UserError(f"{origin}: layer {name}: stage {stage} after {before}; must be {allowed}")
    if stages[-1] != num_stages - 1:
        raise UserError(f"{origin}: layer {names[-1]}: stage {stages[-1]}; the last must be on {num_stages - 1}")
    return [stages.count(stage) for stage in range(num_stages)]


def _check_number(num_layers: int, num_stages: int) -> None:
    if num_stages > num_layers:
        raise UserError(
            f"parallel.pipeline={num_stages}: more stages than the model's {num_layers} layers; at most {num_layers}"
        )


def _whole(costs: Sequence[float]) -> list[int]:
    """The costs in a unit that makes them whole numbers, so that no tie is decided by rounding."""
    exact = [Fraction(cost) for cost in costs]
    unit = math.lcm(*(cost.denominator for cost in exact))
    return [int(cost * unit) for cost in exact]


def _best_cut(
    num_layers: int, num_stages: int, price: Price, join: Callable[[float, float], float]
) -> tuple[float, list[int]] | None:
    """The lowest total and its partition, by dynamic programming from the last stage to the first."""
    best: dict[int, tuple[float, list[int]]] = {num_layers: (0, [])}  # by the first layer of the stages that are cut
    for stage in reversed(range(num_stages)):
        found: dict[int, tuple[float, list[int]]] = {}
        for start in range(stage, num_layers) if stage else [0]:
            for stop in range(start + 1, num_layers + 1):
                own = price(stage, start, stop) if stop in best else None
                if own is None:
                    continue
                total = join(own, best[stop][0])
                if start not in found or total <= found[start][0]:
                    found[start] = total, [stop - start, *best[stop][1]]
        best = found
    return best.get(0)


def _size(num_bytes: float) -> str:
    """Rounded up: less would not do."""
    return f"{math.ceil(num_bytes):,} bytes ({math.ceil(num_bytes / 2**30 * 100) / 100:.2f} GiB)"


# Of a GPU's memory: for the libraries, buffers for sending, what is held only for a moment, and gaps.
_RESERVE = 0.1

log = logging.getLogger("hvd_transformer")


def check_partition(config: Config) -> None:
    """Raises `UserError` where the model cannot be cut so. Needs no data and no model; one whose layers are not known
    without is checked later."""
    names = task_class(config).layer_names(config)
    if names is not None:
        given_partition(config, names)


def _counts(config: Config, task: Task, layout: ParallelMesh, measures: bool) -> list[int]:
    """Layers a stage. Rank 0 alone measures, as another rank would measure something else."""
    layers, num_stages = task.layers, config.parallel.pipeline
    given = given_partition(config, [layer.name for layer in layers])
    if given is not None or num_stages == 1 or not measures or not task.sampler.num_steps():  # in evaluation alone
        return given or uniform(len(layers), num_stages)
    items = next(iter(task.sampler.epoch())).accumulation[0]  # rank 0's first accumulation step is the largest
    batches = split_batch(task.batch(0, items), config.parallel.micro_batches)
    micro_batch, threads = task.micro_batch(batches[0]), worker_threads(num_stages)

    @contextmanager
    def context() -> Iterator[None]:
        with autocast(config.training.precision, layout.device), dropout_key(config.seed):
            yield

    def measure() -> list[LayerProfile]:
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
    config: Config, costs: Sequence[LayerProfile], num_micro_batches: int, device_bytes: int | None, dp: int
) -> list[int]:
    """Layers a stage such that the slowest stage is fastest, and each fits a device of this memory (None: no limit).

    `dp` replicas may share the optimizer.

    Raises `UserError` where nothing fits.
    """
    parallel, num_stages = config.parallel, config.parallel.pipeline
    seconds = [cost.seconds for cost in costs]
    if device_bytes is None:
        return balanced(seconds, num_stages)
    numbers = 1 + sum(copies_per_weight(config, dp))  # of each weight
    schedule = make_schedule(parallel.schedule, num_stages, num_micro_batches)

    weights = [0, *accumulate(cost.weights for cost in costs)]

    @cache
    def passes_from(start: int) -> list[dict[PassMode, PassMemory]]:
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

    return balanced(seconds, num_stages, need, (1 - _RESERVE) * device_bytes)


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
    even = uniform(len(names), num_stages)  # refuses more stages than layers
    if isinstance(wanted, list):
        return explicit(wanted, len(names), num_stages)
    if ":" in wanted:
        return list(_by_function(wanted, tuple(names), num_stages))
    return even if wanted == "uniform" else None


@cache
def _by_function(path: str, names: tuple[str, ...], num_stages: int) -> tuple[int, ...]:
    """The user's function is asked once, though the cut is checked before there is a model."""
    return tuple(by_function(path, names, num_stages))
