"""How long a job is likely to run: from the speed of jobs with the same settings, or else from all recent jobs."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

_LEAST_JOBS = 10  # before that, recent jobs tell nothing

# Settings that change neither the time per step nor the number of steps.
_WITHOUT_EFFECT = {
    "seed", "output_dir", "profile", "model.dropout", "optimizer.lr", "optimizer.lr_scaling", "optimizer.weight_decay",
    "optimizer.momentum", "optimizer.betas", "optimizer.eps", "optimizer.clip_norm", "optimizer.schedule",
    "optimizer.warmup_steps", "optimizer.gamma", "training.best_metric", "training.stall_seconds",
    "training.label_smoothing", "checkpoint.keep_last", "checkpoint.keep_best", "checkpoint.resume",
}  # fmt: skip


class Pace(NamedTuple):
    """What was seen of a job on `ranks` ranks. `total_steps`: None if `training.max_steps` ends it."""

    seconds_per_step: float
    total_steps: int | None
    ranks: int


class Steps(NamedTuple):
    """What the configuration tells of a job's steps.

    `shared`: a step has as many samples on any number of ranks, which share them (`training.global_batch_size`).
    """

    max_steps: int | None
    shared: bool


def kind_of(owner: str, config: Mapping[str, Any]) -> str:
    """Key that is equal for jobs of one owner with the same time per step, and the same number of steps unless
    `training.max_steps` sets it."""
    settings = {key: value for key, value in config.items() if key not in _WITHOUT_EFFECT}
    settings["training.max_steps"] = config.get("training.max_steps") is not None
    return hashlib.sha256(json.dumps([owner, settings], sort_keys=True).encode()).hexdigest()[:32]


def steps_of(config: Mapping[str, Any]) -> Steps:
    return Steps(config.get("training.max_steps"), config.get("training.global_batch_size") is not None)


def seconds_left(pace: Pace, steps: Steps, ranks: int, done: int) -> float | None:
    """Estimated seconds left for a job of this kind after `done` steps; None if its number of steps is unknown.

    Fewer ranks take longer: for each step if they share its samples, otherwise they need more steps for an epoch.
    """
    slower = pace.ranks / ranks
    per_step = pace.seconds_per_step * (slower if steps.shared else 1.0)
    total: float
    if steps.max_steps is not None:
        total = steps.max_steps
    elif pace.total_steps is not None:
        total = pace.total_steps * (1.0 if steps.shared else slower)
    else:
        return None
    return max(0.0, total - done) * per_step


def median_length(seconds: Sequence[float]) -> float | None:
    """Median run time of recent jobs, for jobs of unknown length; None if there are too few."""
    return None if len(seconds) < _LEAST_JOBS else median(seconds)
