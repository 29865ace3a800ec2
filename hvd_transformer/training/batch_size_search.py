"""`training.batch_size=auto`: finds the largest batch size that fits on every rank, once per run.

On a GPU by trials, forward and backward on samples of the greatest length; on a CPU by the plan's estimate, as a host
without memory ends processes instead of telling them. Where trials would take collectives (tensor parallelism, a
sharded optimizer) a rank that runs out of memory would leave the others waiting: there, too, the estimate decides.
"""

import gc
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hvd_transformer.comm.world import World, agree
from hvd_transformer.config.batch_size import possible_batch_sizes, with_batch_size
from hvd_transformer.config.schema import Config, flatten
from hvd_transformer.errors import UserError
from hvd_transformer.monitoring.heartbeat import Heartbeat
from hvd_transformer.monitoring.host_usage import host_memory_left
from hvd_transformer.nn.contracts import MicroBatch
from hvd_transformer.parallel.engine import Engine
from hvd_transformer.parallel.mesh import ParallelMesh
from hvd_transformer.planning.batch_size_fit import fits_by_plan, largest_that_fits
from hvd_transformer.planning.memory_plan import vocabulary
from hvd_transformer.planning.memory_savings import with_value
from hvd_transformer.reporting.progress import ProgressDisplay
from hvd_transformer.tasks.registry import task_class
from hvd_transformer.tasks.task import Data, Task, largest_vocabulary
from hvd_transformer.training.job_setup import make_task
from hvd_transformer.training.out_of_memory import explain_out_of_memory, is_out_of_memory
from hvd_transformer.training.state import TrainState
from hvd_transformer.training.trainer import Trainer

log = logging.getLogger(__name__)

Fits = Callable[[int], bool]
Found = dict[str, Any]  # what the run directory keeps: the number, and what it was found for

_FREE = 0.05  # of a GPU's memory that a trial must leave: for what other ranks send, and the update
# Other keys do not change how much memory a batch takes.
_SECTIONS = ("model.", "data.", "parallel.", "optimizer.")
_KEYS = ("task", "training.precision", "training.compile", "training.device", "training.global_batch_size")


def settle_batch_size(
    config: Config,
    world: World,
    mesh: ParallelMesh,
    data: Data,
    kept: Found | None,
    of_epoch: int | None,
    progress: ProgressDisplay,
    heartbeat: Heartbeat,
) -> tuple[Config, Found | None]:
    """The configuration with a number for `training.batch_size`, and what to keep of it. Collective.

    `kept` is what the run directory has, on rank 0; it counts as long as devices and settings are the same. `of_epoch`,
    on rank 0, is the number that the epoch was begun with and must end with, wherever; None: it may end with another.
    """
    if config.training.batch_size != "auto":
        return config, None
    purpose = {"devices": world.all_gather_objects(_device_words(mesh)), "settings": _settings(config)}
    known = kept["batch_size"] if kept is not None and kept.get("found_for") == purpose else None
    size = world.broadcast_object(known if of_epoch is None else of_epoch)
    if size is None:
        sizes = agree(world, lambda: possible_batch_sizes(config, mesh.dp))
        first = with_batch_size(config, sizes[0])
        task = agree(world, lambda: make_task(first, data, mesh))
        agree(world, lambda: _check_known(first, task))
        with _fits(first, world, mesh, task, heartbeat) as fits:
            size = search(world, sizes, fits, heartbeat)
        del fits  # with the model of the trials, before the real one is built
        _free_memory()
        how = f"the largest of {sizes[0]} to {sizes[-1]} that fits on every rank"
    else:
        how = "found at an earlier start of this run"
    total = config.training.global_batch_size
    text = f"training.batch_size=auto: {size} samples of the {total} of a step at a time on each replica, {how}"
    log.info(text)
    progress.message(text)
    return with_batch_size(config, size), kept if of_epoch is not None else {"batch_size": size, "found_for": purpose}


def search(world: World, sizes: list[int], fits: Fits, heartbeat: Heartbeat) -> int:
    """The largest size that fits on all ranks. Collective. Raises `UserError` if there is none."""

    def on_all(size: int) -> bool:
        own = torch.tensor([int(agree(world, lambda: fits(size)))])
        heartbeat.tick()
        return bool(world.all_reduce_(own, "batch_size", "min").item())

    found = largest_that_fits(sizes, on_all)
    if found is None:
        raise UserError(
            f"training.batch_size=auto: not even {sizes[0]} samples at a time fit into the memory of every rank; "
            "`hvd-transformer plan` says what takes it"
        )
    return found


@contextmanager
def _fits(config: Config, world: World, mesh: ParallelMesh, task: Task, heartbeat: Heartbeat) -> Iterator[Fits]:
    """Whether a size fits on this rank, asked in the same order on all ranks. Collective."""
    if not _can_try(config, mesh):
        yield agree(world, lambda: by_plan(config, world, mesh, task))
        return
    with explain_out_of_memory(config, mesh, task, world, heartbeat):
        trainer = Trainer(config, world, mesh, task, TrainState(), draw=False)
    try:
        yield by_trial(trainer)
    finally:
        trainer.close()
        del trainer
        _free_memory()


def _can_try(config: Config, mesh: ParallelMesh) -> bool:
    """Whether a size is tried out: on a GPU, where that needs no other rank, and where later steps need no more memory,
    as the errors of a compression do that the first steps choose."""
    if config.communication.compression == "auto" and mesh.dp > 1:
        return False
    alone = mesh.tp == 1 and (mesh.dp == 1 or config.parallel.optimizer_shard == "none")
    return mesh.device.type != "cpu" and alone


def by_plan(config: Config, world: World, mesh: ParallelMesh, task: Task) -> Fits:
    """By the estimate, beside what the device has. Raises `UserError` if one of them is not known."""
    planned = with_value(config, "training.device", mesh.device.type)
    vocab_size, _ = vocabulary(config, largest_vocabulary(task))
    if mesh.device.type == "cpu":
        host = host_memory_left()
        if host is None:
            raise UserError("training.batch_size=auto: the memory of this host is not known; give a number")
        limit = host.available / world.local_size
    else:
        limit = min(torch.cuda.get_device_properties(device).total_memory for device in mesh.devices)
    return lambda size: fits_by_plan(planned, size, vocab_size, mesh.dp, limit)


def by_trial(trainer: Trainer) -> Fits:
    """By a forward and backward that sends nothing. The gradients are not those of any step afterwards."""

    def fits(size: int) -> bool:
        batches = longest_micro_batches(trainer.config, trainer.task, size)
        try:
            _try(trainer.engine, batches)
            return all(_leaves_enough(device) for device in set(trainer.mesh.devices))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return False
        finally:
            trainer.engine.grad_sync.begin_step()
            _free_memory()

    return fits


def longest_micro_batches(config: Config, task: Task, size: int) -> list[MicroBatch]:
    """An accumulation step of `size` samples of the greatest length. Raises `UserError` if the task has no `sketch`."""
    vocab_size, _ = vocabulary(config, largest_vocabulary(task))
    most = math.ceil(size / config.parallel.micro_batches)
    with FakeTensorMode():
        shaped = task_class(config).sketch(config, vocab_size, most).micro_batch
        shapes = [[(tensor.shape, tensor.dtype) for tensor in part] for part in (shaped.inputs, shaped.targets)]
    inputs, targets = (tuple(torch.ones(shape, dtype=dtype) for shape, dtype in part) for part in shapes)
    return [MicroBatch(inputs, targets, (0, number)) for number in range(math.ceil(size / most))]


def _try(engine: Engine, batches: list[MicroBatch]) -> None:
    pipeline = engine.pipeline
    grad_sync, pipeline.grad_sync = pipeline.grad_sync, None  # which would send full buffers
    try:
        engine.grad_sync.begin_step(len(batches))
        pipeline.forward_backward([batches], 1.0, lambda loss: None)
    finally:
        pipeline.grad_sync = grad_sync


def _leaves_enough(device: torch.device) -> bool:
    if device.type == "cpu":
        return True
    free, total = torch.cuda.mem_get_info(device)  # the allocator keeps what the trial had at its peak
    return free >= _FREE * total


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _check_known(config: Config, task: Task) -> None:
    try:
        longest_micro_batches(config, task, config.training.batch_samples)
    except UserError as error:
        raise UserError(f"training.batch_size=auto: {error}; give a number") from None


def _device_words(mesh: ParallelMesh) -> list[str]:
    if mesh.device.type == "cpu":
        host = host_memory_left()
        return [f"cpu, {host.total if host else 0} bytes"]
    found = map(torch.cuda.get_device_properties, mesh.devices)
    return [f"{device.name}, {device.total_memory} bytes" for device in found]


def _settings(config: Config) -> Mapping[str, Any]:
    return {key: value for key, value in flatten(config).items() if key.startswith(_SECTIONS) or key in _KEYS}
