"""What can be known of a trial before any has started: whether its settings can be trained, and have the metric."""

from pathlib import Path
from typing import Any

from hvd_transformer.config.batch_size import check_step_size
from hvd_transformer.config.load import load
from hvd_transformer.config.schema import Config
from hvd_transformer.errors import UserError
from hvd_transformer.planning.partition import check_partition
from hvd_transformer.sweep.definition import Sweep
from hvd_transformer.tasks.registry import known_metrics

# Their rate does not depend on the last step, which a later rung moves.
_FOR_HALVING = ("constant", "step", "noam")


def check_trial(sweep: Sweep, values: dict[str, Any], file: Path) -> None:
    """Raise `UserError` if a trial of the sweep in `file` cannot be trained with these values."""
    base = None if sweep.config is None else Path(sweep.config).expanduser()
    config = load(sweep.preset, base, sweep.settings_of(values, sweep.rungs[0]), origin=str(file))
    resume, schedule, tensor = config.checkpoint.resume, config.optimizer.schedule, config.parallel.tensor
    if resume != "auto":
        raise UserError(f"{file}: checkpoint.resume={resume}: trials need auto, to resume where they were interrupted")
    if sweep.halving is not None and schedule not in _FOR_HALVING:
        raise UserError(
            f"{file}: halving: not with optimizer.schedule={schedule}, whose rate depends on training.max_steps, which "
            f"grows from rung to rung; use {', '.join(_FOR_HALVING[:-1])} or {_FOR_HALVING[-1]}"
        )
    if sweep.ranks % tensor:
        raise UserError(f"{file}: ranks: {sweep.ranks}: must be a multiple of parallel.tensor={tensor}")
    check_step_size(config, sweep.ranks // tensor)
    check_partition(config)
    _check_metrics(sweep, config, file)


def _check_metrics(sweep: Sweep, config: Config, file: Path) -> None:
    """Raise `UserError` if a metric does not exist. A custom task's metrics may be unknown until there are data."""
    known, best = known_metrics(config), config.training.best_metric
    if known is None:
        return
    for given, name, names in (
        (f"metric: {sweep.metric}", sweep.metric, ["train_loss", *(f"valid_{name}" for name in known)]),
        (f"training.best_metric={best}", best.removeprefix("-"), known),
    ):
        if name not in names:
            raise UserError(f"{file}: {given}: no metric of task={config.task}; must be one of {', '.join(names)}")
