"""Several runs side by side: the keys of the configuration in which they differ, and what came out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hvd_transformer.errors import UserError
from hvd_transformer.service.runs.watched_run import RunRow

MOST_RUNS = 20
_NEVER_THE_SAME = ("output_dir",)


@dataclass(frozen=True)
class Comparison:
    """Values by key, in the order of the runs; None where a run has none."""

    runs: Sequence[RunRow]
    differs: dict[str, list[Any]]
    final: dict[str, list[float | None]]


def compare(runs: Sequence[RunRow]) -> Comparison:
    """Compare up to `MOST_RUNS` runs. Raises `UserError` for more, or for none."""
    if not 1 <= len(runs) <= MOST_RUNS:
        raise UserError(f"compare: {len(runs)} runs; must be 1 to {MOST_RUNS}")
    keys = dict.fromkeys(key for run in runs for key in run.config if key not in _NEVER_THE_SAME)
    differs = {}
    for key in keys:
        values = [run.config.get(key) for run in runs]
        if any(value != values[0] or type(value) is not type(values[0]) for value in values):
            differs[key] = values
    metrics = dict.fromkeys(metric for run in runs for metric in run.metrics)
    return Comparison(runs, differs, {metric: [run.metrics.get(metric) for run in runs] for metric in metrics})
