"""Assembles a training job from its configuration on every rank, and runs it."""

import logging
import sys
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from hvd_transformer.checkpoint.restore import read_checked
from hvd_transformer.checkpoint.shared_folder import with_verification
from hvd_transformer.comm.streams import has_streams
from hvd_transformer.comm.world import World, agree
from hvd_transformer.config import Config
from hvd_transformer.config.batch_size import check_step_size
from hvd_transformer.config.mixture import source_name
from hvd_transformer.data.prepared import left_out_lines
from hvd_transformer.errors import UserError
from hvd_transformer.monitoring.heartbeat import Heartbeat
from hvd_transformer.monitoring.watchdog import Watchdog
from hvd_transformer.own_folder import make_own_folder
from hvd_transformer.parallel.mesh import ParallelMesh
from hvd_transformer.parallel.replica_check import broadcast_parameters
from hvd_transformer.planning.device_peak import find_peak
from hvd_transformer.planning.partition import check_partition
from hvd_transformer.reporting.progress import Progress, ProgressDisplay, Silent, screen
from hvd_transformer.reporting.trackers.processes import Trackers
from hvd_transformer.tasks.metrics import show_metrics
from hvd_transformer.tasks.task import Data, Task
from hvd_transformer.training.batch_size_search import settle_batch_size
from hvd_transformer.training.determinism import choose_kernels
from hvd_transformer.training.job_setup import (
    check_same_data,
    compile_layers,
    limited_evaluation,
    make_task,
    prepare_data,
)
from hvd_transformer.training.lr_schedule import scaling_warning
from hvd_transformer.training.out_of_memory import explain_out_of_memory
from hvd_transformer.training.process import StopRequest, only_new_garbage, tune_memory
from hvd_transformer.training.run_directory import RunDirectory, epoch_batch_size
from hvd_transformer.training.run_environment import environment_lines, run_environment, slow_precision
from hvd_transformer.training.session import Session
from hvd_transformer.training.state import TrainState
from hvd_transformer.training.trainer import Trainer

log = logging.getLogger("hvd_transformer")


def run(config: Config, world: World, stop: StopRequest, watchdog: Watchdog | None = None) -> dict[str, Any]:
    """Train, and return the summary, whose `status` is "finished" or "stopped". Collective.

    `watchdog` learns what this rank is doing. Raises `UserError` on every rank, before training starts, if the input is
    wrong.
    """
    tune_memory()
    watchdog = watchdog or Watchdog(world.rank, world.size)
    heartbeat = watchdog.heartbeat
    heartbeat.link = world.link
    progress = Progress(*screen(world.size)) if world.rank == 0 else Silent()
    agree(world, lambda: choose_kernels(config))
    mesh = agree(world, lambda: ParallelMesh.of(config, world))
    agree(world, lambda: check_partition(config))
    agree(world, lambda: check_step_size(config, mesh.dp))
    directory = RunDirectory(config)
    checkpoint = agree(
        world, lambda: with_verification(world, lambda verify: directory.claim(config, progress.message, verify))
    )
    trackers = Trackers([])
    try:
        agree(world, lambda: directory.check_files(world.rank))
        _log_to(directory.path / "logs" / f"rank-{world.rank:03d}.log")
        trackers = agree(world, lambda: Trackers(config.tracking if world.rank == 0 else []))
        data = prepare_data(config, world, progress, stop)
        agree(world, lambda: check_same_data(data, world))
        kept = directory.batch_size() if world.rank == 0 else None
        is_auto = config.training.batch_size == "auto"
        of_epoch = epoch_batch_size(config, checkpoint) if is_auto and checkpoint is not None else None
        found, to_keep = settle_batch_size(config, world, mesh, data, kept, of_epoch, progress, heartbeat)
        is_own = world.broadcast_object(checkpoint is not None and directory.holds(checkpoint))
        trainer = _assemble(found, world, mesh, data, checkpoint, is_own, progress, heartbeat)
        agree(world, trackers.check)
        agree(world, trainer.check_task_entries)
        first_on_host = world.hosts.index(world.host) == world.rank
        agree(
            world,
            lambda: directory.begin(config, world.rank, first_on_host=first_on_host, batch_size=to_keep),
        )
    except BaseException:
        trackers.close()
        directory.abandon()
        raise
    try:
        return _train(found, world, directory, data, trainer, checkpoint, is_own, progress, stop, watchdog, trackers)
    finally:
        stop.on_first = None  # which keeps the session and its threads
        trackers.close()
        directory.release()


def _train(
    config: Config,
    world: World,
    directory: RunDirectory,
    data: Data,
    trainer: Trainer,
    checkpoint: Path | None,
    is_own: bool,
    progress: ProgressDisplay,
    stop: StopRequest,
    watchdog: Watchdog,
    trackers: Trackers,
) -> dict[str, Any]:
    """Everything from the first thing that is written to the summary."""
    mesh, heartbeat = trainer.mesh, watchdog.heartbeat
    watchdog.use(directory.path / "logs", world.hosts)
    heartbeat.timeline = trainer.engine.timeline
    heartbeat.backward_has_threads = has_streams(mesh.device)
    log.info("rank %d of %d (%s) on %s, %s", world.rank, world.size, world.backend, world.host, mesh.device)
    trainer.engine.check_replicas("at the start")

    state = trainer.state
    progress.message("\n".join([_headline(config, world, trainer), *left_out_lines(getattr(data, "left_out", {}))]))
    across_hosts, scaling = mesh.across_hosts(config, world), scaling_warning(config.optimizer, trainer.lr_replicas)
    limited = limited_evaluation(config)
    environment, peak = run_environment(world, mesh), None
    slow = slow_precision(config, mesh, environment)
    for warning in (mesh.warning, across_hosts, scaling, slow, limited):
        if warning is not None:
            progress.message(f"warning: {warning}")
            log.warning(warning)
    if checkpoint is not None:
        progress.message(f"resuming from {checkpoint} after step {state.step} of {trainer.total_steps}")
    if world.rank == 0:
        peak, of_peak = find_peak(mesh.device, config.training.precision)
        for line in (*environment_lines(environment), of_peak):
            log.info(line)
    if world.broadcast_object(peak is not None):
        trainer.task.count_flops()
    session = Session(
        trainer, directory, progress, data.digest, heartbeat, trackers, environment, peak and peak.rate,
        saved_step=state.step if is_own else None,
    )  # fmt: skip
    explained = partial(explain_out_of_memory, config, mesh, trainer.task, world, heartbeat)
    with only_new_garbage(), explained():
        status = session.train(stop)
    if status == "stopped":  # said first: a launcher may not wait for what follows
        saved = (
            "this step could not be saved: the same command resumes from the checkpoint before it"
            if state.step in session.saver.unsaved or session.saved_step != state.step
            else "everything is saved: the same command resumes from here"
        )
        progress.message(
            f"stopped after step {state.step} ({stop.signal or 'asked on another rank'}); {saved}\n"
            f"run directory: {directory.path}"
        )
    heartbeat.enter_phase("end")
    trainer.engine.check_replicas("at the end")
    with explained():
        summary = session.finish(status)
    trainer.close()
    if status == "finished":
        notes = [*trainer.task.notes, *([] if limited is None else [limited]), f"run directory: {directory.path}"]
        progress.message("\n".join([_results(summary, session.tested_step), *notes]))
    return summary


def _assemble(
    config: Config,
    world: World,
    mesh: ParallelMesh,
    data: Data,
    checkpoint: Path | None,
    is_own: bool,
    progress: ProgressDisplay,
    heartbeat: Heartbeat,
) -> Trainer:
    """A trainer with initial or restored weights: what wrong input can make fail when the data are there.

    `is_own`: the checkpoint is of this run directory.
    """
    saved = read_checked(checkpoint, data.digest, getattr(data, "split_digests", {}), world)
    state = TrainState() if saved is None else TrainState.load(saved["position"])
    state.choose_best_by(config.training.best_metric)
    if not is_own:
        state.forget_best()  # which is in the other run's folder
    state.keep_rate(config.training, {} if saved is None else saved["config"])
    task = agree(world, lambda: _make_task(config, data, mesh))
    with explain_out_of_memory(config, mesh, task, world, heartbeat):
        trainer = Trainer(config, world, mesh, task, state, draw=saved is None)
        if saved is None:
            broadcast_parameters(trainer.engine.buffers, mesh.dp_group)
        else:
            trainer.restore(checkpoint, saved)
    if (why := compile_layers(config, task, mesh, world)) is not None:
        progress.message(f"training.compile: off, {why}")
    return trainer


class _LogFile(logging.FileHandler):
    """Creates its folder with the first line, so that a refused start leaves none. A full disk is not told here."""

    def _open(self) -> TextIOWrapper:
        make_own_folder(Path(self.baseFilename).parent)
        return super()._open()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def _log_to(file: Path) -> None:
    """Log to the rank's own file; the screen shows rank 0's progress only."""
    handler = _LogFile(file, encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.handlers = [handler]
    log.setLevel(logging.INFO)
    log.propagate = False


def _make_task(config: Config, data: Data, mesh: ParallelMesh) -> Task:
    task = make_task(config, data, mesh)
    if not task.has_split("valid"):
        raise UserError(f"task={config.task}: has no valid split, which is needed to choose the best checkpoint")
    best, names = config.training.best_metric, task.metric_names
    if best.removeprefix("-") not in names:
        raise UserError(f"training.best_metric={best}: no such metric of this task; it has {', '.join(names)}")
    return task


def _headline(config: Config, world: World, trainer: Trainer) -> str:
    ranks = "1 rank" if world.size == 1 else f"{world.size} ranks over {world.backend}"
    return (
        f"{config.task}: {trainer.engine.num_parameters:,} parameters on {ranks} ({trainer.mesh.device.type})\n"
        f"{source_name(config.data)}: {trainer.task.describe()}; "
        f"{trainer.total_steps:,} steps of {trainer.task.targets_per_step:,} {trainer.task.unit}"
    )


def _results(summary: dict[str, Any], step: int | None) -> str:
    """`step`: that of the weights that were tested."""
    valid, test = (show_metrics(split, summary) for split in ("valid", "test"))
    best = summary["best_step"]
    place = (
        f"best, at step {best}" if step == best else f"last, at step {step}; best: {f'step {best}' if best else 'none'}"
    )
    return f"done: {valid} ({place})" + (f"; {test}" if test else "")
