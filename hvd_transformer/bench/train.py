"""Training on random tokens: tokens per second, model FLOPs utilization (MFU), and where a step's time goes.

Ranks first train alone, without any communication, then together as configured:

    alone      the first rank of each host, also in smaller         training fraction,
               micro-batches                                        seconds of a layer whatever its size
               all ranks at once                                    crowding, jitter
    together   all ranks                                            tokens per second, MFU, parts of a step

The steps of "alone" take turns, so that what slows the machine down for a while slows all of them alike.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import torch

from hvd_transformer.bench.synthetic_task import SyntheticTask, samples_per_step
from hvd_transformer.bench.timing import (
    call_seconds,
    mean_over_ranks,
    rank_jitter,
    relative_deviation,
    repeats,
    slowest,
    warm_up,
)
from hvd_transformer.comm.streams import has_streams
from hvd_transformer.comm.world import World, agree
from hvd_transformer.config import Config
from hvd_transformer.config.batch_size import check_step_size
from hvd_transformer.data.sampler import Replica
from hvd_transformer.errors import UserError
from hvd_transformer.monitoring.heartbeat import Heartbeat
from hvd_transformer.parallel.mesh import ParallelMesh
from hvd_transformer.planning.memory_plan import batch_samples
from hvd_transformer.planning.model_costs import fake_model, layer_costs
from hvd_transformer.planning.partition import check_partition
from hvd_transformer.tasks.registry import task_class
from hvd_transformer.training.determinism import choose_kernels
from hvd_transformer.training.job_setup import compile_layers, initial_weights
from hvd_transformer.training.out_of_memory import OutOfMemory, is_out_of_memory
from hvd_transformer.training.process import only_new_garbage, tune_memory
from hvd_transformer.training.state import StepResult, TrainState
from hvd_transformer.training.trainer import Trainer

# Random tokens teach nothing: a low rate keeps the loss finite.
_LEARNING_RATE = 1e-6
# The micro-batches that one is cut into, at most: enough of them to see what each costs.
_MAX_PIECES = 8


class StepTimes(NamedTuple):
    """Seconds of one step on one rank."""

    total: float
    compute: float  # forward and backward
    wait: float  # for communication
    update: float  # norm, clip and optimizer
    data: float

    @property
    def work(self) -> float:
        return self.total - self.wait


class Alone(NamedTuple):
    """Training without communication. `first`: the steps of this rank while the others wait; None: it waits."""

    first: list[StepTimes] | None
    together: float  # seconds of a step while all ranks compute: the mean over the ranks
    jitter: float  # standard deviation of a rank's step / its mean
    pieces: list[StepTimes] | None = None  # like `first`, in smaller micro-batches; None: not measured


@dataclass(frozen=True)
class TrainResult:
    """Times are in seconds. `step` is the median over the steps of the slowest rank; `parts` are the means over the
    ranks of each one's median."""

    num_parameters: int
    world: World
    mesh: ParallelMesh
    num_layers: int
    unit: str  # of targets
    targets_per_step: int
    num_steps: int  # that were measured
    step: float
    parts: StepTimes
    alone: Alone | None  # None: with tensor parallelism, where no rank can train alone
    flops: float  # of a step of one rank, without recomputing; 0 on all but rank 0

    @property
    def targets_per_second(self) -> float:
        return self.targets_per_step / self.step

    def utilization(self, rate: float) -> float:
        """Model FLOPs utilization (Chowdhery et al. 2022, arXiv 2204.02311, appendix B) of devices of `rate` FLOP/s."""
        return self.flops / self.step / (rate * len(self.mesh.devices))


def bench_train(config: Config, vocab_size: int, seconds: float, world: World, heartbeat: Heartbeat) -> TrainResult:
    """Train for about `seconds`, after about as long alone. Collective.

    Raises `UserError` on all ranks if the job cannot run as configured.
    """
    tune_memory()
    devices = checked_mesh(config, world).devices  # before a rank is on its own
    flops_per_sample = agree(world, lambda: _flops_per_sample(config, vocab_size) if world.rank == 0 else 0.0)
    alone = None
    if world.size > 1 and config.parallel.tensor == 1:
        with _memory_explained(world, "each rank first trains alone, with the gradients and the optimizer of all"):
            alone = _alone(config, vocab_size, seconds, world, devices, heartbeat)
    with _memory_explained(world), trainer_of(config, vocab_size, world, heartbeat) as trainer:
        mesh, configs = trainer.mesh, _with_pieces(trainer) if world.size == 1 else [trainer.config]
        steps, *pieces = _measure(trainer, configs, seconds, world)
        if world.size == 1:
            work = [step.work for step in steps]
            alone = Alone(steps, median(work), relative_deviation(work), *pieces)
        return TrainResult(
            num_parameters=trainer.engine.num_parameters,
            world=world,
            mesh=mesh,
            num_layers=len(trainer.task.layers),
            unit=task_class(config).unit,
            targets_per_step=trainer.task.targets_per_step,
            num_steps=len(steps),
            step=median(slowest(world, [step.total for step in steps])),
            parts=StepTimes(*(mean_over_ranks(world, median(own)) for own in zip(*steps, strict=True))),
            alone=alone,
            flops=flops_per_sample * samples_per_step(config, mesh.dp) / mesh.dp,
        )


def in_pieces(config: Config) -> Config:
    """With smaller micro-batches, if they can be smaller."""
    count = min(batch_samples(config), _MAX_PIECES * config.parallel.micro_batches)
    return config.model_copy(update={"parallel": config.parallel.model_copy(update={"micro_batches": count})})


@contextmanager
def trainer_of(
    config: Config,
    vocab_size: int,
    world: World,
    heartbeat: Heartbeat,
    devices: Sequence[torch.device] | None = None,
) -> Iterator[Trainer]:
    """A trainer on random tokens, on the `devices` of `checked_mesh`. Collective. Raises `UserError` on all ranks."""
    optimizer = config.optimizer.model_copy(update={"lr": _LEARNING_RATE})
    training = config.training.model_copy(update={"max_steps": None})
    config = config.model_copy(update={"optimizer": optimizer, "training": training})
    mesh = checked_mesh(config, world, devices)

    def make() -> SyntheticTask:
        with initial_weights(config):
            return SyntheticTask(config, vocab_size, Replica(mesh.dp_rank, mesh.dp))

    task = agree(world, make)
    trainer = Trainer(config, world, mesh, task, TrainState())
    if (why := compile_layers(config, task, mesh, world)) is not None:
        raise UserError(f"training.compile=true: {why}")
    heartbeat.timeline = trainer.engine.timeline
    heartbeat.backward_has_threads = has_streams(mesh.device)
    try:
        yield trainer
    finally:
        heartbeat.timeline = None
        trainer.close()


def checked_mesh(config: Config, world: World, devices: Sequence[torch.device] | None = None) -> ParallelMesh:
    """The mesh of the job, as of `ParallelMesh.of`. Collective.

    Raises `UserError` on all ranks if the job cannot run as configured.
    """
    agree(world, lambda: choose_kernels(config))
    mesh = agree(world, lambda: ParallelMesh.of(config, world, devices))
    agree(world, lambda: check_partition(config))
    agree(world, lambda: check_step_size(config, mesh.dp))
    return mesh


class _Steps:
    """The trainer's steps, one after the other."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._plans = trainer, trainer.task.sampler.epoch()

    def timed(self, config: Config) -> StepTimes:
        """One step with this configuration, which may have other micro-batches. Collective, as a step is."""
        trainer, results = self._trainer, list[StepResult]()
        trainer.config = config
        total = call_seconds(lambda: results.append(trainer.step(next(self._plans))), trainer.mesh.device)
        return _times(total, results[0], trainer.world.size)


def _measure(trainer: Trainer, configs: Sequence[Config], seconds: float, world: World) -> list[list[StepTimes]]:
    """The steps of all ranks with each configuration, in turn. Collective."""
    steps = _Steps(trainer)
    found: list[StepTimes] = []

    def turn() -> None:
        found.extend([steps.timed(config) for config in configs])

    with only_new_garbage():
        count = repeats(seconds, warm_up(world, turn, trainer.mesh.device))
        world.barrier()
        found.clear()
        for _ in range(count):
            turn()
    trainer.config = configs[0]
    return [found[place :: len(configs)] for place in range(len(configs))]


@contextmanager
def _memory_explained(world: World, what: str = "") -> Iterator[None]:
    """Turn an error for lack of memory into `OutOfMemory`, a line for the user."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        why = f"{what}; " if what else ""
        text = f"{world.link.who}: out of memory: {why}`hvd-transformer plan` says what takes it"
        raise OutOfMemory(text, has_stepped=False) from error


def _times(total: float, result: StepResult, num_ranks: int) -> StepTimes:
    """A GPU ends its step after `result.seconds`: with the update."""
    wait = result.seconds - result.work
    compute = result.work - result.data - result.update
    if num_ranks == 1:  # there is nobody to wait for; a GPU still computes
        compute, wait = compute + wait, 0.0
    return StepTimes(total, compute, wait, result.update + total - result.seconds, result.data)


def _alone(
    config: Config,
    vocab_size: int,
    seconds: float,
    world: World,
    devices: Sequence[torch.device],
    heartbeat: Heartbeat,
) -> Alone:
    """Each rank as a world of its own, with its share of the samples: one per host, and all at once. Collective."""
    own = World()
    samples = config.training.global_batch_size
    share = None if samples is None else math.ceil(samples / world.size)
    config = config.model_copy(update={"training": config.training.model_copy(update={"global_batch_size": share})})
    with ExitStack() as stack:

        def enter() -> Trainer:
            try:
                return stack.enter_context(trainer_of(config, vocab_size, own, heartbeat, devices))
            except UserError as error:  # on which a world of its own has agreed
                raise UserError(str(error)) from None

        trainer = agree(world, enter)
        return _in_turn(trainer, _with_pieces(trainer), seconds, world)


def _in_turn(trainer: Trainer, configs: Sequence[Config], seconds: float, world: World) -> Alone:
    """A step of the first rank of each host with each configuration, then one of all ranks at once, and again.

    Collective over `world`; the trainer is in a world of its own.
    """
    steps = _Steps(trainer)
    own: list[StepTimes] = []  # while the other ranks of its host wait
    together: list[StepTimes] = []

    def turn() -> None:
        if world.local_rank == 0:
            own.extend([steps.timed(config) for config in configs])
        world.barrier()
        together.append(steps.timed(configs[0]))
        world.barrier()

    with only_new_garbage():
        count = repeats(seconds, warm_up(world, turn, trainer.mesh.device))
        own.clear()
        together.clear()
        for _ in range(count):
            turn()
    first, *pieces = [own[place :: len(configs)] for place in range(len(configs))]
    work = [step.work for step in together]
    return Alone(first or None, mean_over_ranks(world, median(work)), rank_jitter(world, work), *pieces)


def _with_pieces(trainer: Trainer) -> list[Config]:
    """The configuration, and with smaller micro-batches if they can be smaller. Not with a pipeline or on a GPU, which
    computes while Python goes ahead: both hide what a micro-batch costs."""
    config, smaller = trainer.config, in_pieces(trainer.config)
    hides = config.parallel.pipeline > 1 or trainer.mesh.device.type != "cpu"
    return [config] if hides or smaller == config else [config, smaller]


def _flops_per_sample(config: Config, vocab_size: int) -> float:
    """FLOPs of forward and backward on one rank, without recomputing."""
    num_samples = math.ceil(batch_samples(config) / config.parallel.micro_batches)
    with fake_model(config, vocab_size, num_samples) as model:
        return sum(layer.forward_flops + layer.backward_flops for layer in layer_costs(model)) / num_samples
