"""Searches the layouts of a number of devices: which fit, how fast each is, and which one to take."""

from collections.abc import Iterator
from dataclasses import dataclass

from hvd_transformer.config.batch_size import check_step_size
from hvd_transformer.config.schema import Config
from hvd_transformer.errors import UserError
from hvd_transformer.planning.memory_plan import batch_samples
from hvd_transformer.planning.partition import DEVICE_RESERVE
from hvd_transformer.planning.scaling.layer_work import ModelWork
from hvd_transformer.planning.scaling.layout import Layout, Machine
from hvd_transformer.planning.scaling.layout_memory import layout_memory
from hvd_transformer.planning.scaling.measure_work import can_split
from hvd_transformer.planning.scaling.step_time import StepTime, step_time

# Micro-batches per stage where the configuration has fewer: a bubble of a fifth at most.
_MICRO_BATCHES = 4


@dataclass(frozen=True)
class Candidate:
    """One layout of a number of devices."""

    layout: Layout
    global_batch: int  # samples
    time: StepTime
    tokens_per_second: float
    efficiency: float  # tokens per second of a device / those of one device alone without communication
    memory: int  # bytes, of the stage that needs most
    fits: bool


@dataclass(frozen=True)
class Scale:
    """The layouts of one number of devices, those that fit first, the fastest first."""

    devices: int
    candidates: list[Candidate]

    @property
    def best(self) -> Candidate | None:
        """The fastest layout that fits."""
        return next((candidate for candidate in self.candidates if candidate.fits), None)

    @property
    def bound(self) -> str:
        """What keeps the best layout from being faster: memory if only that rules a faster layout out."""
        fastest = max(self.candidates, key=lambda candidate: candidate.tokens_per_second, default=None)
        if self.best is None or fastest is None or not fastest.fits:
            return "memory"
        return self.best.time.bound


def search(work: ModelWork, config: Config, machine: Machine, devices: int, memory_bytes: float) -> Scale:
    """All layouts of `devices` devices with `memory_bytes` each. Raises `UserError` if the constants lack something."""
    alone = _tokens_per_second(work, config, _batched(config, 1, 1, 1), machine._replace(devices_per_host=1))
    found = []
    for layout in layouts(work, config, machine, devices):
        time = step_time(work, config, layout, machine)
        layers = work.at(layout.tp, layout.micro_batch_size)
        memory = max(layout_memory(layers, time.stages, config, layout, machine.device))
        rate = _samples(config, layout) * work.tokens / time.total
        found.append(
            Candidate(
                layout=layout,
                global_batch=_samples(config, layout),
                time=time,
                tokens_per_second=rate,
                efficiency=rate / devices / alone,
                memory=memory,
                fits=memory <= (1 - DEVICE_RESERVE) * memory_bytes,
            )
        )
    found.sort(key=lambda candidate: (not candidate.fits, -candidate.tokens_per_second))
    return Scale(devices, found)


def layouts(work: ModelWork, config: Config, machine: Machine, devices: int) -> Iterator[Layout]:
    """The layouts whose replicas each are on one host, as many on each host."""
    on_host = min(devices, machine.devices_per_host)
    for tp in _divisors(on_host):
        if tp > 1 and (work.split is None or not can_split(config, tp)):
            continue
        for pp in _divisors(on_host // tp):
            dp = devices // (tp * pp)
            if devices % (tp * pp) == 0 and pp <= len(work.whole) and _has_work(config, dp):
                yield _batched(config, dp, tp, pp)


def _has_work(config: Config, dp: int) -> bool:
    """Whether each of so many replicas has a part of a step, as training demands."""
    try:
        check_step_size(config, dp)
    except UserError:
        return False
    return True


def _batched(config: Config, dp: int, tp: int, pp: int) -> Layout:
    """With the micro-batches of the configuration; more of them if a pipeline would stand idle."""
    training = config.training
    samples, accumulation = batch_samples(config), training.accumulation
    if training.global_batch_size is not None:
        of_replica = -(-training.global_batch_size // dp)
        accumulation = -(-of_replica // samples)
        samples = -(-of_replica // accumulation)
    wanted = max(config.parallel.micro_batches, _MICRO_BATCHES * pp if pp > 1 else 1)
    size = -(-samples // min(wanted, samples))
    return Layout(dp, tp, pp, -(-samples // size), size, accumulation)


def _samples(config: Config, layout: Layout) -> int:
    """Samples per step over all replicas."""
    training = config.training
    return training.global_batch_size or batch_samples(config) * training.accumulation * layout.dp


def _tokens_per_second(work: ModelWork, config: Config, layout: Layout, machine: Machine) -> float:
    return _samples(config, layout) * work.tokens / step_time(work, config, layout, machine).total


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
