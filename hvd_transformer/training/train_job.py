"""Assembles a job from its configuration on every rank, and runs it."""

import logging
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from hvd_transformer.checkpoint import snapshot
from hvd_transformer.comm.world import World, agree
from hvd_transformer.config import Config
from hvd_transformer.config.batch_size import check_step_size
from hvd_transformer.errors import UserError
from hvd_transformer.monitoring.heartbeat import Heartbeat
from hvd_transformer.monitoring.watchdog import Watchdog
from hvd_transformer.parallel.mesh import ParallelMesh
from hvd_transformer.parallel.replica_check import broadcast_parameters
from hvd_transformer.planning.partition import check_partition
from hvd_transformer.reporting.progress import Progress, Silent, screen
from hvd_transformer.tasks.metrics import show_metrics
from hvd_transformer.tasks.task import Data, Task
from hvd_transformer.training.job_setup import check_same_data, compile_layers, make_task, prepare_data
from hvd_transformer.training.process import StopRequest, keep_freed_memory
from hvd_transformer.training.run_directory import RunDirectory
from hvd_transformer.training.session import Session
from hvd_transformer.training.trainer import Trainer

log = logging.getLogger("hvd_transformer")


def run(config: Config, world: World, stop: StopRequest, watchdog: Watchdog | None = None) -> dict[str, Any]:
    """Trains; returns the summary, whose `status` is "finished" or "stopped". Collective.

    `watchdog` is told what this rank is doing. Raises `UserError` (on every rank) before training starts where the
    input is wrong.
    """
    keep_freed_memory()
    watchdog = watchdog or Watchdog(world.rank, world.size)
    heartbeat = watchdog.heartbeat
    heartbeat.world = world
    progress = Progress(*screen()) if world.rank == 0 else Silent()
    layout = agree(world, lambda: ParallelMesh.of(config, world))
    agree(world, lambda: check_partition(config))
    agree(world, lambda: check_step_size(config, layout.dp))
    directory = RunDirectory(config)
    checkpoint = agree(world, lambda: directory.claim(config, progress.message) if world.rank == 0 else None)
    _log_to(directory.path / "logs" / f"rank-{world.rank:03d}.log")
    try:
        data, trainer = _assemble(config, world, layout, checkpoint, progress, stop, heartbeat)
        agree(world, lambda: directory.begin(config, world.rank))
    except BaseException:
        directory.abandon()
        raise
    watchdog.use(directory.path / "logs", world.hosts)
    heartbeat.timeline = trainer.timeline
    log.info("rank %d of %d (%s) on %s, %s", world.rank, world.size, world.backend, world.host, layout.device)
    trainer.check_replicas("at the start")

    position = trainer.position
    progress.message(_headline(config, world, trainer))
    if warning := layout.across_hosts(config, world):
        progress.message(f"warning: {warning}")
    if checkpoint is not None:
        progress.message(f"going on from {checkpoint} after step {position.step} of {trainer.total_steps}")
    session = Session(config, world, trainer, directory, progress, data.digest, heartbeat)
    status = session.train(stop)
    if status == "stopped":  # said first: a launcher may not wait for what follows
        progress.message(
            f"stopped after step {position.step} ({stop.signal or 'asked on another rank'}); everything is saved: "
            f"the same command goes on from here\nrun directory: {directory.path}"
        )
    heartbeat.enter("end")
    trainer.check_replicas("at the end")
    summary = session.finish(status)
    trainer.close()
    if status == "finished":
        progress.message("\n".join([_results(summary), *trainer.task.notes, f"run directory: {directory.path}"]))
    return summary


def _assemble(
    config: Config,
    world: World,
    layout: ParallelMesh,
    checkpoint: Path | None,
    progress: Silent,
    stop: StopRequest,
    heartbeat: Heartbeat,
) -> tuple[Data, Trainer]:
    """The data, and a trainer with the first weights or the checkpoint's: all that wrong input can make fail."""

    def should_stop() -> bool:
        heartbeat.mark()  # also of a rank that waits while another one prepares
        return bool(stop)

    data = agree(world, lambda: prepare_data(config, progress, should_stop))
    agree(world, lambda: check_same_data(data, world))
    position, state = snapshot.read_position(checkpoint, data.digest, world)
    position.choose_best_by(config.training.best_metric)
    task = agree(world, lambda: _make_task(config, data, layout))
    trainer = Trainer(config, world, layout, task, position)
    if state is None:
        broadcast_parameters(trainer.buckets, layout.data_group)
    else:
        snapshot.restore(trainer, checkpoint, state)
    compile_layers(config, task)
    return data, trainer


class _LogFile(logging.FileHandler):
    """Makes its folder with the first line: a start that is refused has none."""

    def _open(self) -> TextIOWrapper:
        Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
        return super()._open()


def _log_to(file: Path) -> None:
    """Each rank's own log; the screen is rank 0's progress alone."""
    handler = _LogFile(file, encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.handlers = [handler]
    log.setLevel(logging.INFO)
    log.propagate = False


def _make_task(config: Config, data: Data, layout: ParallelMesh) -> Task:
    task = make_task(config, data, layout)
    best, names = config.training.best_metric, task.metric_names
    if best.removeprefix("-") not in names:
        raise UserError(f"training.best_metric={best}: no such metric of this task; it has {', '.join(names)}")
    return task


def _headline(config: Config, world: World, trainer: Trainer) -> str:
    ranks = "1 rank" if world.size == 1 else f"{world.size} ranks over {world.backend}"
    return (
        f"{config.task}: {trainer.num_parameters:,} parameters on {ranks} ({trainer.layout.device.type})\n"
        f"{config.data.source}: {trainer.task.describe()}; "
        f"{trainer.total_steps:,} steps of {trainer.task.targets_per_step:,} {trainer.task.unit}"
    )


def _results(summary: dict[str, Any]) -> str:
    valid, test = (show_metrics(split, summary) for split in ("valid", "test"))
    return f"done: {valid} (best, at step {summary['best_step']})" + (f"; {test}" if test else "")
