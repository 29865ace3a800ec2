"""Data: how fast token files are prepared, and how fast the sampler and the batches of a task are."""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from uuid import uuid4

import torch

from hvd_transformer.bench.timing import slowest
from hvd_transformer.bench.train import checked_mesh
from hvd_transformer.comm.horovod_env import usable_cores
from hvd_transformer.comm.process_map import process_map
from hvd_transformer.comm.world import World, agree
from hvd_transformer.config import Config
from hvd_transformer.config.mixture import origin
from hvd_transformer.data.build_once import ShouldStop
from hvd_transformer.data.prepared import PreparedData, PreparedExamples
from hvd_transformer.errors import UserError
from hvd_transformer.monitoring.heartbeat import Heartbeat
from hvd_transformer.tasks.registry import task_class
from hvd_transformer.tasks.task import Data, PrepareContext, Task
from hvd_transformer.training.job_setup import make_task
from hvd_transformer.training.process import StopRequest
from hvd_transformer.training.progress_rounds import agree_in_rounds


@dataclass(frozen=True)
class DataResult:
    """`num_tokens` of all splits were prepared in `prepare_seconds` by `workers` processes per host, each host all of
    them. `batches`, one per accumulation step, and their targets are per second, of all replicas together."""

    num_tokens: int | None  # None: a user's own task does not tell
    prepare_seconds: float
    workers: int
    batches: float
    targets: float
    unit: str  # of targets


def bench_data(config: Config, seconds: float, world: World, stop: StopRequest, heartbeat: Heartbeat) -> DataResult:
    """Prepare the data of `data.source` anew, then make batches for about `seconds`. Collective.

    Raises `UserError` on all ranks if the data cannot be used, `Stopped` if a rank is asked to stop.
    """
    data, _ = _prepare(config, world, stop)  # also fetches the source: training has it from now on
    with _empty_cache(config, world) as empty:
        _, own = _prepare(empty, world, stop)
    stop.end_at_once()
    mesh = checked_mesh(config, world)
    task = agree(world, lambda: _checked(make_task(config, data, mesh)))
    world.barrier()
    batches, targets = _rates(task, seconds, heartbeat)
    if mesh.tp_rank:  # the same batches as the first rank of the tensor group
        batches = targets = 0.0
    rates = world.all_reduce_(torch.tensor([batches, targets], dtype=torch.float64), "bench.batches").tolist()
    return DataResult(
        num_tokens=_num_tokens(data),
        prepare_seconds=slowest(world, [own])[0],
        workers=config.data.workers or usable_cores(),
        batches=rates[0],
        targets=rates[1],
        unit=task.unit,
    )


def _prepare(config: Config, world: World, stop: StopRequest) -> tuple[Data, float]:
    """The data, unless it is there, and the seconds of this rank. Collective."""

    def prepare(should_stop: ShouldStop) -> tuple[Data, float]:
        began = time.perf_counter()
        with process_map(config.data.workers) as mapper:
            data = task_class(config).prepare(config, PrepareContext(mapper, should_stop=should_stop))
        return data, time.perf_counter() - began

    return agree_in_rounds(prepare, world, stop)


@contextmanager
def _empty_cache(config: Config, world: World) -> Iterator[Config]:
    """A configuration whose cache, in `data.cache_dir`, has what was downloaded and no token files. Collective."""
    cache = Path(config.data.cache_dir).expanduser().absolute()
    folder = cache / world.broadcast_object(f".bench-data-{uuid4().hex[:12]}")

    def make() -> None:
        if world.local_rank != 0:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)  # hosts may share it
            for entry in cache.iterdir():
                if entry.is_dir() and entry.name not in ("prepared", folder.name):
                    with suppress(FileExistsError):
                        (folder / entry.name).symlink_to(entry)
        except OSError as error:
            raise UserError(f"data.cache_dir={config.data.cache_dir}: cannot be written: {error.strerror}") from None

    agree(world, make)
    data = config.data.model_copy(update={"cache_dir": str(folder)})
    try:
        yield config.model_copy(update={"data": data})
    finally:
        if world.local_rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _rates(task: Task, seconds: float, heartbeat: Heartbeat) -> tuple[float, float]:
    """Batches and targets per second of this rank, as a step takes them."""
    batches = targets = 0
    began = time.perf_counter()
    for epoch in count():
        for plan in task.sampler.epoch(None, epoch):
            for items in plan.accumulation:
                batch = task.batch(epoch, items)
                task.micro_batch(batch)
                batches, targets = batches + 1, targets + task.num_targets(batch)
            heartbeat.tick()
            passed = time.perf_counter() - began
            if passed >= seconds:
                return batches / passed, targets / passed
    raise AssertionError("epochs never end")


def _checked(task: Task) -> Task:
    if not task.sampler.num_steps():
        raise UserError(f"{origin(task.config.data)}: the training split is too small for one step")
    return task


def _num_tokens(data: Data) -> int | None:
    if isinstance(data, PreparedData):
        return sum(map(len, data.splits.values()))
    if isinstance(data, PreparedExamples):
        return sum(len(texts.tokens) for split in data.splits.values() for texts in split.texts.values())
    return None
