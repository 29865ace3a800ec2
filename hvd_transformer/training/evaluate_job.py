"""Assembles the evaluation of a checkpoint on every rank, and runs it. It writes nothing but prepared data."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_transformer.checkpoint.restore import restore_weights
from hvd_transformer.checkpoint.saved_run import Checkpoint, read_checkpoint
from hvd_transformer.checkpoint.shared_folder import with_verification
from hvd_transformer.comm.world import World, agree
from hvd_transformer.config import Config, load_again
from hvd_transformer.config.mixture import origin, source_name
from hvd_transformer.config.schema import ModelConfig, flatten
from hvd_transformer.data.load_tokenizer import tokenizer_from_json
from hvd_transformer.data.splits import WHOLE, real_path
from hvd_transformer.errors import UserError
from hvd_transformer.models.lora import base_folder
from hvd_transformer.monitoring.watchdog import Watchdog
from hvd_transformer.parallel.mesh import ParallelMesh
from hvd_transformer.planning.partition import check_partition
from hvd_transformer.plugin import CODE
from hvd_transformer.reporting.progress import ProgressDisplay
from hvd_transformer.tasks.task import Data, EvaluationSpec, Task
from hvd_transformer.training.determinism import choose_kernels
from hvd_transformer.training.job_setup import (
    check_same_configuration,
    check_same_data,
    compile_layers,
    limited_evaluation,
    make_task,
    prepare_data,
)
from hvd_transformer.training.out_of_memory import explain_out_of_memory
from hvd_transformer.training.process import StopRequest, tune_memory
from hvd_transformer.training.state import TrainState
from hvd_transformer.training.trainer import Trainer

# How the training was parallelized and optimized does not matter here.
_AS_DEFAULT = {
    key: value
    for key, value in flatten(Config()).items()
    if key.startswith(("parallel.", "communication.", "optimizer."))
}
_COLUMNS = ("data.text_column", "data.label_column")  # other data may have others
_ALL_SAMPLES = {"training.eval_batches": None}
_NO_STATE = {"optimizer.name": "sgd"}  # whose weights need none


@dataclass(frozen=True)
class Request:
    """What to evaluate. `data` is a file, or a folder with the split; None: what the checkpoint was trained on.

    `trust_task`: whether a task that the checkpoint names may be imported, which runs its code; `kept_code`: likewise,
    but from the code that the training service kept with the run.
    """

    checkpoint: Path
    settings: Sequence[str] = ()
    split: str | None = None
    data: Path | None = None
    trust_task: bool = False
    kept_code: bool = False


@dataclass(frozen=True)
class Result:
    """The loss is the mean over `count` units; `left_out` are samples by reason; `notes` are about the metrics.

    `eval_samples`: only so many samples of the split were evaluated; None: all.
    """

    folder: Path
    split: str
    source: str
    metrics: dict[str, float]
    count: int
    unit: str
    left_out: dict[str, int]
    notes: Sequence[str]
    eval_samples: int | None = None


def evaluation_config(saved: Checkpoint, request: Request) -> Config:
    """The checkpoint's configuration with the request's settings; parallel, communication and a limit on the samples
    are the request's only.

    Raises `UserError`.
    """
    values = {**saved.state["config"], **_AS_DEFAULT, **_NO_STATE, **_ALL_SAMPLES}
    if values.get("model.pretrained") is not None:
        values["model.pretrained"] = _pretrained(values, saved.folder)
    config = load_again(
        values, str(request.checkpoint), request.settings, free=_COLUMNS if request.data is not None else ()
    )
    if request.kept_code and saved.kept_code is None:
        raise UserError(f"--kept-code: {request.checkpoint} has no code of a job that was submitted to the service")
    if ":" in config.task and not (request.trust_task or request.kept_code):
        kept = "" if saved.kept_code is None else "; --kept-code does so with the code that was kept with the run"
        raise UserError(
            f"task={config.task}: the checkpoint names this class; --trust-task imports it, which runs its code{kept}"
        )
    if request.data is None:
        return config
    if not request.data.exists():
        raise UserError(f"--data {request.data}: no such file or folder")
    # For messages only; the prepared data is identified by the path itself.
    return config.model_copy(
        update={"data": config.data.model_copy(update={"source": str(request.data), "sources": None})}
    )


def _pretrained(values: Mapping[str, Any], folder: Path) -> str | None:
    """The Hugging Face folder that a checkpoint's model is made of."""
    if values.get("model.lora_rank") is not None:
        return str(base_folder(folder))
    model = {key: values[f"model.{key}"] for key in ("pretrained", "position") if f"model.{key}" in values}
    # A checkpoint of transformers' own modules is such a folder, too.
    return None if ModelConfig(**model).in_own_blocks else str(folder)


def evaluate(
    request: Request, world: World, stop: StopRequest, watchdog: Watchdog, progress: ProgressDisplay
) -> Result:
    """Evaluate one split; the same result on all ranks. Collective.

    Raises `UserError` on all ranks if the input is wrong, `Stopped` if a signal arrives while data is prepared.
    """
    tune_memory()
    heartbeat = watchdog.heartbeat
    saved = _read_and_send(request.checkpoint, world)
    config = agree(world, lambda: evaluation_config(saved, request))
    agree(world, lambda: check_same_configuration(config, world))
    if ":" in config.task:
        _choose_code(config.task, request, saved.kept_code, progress)
    watchdog.stall_seconds = config.training.stall_seconds
    watchdog.use(None, world.hosts)
    agree(world, lambda: choose_kernels(config))
    mesh = agree(world, lambda: ParallelMesh.of(config, world))
    if mesh.warning is not None:
        progress.message(f"warning: {mesh.warning}")
    agree(world, lambda: check_partition(config))
    path = request.data and real_path(request.data)
    wanted = EvaluationSpec(request.split, path, saved.tokenizers, saved.state)
    data = prepare_data(config, world, progress, stop, wanted)
    stop.end_at_once()
    agree(world, lambda: check_same_data(data, world))
    task = agree(world, lambda: make_task(config, data, mesh))
    split = agree(world, lambda: _split(task, request.split, config))
    if path is None:
        agree(world, lambda: _check_unchanged(data, split, saved.state, config))
    with explain_out_of_memory(config, mesh, task, world, heartbeat):
        trainer = Trainer(config, world, mesh, task, TrainState(), draw=False)
        heartbeat.timeline = trainer.engine.timeline
        if "frozen_checksum" in saved.state:  # of a checkpoint
            trainer.check_frozen(saved.state)
        restore_weights(trainer.engine, saved.folder if world.rank == 0 else None)
        if mesh.device.type == "cuda":  # the kernels of a CPU are for training
            compile_layers(config, task, mesh, world)
        heartbeat.enter_phase("evaluation")
        found = trainer.evaluate(split)
    heartbeat.enter_phase("end")
    trainer.close()
    left_out = getattr(data, "left_out", {}).get(split, {})
    source = source_name(config.data)
    limited = limited_evaluation(config)
    notes = [*task.notes, *([] if limited is None else [limited])]
    count, most = found.num_targets, task.eval_samples
    return Result(saved.folder, split, source, found.metrics, count, task.unit, left_out, notes, most)


def _choose_code(task: str, request: Request, kept: Path | None, progress: ProgressDisplay) -> None:
    """Choose the code that the task will be imported from."""
    if request.kept_code:
        os.environ[CODE] = str(kept)  # as the service does, for worker processes too
        progress.message(f"task={task}: the code that was kept with the run, {kept}")
    elif kept is not None:
        progress.message(f"task={task}: the current code; --kept-code takes what was kept with the run")


def _read_and_send(checkpoint: Path, world: World) -> Checkpoint:
    """Read on rank 0, and verify on all ranks that see the folder; `model.pretrained` needs it on all. Collective."""

    def read() -> tuple[str, dict[str, Any], dict[str, tuple[str, str]]] | None:
        found = with_verification(world, lambda verify: read_checkpoint(checkpoint, verify))
        if found is None:
            return None
        texts = {prefix: (own.kind, own.json_text) for prefix, own in found.tokenizers.items()}
        return str(found.folder), found.state, texts

    folder, state, texts = world.broadcast_object(agree(world, read))
    return Checkpoint(Path(folder), state, {prefix: tokenizer_from_json(*words) for prefix, words in texts.items()})


def _check_unchanged(data: Data, split: str, state: Mapping[str, Any], config: Config) -> None:
    """Raise `UserError` if the split is not training's: the model may have been trained on its samples."""
    wanted = state.get("splits", {}).get(split)
    if wanted is not None and wanted != getattr(data, "split_digests", {}).get(split):
        raise UserError(
            f"{origin(config.data)}: its {split} split is not what it was in training; was it changed? With "
            "--data a file or folder is evaluated as it is"
        )


def _split(task: Task, wanted: str | None, config: Config) -> str:
    """The name of the split to evaluate. Raises `UserError` if there is none."""
    there = [split for split in (WHOLE, "test", "valid", "train") if task.has_split(split)]
    if there in ([], ["train"]) and wanted is None or wanted not in (None, *there):
        what = wanted or "valid and no test"
        raise UserError(f"{origin(config.data)}: no {what} split; there is {' and '.join(there) or 'none'}")
    return wanted or there[0]
