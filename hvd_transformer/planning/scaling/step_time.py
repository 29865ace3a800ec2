"""The time of one training step of a layout, and what it is made of.

Each rank's step takes the same time but for jitter, and the slowest rank decides.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import NormalDist

from hvd_transformer.config.schema import Config
from hvd_transformer.parallel.pipeline_schedule import make_schedule
from hvd_transformer.planning.partition import balanced
from hvd_transformer.planning.scaling.collectives import Seconds, added
from hvd_transformer.planning.scaling.layer_times import LayerTime, layer_times
from hvd_transformer.planning.scaling.layer_work import LayerWork, ModelWork
from hvd_transformer.planning.scaling.layout import Layout, Machine
from hvd_transformer.planning.scaling.replay import replay
from hvd_transformer.planning.scaling.step_messages import StepMessages
from hvd_transformer.planning.schedule_drawing import makespan, simulate

# Per parameter: clipping reads and writes a gradient, adamw reads four float32 numbers and writes three.
_OPTIMIZER_BYTES = 36
_MOSTLY = 0.9


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, and what they are made of."""

    compute: float  # of one device, if all had the same work and were always busy
    bubble: float  # the pipeline's, with the imbalance of its stages
    sums: Seconds  # of tensor parallelism, as far as backward does not hide them
    exposed: float  # waiting for gradients and parameters, and what messages take from computing
    messages: Seconds  # of all gradients and parameters, hidden or not
    update: float  # norm and optimizer
    jitter: float  # waiting for the slowest rank
    stages: Sequence[tuple[int, int]]  # the layers [start, stop) of each pipeline stage

    @property
    def total(self) -> float:
        return self.compute + self.bubble + self.sums.total + self.exposed + self.update + self.jitter

    @property
    def bound(self) -> str:
        """ "compute" if computing takes nine tenths of the step, otherwise what takes most of the rest."""
        if self.compute + self.update >= _MOSTLY * self.total:
            return "compute"
        of_latency = self.messages.latency / self.messages.total if self.messages.total else 0.0
        losses = {
            "bandwidth": self.sums.transfer + self.exposed * (1 - of_latency),
            "latency": self.sums.latency + self.exposed * of_latency,
            "bubble": self.bubble,
            "jitter": self.jitter,
        }
        return max(losses, key=lambda loss: losses[loss])


def step_time(work: ModelWork, config: Config, layout: Layout, machine: Machine) -> StepTime:
    """The time of one step. Raises `UserError` if the constants lack a link or the precision."""
    constants, layers = machine.constants, work.at(layout.tp, layout.micro_batch_size)
    times = layer_times(work, config, layout, machine)
    stages = _stages(times, layout.pp)
    sums = added(time.sums for time in times).times(layout.passes / layout.pp)
    compute = layout.passes * sum(time.both for time in times) / layout.pp - sums.total
    span = layout.accumulation * _makespan(times, stages, config, layout)
    tokens = layout.passes * layout.micro_batch_size * work.tokens
    steps = StepMessages(layers, stages, tokens, config, layout, machine).steps(times, span)
    played = replay(steps)
    return StepTime(
        compute=compute + constants.step_seconds,
        bubble=max(0.0, span - compute - sums.total),
        sums=sums,
        exposed=max(0.0, played.end - played.work),
        messages=added(message for step in steps for message in step.sends),
        update=_update(layers, stages, config, layout, machine),
        jitter=(compute + constants.step_seconds) * constants.jitter * slowest_of(layout.dp * layout.tp),
        stages=stages,
    )


def slowest_of(count: int) -> float:
    """The expected largest of `count` standard normal numbers: the quantile of (n - 3/8) / (n + 1/4).

    Blom 1958, "Statistical Estimates and Transformed Beta-Variables", section 6.9.
    """
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0


def _stages(times: Sequence[LayerTime], num_stages: int) -> list[tuple[int, int]]:
    """The layers [start, stop) of each stage such that the slowest stage is as fast as possible."""
    if num_stages == 1:
        return [(0, len(times))]
    return list(pairwise(accumulate(balanced([time.both for time in times], num_stages), initial=0)))


def _makespan(times: Sequence[LayerTime], stages: Sequence[tuple[int, int]], config: Config, layout: Layout) -> float:
    """Seconds of one accumulation step, from the first forward to the last backward."""
    if layout.pp == 1:
        return layout.micro_batches * sum(time.both for time in times)
    schedule = make_schedule(config.parallel.schedule, layout.pp, layout.micro_batches)
    forward = [sum(time.forward for time in times[start:stop]) for start, stop in stages]
    backward = [sum(time.backward for time in times[start:stop]) for start, stop in stages]
    deferred = [sum(time.deferred for time in times[start:stop]) for start, stop in stages]
    return makespan(simulate(schedule, forward, backward, deferred))


def _update(
    layers: Sequence[LayerWork], stages: Sequence[tuple[int, int]], config: Config, layout: Layout, machine: Machine
) -> float:
    """Seconds of the gradient's norm and of the update; stages update side by side, ZeRO's ranks their shard."""
    constants = machine.constants
    sharded = config.parallel.optimizer_shard != "none"
    per_parameter = constants.optimizer_seconds
    if per_parameter is None:
        per_parameter = _OPTIMIZER_BYTES / constants.memory_bandwidth
    parameters = max(sum(layer.parameters for layer in layers[start:stop]) for start, stop in stages)
    group = machine.world(layout) if sharded else machine.tensor_group(layout)
    norm = machine.seconds("all_reduce", group, 8).total
    return norm + machine.crowding(layout) * per_parameter * parameters / (layout.dp if sharded else 1)
