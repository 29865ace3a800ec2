"""Checkpoints: how long training waits for one, how long it is written in the background, how long it is read."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TypeVar

from hvd_transformer.bench.timing import slowest
from hvd_transformer.bench.train import trainer_of
from hvd_transformer.checkpoint.store import CheckpointStore, read_state
from hvd_transformer.checkpoint.writer import Saver
from hvd_transformer.comm.world import World, agree
from hvd_transformer.config import Config
from hvd_transformer.errors import UserError
from hvd_transformer.monitoring.heartbeat import Heartbeat
from hvd_transformer.training.process import StopRequest, tune_memory
from hvd_transformer.training.trainer import Trainer

_LEAST, _MOST = 2, 20  # checkpoints
Result = TypeVar("Result")


@dataclass(frozen=True)
class CheckpointResult:
    """Seconds are medians over the repeats of the slowest rank. `stall`: training waits; `save`: until all is on disk,
    the stall included."""

    num_parameters: int
    num_bytes: int  # of a checkpoint
    repeats: int
    stall: float
    save: float
    load: float


def bench_checkpoint(
    config: Config,
    vocab_size: int,
    folder: Path,
    seconds: float,
    world: World,
    stop: StopRequest,
    heartbeat: Heartbeat,
) -> CheckpointResult:
    """Save and load for about `seconds` each, in a temporary folder in rank 0's `folder`. Collective.

    Raises `UserError` on all ranks if the folder cannot be written, the job cannot run as configured, or a rank is
    asked to stop.
    """
    tune_memory()
    with trainer_of(config, vocab_size, world, heartbeat) as trainer, _temporary(folder, world) as place:
        trainer.step(next(trainer.task.sampler.epoch()))  # the optimizer has a state from here on
        store = CheckpointStore(place, keep_last=1)
        failures: list[str] = []
        saver = Saver(store, world, failures.append)

        def save() -> tuple[float, float]:
            world.barrier()
            began = time.perf_counter()
            stall = _start_save(trainer, saver, began)
            saver.wait()
            agree(world, lambda: _check(folder, failures, stop))
            return stall, time.perf_counter() - began

        def load() -> float:
            if world.local_rank == 0:
                _drop_cached(place)
            world.barrier()
            began = time.perf_counter()
            newest = store.steps()[-1] if world.rank == 0 else None
            state = world.broadcast_object(read_state(newest) if newest is not None else None)
            trainer.restore(newest, state)
            seconds = time.perf_counter() - began
            agree(world, lambda: _check(folder, failures, stop))
            return seconds

        save()  # allocates the memory of the copy
        saves = _repeated(world, seconds, save)
        loads = _repeated(world, seconds, load)
        saver.close()
        return CheckpointResult(
            num_parameters=trainer.engine.num_parameters,
            num_bytes=world.broadcast_object(_num_bytes(store.steps()[-1]) if world.rank == 0 else None),
            repeats=len(saves),
            stall=median(slowest(world, [stall for stall, _ in saves])),
            save=median(slowest(world, [total for _, total in saves])),
            load=median(slowest(world, loads)),
        )


def _start_save(trainer: Trainer, saver: Saver, began: float) -> float:
    """Do what training waits for (`Session.save`); return its seconds. Collective."""
    step = trainer.state.step
    trainer.synchronize()
    checksum = trainer.engine.check_replicas(f"step {step}")
    begun = saver.begin(step)
    if begun is not None:
        saver.save(trainer.capture("none", checksum, False, begun), begun)
    return time.perf_counter() - began


def _repeated(world: World, seconds: float, action: Callable[[], Result]) -> list[Result]:
    """The results of as many calls as fit into the time, equally many on all ranks. Collective."""
    began = time.perf_counter()
    results = [action()]
    estimate = slowest(world, [time.perf_counter() - began])[0]
    count = min(max(int(seconds / estimate), _LEAST), _MOST)
    return results + [action() for _ in range(count - 1)]


@contextmanager
def _temporary(folder: Path, world: World) -> Iterator[Path]:
    """A new folder in rank 0's `folder`, removed at the end. Raises `UserError` on all ranks."""

    def make() -> str | None:
        try:
            return tempfile.mkdtemp(prefix=".bench-checkpoint-", dir=folder.absolute()) if world.rank == 0 else None
        except OSError as error:
            raise UserError(f"--folder {folder}: cannot be written: {error.strerror}") from None

    place = Path(world.broadcast_object(agree(world, make))).absolute()
    try:
        yield place
    finally:
        if world.rank == 0:
            shutil.rmtree(place, ignore_errors=True)


def _check(folder: Path, failures: list[str], stop: StopRequest) -> None:
    if stop:
        raise UserError(f"bench checkpoint: stopped by {stop.signal}")
    if failures:
        raise UserError(f"--folder {folder}: {failures[0]}")


def _num_bytes(checkpoint: Path) -> int:
    return sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())


def _drop_cached(folder: Path) -> None:
    """Let the kernel forget the files, so that they are read from the disk; it may keep them."""
    for file in folder.rglob("*"):
        with suppress(OSError), file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
