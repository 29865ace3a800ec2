"""Partitions a model's layers into pipeline stages."""

import logging
import math
import operator
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache, partial
from itertools import accumulate, pairwise

import torch

from hvd_transformer.comm.world import World, agree
from hvd_transformer.config.schema import Config
from hvd_transformer.errors import UserError
from hvd_transformer.gradients.optimizer import copies_per_weight
from hvd_transformer.parallel.mesh import ParallelMesh
from hvd_transformer.parallel.pipeline import layer_context, worker_threads
from hvd_transformer.parallel.pipeline_schedule import make_schedule
from hvd_transformer.planning import profile_cache
from hvd_transformer.planning.layer_profile import LayerProfile, measure_layers
from hvd_transformer.planning.pass_memory import PassMemory, PassMode, join_passes, stage_activations
from hvd_transformer.plugin import first_line, load_plugin
from hvd_transformer.tasks.registry import task_class
from hvd_transformer.tasks.task import Task, split_batch

log = logging.getLogger("hvd_transformer")

# The fraction of a device's memory left for libraries, send buffers, short-lived tensors and fragmentation.
DEVICE_RESERVE = 0.1

# The cost of a stage from (stage, first layer, last layer exclusive); None if the stage is not allowed.
CostOfStage = Callable[[int, int, int], float | None]


def uniform(num_layers: int, num_stages: int) -> list[int]:
    """Layers per stage, as even as possible. The first stages get the remainder: the last has the heavy output layer.

    Raises `UserError` if there are more stages than layers.
    """
    if num_stages > num_layers:
        raise UserError(
            f"parallel.pipeline={num_stages}: more stages than the model's {num_layers} layers; at most {num_layers}"
        )
    share, rest = divmod(num_layers, num_stages)
    return [share + (stage < rest) for stage in range(num_stages)]


def balanced(
    costs: Sequence[float],
    num_stages: int,
    stage_bytes: Callable[[int, int, int], float] = lambda stage, start, stop: 0,
    limit: float = math.inf,
) -> list[int]:
    """Layers per stage such that the costliest stage costs least; `num_stages` is at most the number of layers.

    Ties are broken by the smallest sum of squared stage costs, then by more layers in earlier stages.

    `stage_bytes(stage, start, stop)` is the memory of a stage with the layers [start, stop), which must not exceed
    `limit`. Raises `UserError` if no partition fits.
    """
    num_layers = len(costs)
    exact = [Fraction(cost) for cost in costs]
    unit = math.lcm(*(cost.denominator for cost in exact))
    work = [0, *accumulate(int(cost * unit) for cost in exact)]  # integers: rounding decides no tie

    def cost(stage: int, start: int, stop: int) -> int | None:
        return work[stop] - work[start] if stage_bytes(stage, start, stop) <= limit else None

    best = _search(num_layers, num_stages, cost, max)
    if best is None:
        smallest = _search(num_layers, num_stages, stage_bytes, max)
        assert smallest is not None
        raise UserError(
            f"parallel.partition=auto: no partition into {num_stages} stages fits into {_size(limit)} per stage; "
            f"needs at least {_size(smallest[0])}"
        )
    largest = best[0]

    def squared(stage: int, start: int, stop: int) -> int | None:
        own = cost(stage, start, stop)
        return own**2 if own is not None and own <= largest else None

    # A second search: in a single one, the best last stages would depend on the cost of the first ones.
    best = _search(num_layers, num_stages, squared, operator.add)
    assert best is not None
    return best[1]


def explicit(parts: Sequence[int], num_layers: int, num_stages: int) -> list[int]:
    """Layers per stage as listed by the user. Raises `UserError` if they do not fit the model or the pipeline."""
    origin = f"parallel.partition={list(parts)}"
    if len(parts) != num_stages:
        raise UserError(f"{origin}: {len(parts)} stages; parallel.pipeline={num_stages} needs {num_stages}")
    for stage, part in enumerate(parts):
        if part < 1:
            raise UserError(f"{origin}: stage {stage} has {part} layers; each needs at least 1")
    if sum(parts) != num_layers:
        raise UserError(f"{origin}: adds up to {sum(parts)} layers; the model has {num_layers}")
    return list(parts)


@cache  # the user's function is called once, though the partition is checked before it is used
def by_function(path: str, names: tuple[str, ...], num_stages: int) -> tuple[int, ...]:
    """Layers per stage from the user's function `package.module:function`, which maps a layer's name to its stage.

    Raises `UserError` if it fails or its stages are not consecutive.
    """
    origin = f"parallel.partition={path}"
    function = load_plugin(path, origin, "function")
    stages: list[int] = []
    for name in names:
        try:
            stage = function(name)
        except Exception as error:
            raise UserError(f"{origin}: layer {name}: {first_line(error)}") from error
        if not isinstance(stage, int) or isinstance(stage, bool):
            raise UserError(f"{origin}: layer {name}: returned {stage!r}; must be a stage number")
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
        raise UserError(
            f"{origin}: layer {names[-1]}: stage {stages[-1]}; the last layer must be on stage {num_stages - 1}"
        )
    return tuple(stages.count(stage) for stage in range(num_stages))


def _search(
    num_layers: int, num_stages: int, cost: CostOfStage, combine: Callable[[float, float], float]
) -> tuple[float, list[int]] | None:
    """The lowest combined cost and its partition, by dynamic programming from the last stage to the first."""
    # The best partition of the layers [start, num_layers) into the stages done so far, by `start`.
    best: dict[int, tuple[float, list[int]]] = {num_layers: (0, [])}
    for stage in reversed(range(num_stages)):
        found: dict[int, tuple[float, list[int]]] = {}
        for start in range(stage, num_layers) if stage else [0]:
            for stop in range(start + 1, num_layers + 1):
                own = cost(stage, start, stop) if stop in best else None
                if own is None:
                    continue
                total = combine(own, best[stop][0])
                if start not in found or total <= found[start][0]:
                    found[start] = total, [stop - start, *best[stop][1]]
        best = found
    return best.get(0)


def _size(num_bytes: float) -> str:
    """Rounded up, so that it is enough."""
    return f"{math.ceil(num_bytes):,} bytes ({math.ceil(num_bytes / 2**30 * 100) / 100:.2f} GiB)"


def check_partition(config: Config) -> None:
    """Raise `UserError` if the model cannot be partitioned as configured.

    Needs neither data nor a model. If the layers are not known without the model, it is checked when it exists.
    """
    names = task_class(config).layer_names(config)
    if names is not None:
        given_partition(config, names)


def choose_partition(config: Config, task: Task, mesh: ParallelMesh, world: World) -> list[int]:
    """Layers per stage, the same on all ranks. Collective. Raises `UserError` on all ranks if one fails."""
    own = agree(world, lambda: _own_partition(config, task, mesh, world.rank == 0))
    chosen: list[int] = world.broadcast_object(own)
    return chosen


def _own_partition(config: Config, task: Task, mesh: ParallelMesh, measures: bool) -> list[int]:
    """This rank's choice. Only rank 0 measures: times differ between ranks."""
    layers, num_stages = task.layers, config.parallel.pipeline
    given = given_partition(config, [layer.name for layer in layers])
    if given is not None or num_stages == 1 or not measures or not task.sampler.num_steps():  # evaluation has no steps
        return given or uniform(len(layers), num_stages)
    plan = next(iter(task.sampler.epoch()))  # no rank has a larger accumulation step than rank 0's first
    batches = split_batch(task.batch(0, plan.accumulation[0]), config.parallel.micro_batches)
    micro_batch, threads = task.micro_batch(batches[0]), worker_threads(num_stages)
    recompute = config.parallel.recompute
    recomputes = recompute == "always" or (recompute == "except_last" and len(batches) > 1)
    file = profile_cache.file_for(config, layers, micro_batch, mesh.device, threads, recomputes)
    profiles, origin = profile_cache.read(file, len(layers)), "cached"
    if profiles is None:
        origin = "measured now"
        context = partial(layer_context, config.training.precision, mesh.device, (config.seed,))
        profiles = measure_layers(
            layers, micro_batch, mesh.device, context=context, recompute=recomputes, threads=threads
        )
        profile_cache.write(file, profiles)
    device_bytes = None  # CPU stages share the host's memory, whatever the partition
    if mesh.device.type == "cuda":
        device_bytes = min(torch.cuda.get_device_properties(device).total_memory for device in mesh.devices)
    partition = best_partition(config, profiles, len(batches), device_bytes, mesh.dp)
    milliseconds = 1000 * sum(profile.seconds for profile in profiles)
    log.info("partition %s: all layers take %.1f ms per micro-batch, %s", partition, milliseconds, origin)
    return partition


def best_partition(
    config: Config, profiles: Sequence[LayerProfile], num_micro_batches: int, device_bytes: int | None, dp: int
) -> list[int]:
    """Layers per stage such that the slowest stage is as fast as possible and every stage fits its device.

    `device_bytes` is the memory of a device (None: no limit) and `dp` the number of replicas, which may shard the
    optimizer. Raises `UserError` if no partition fits.
    """
    parallel, num_stages = config.parallel, config.parallel.pipeline
    seconds = [profile.seconds for profile in profiles]
    if device_bytes is None:
        return balanced(seconds, num_stages)
    of_gradients, of_optimizer = copies_per_weight(config, dp)
    _, of_muon = copies_per_weight(config, dp, by_muon=True)
    schedule = make_schedule(parallel.schedule, num_stages, num_micro_batches)

    def fixed_bytes(profile: LayerProfile) -> float:
        """Weights, gradients and optimizer state."""
        by_muon = profile.hidden if config.optimizer.name == "muon" else 0
        shadow = profile.shadow if config.training.precision in ("bf16", "fp16") else 0
        state = of_optimizer * (profile.weights - by_muon) + of_muon * by_muon
        return (1 + of_gradients) * profile.weights + state + shadow

    fixed = [0.0, *accumulate(map(fixed_bytes, profiles))]

    @cache
    def passes_from(start: int) -> list[dict[PassMode, PassMemory]]:
        """The memory of the layers [start, start + 1), [start, start + 2), and so on."""
        passes = (profile.passes for profile in profiles[start:])
        return list(
            accumulate(passes, lambda first, second: {mode: join_passes(first[mode], second[mode]) for mode in first})
        )

    @cache
    def stage_bytes(stage: int, start: int, stop: int) -> int:
        passes = passes_from(start)[stop - start - 1]
        activations = stage_activations(schedule[stage], stage, parallel.recompute, passes)
        return round(fixed[stop] - fixed[start]) + activations

    return balanced(seconds, num_stages, stage_bytes, (1 - DEVICE_RESERVE) * device_bytes)


def given_partition(config: Config, names: Sequence[str]) -> list[int] | None:
    """Layers per stage as `parallel.partition` defines them; None for "auto".

    Raises `UserError` if the layers with these names cannot be partitioned so.
    """
    wanted, num_stages = config.parallel.partition, config.parallel.pipeline
    even = uniform(len(names), num_stages)  # also checks that there are enough layers
    if isinstance(wanted, list):
        return explicit(wanted, len(names), num_stages)
    if ":" in wanted:
        return list(by_function(wanted, tuple(names), num_stages))
    return even if wanted == "uniform" else None
