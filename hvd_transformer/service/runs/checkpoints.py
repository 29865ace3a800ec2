"""The checkpoints of a run, by the files that tell of them; weights are never read."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvd_transformer.config.best_metric import metric_sign
from hvd_transformer.service.runs.metrics.metrics_rows import number
from hvd_transformer.service.runs.plain_files import list_folder, plain, read_json

_STEP = re.compile(r"step-([0-9]{8,15})")
_MOST = 200  # the newest


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint. `time`: seconds since the epoch; `metrics`: what the evaluation of its step found."""

    step: int
    bytes: int
    time: float
    best: bool = False
    latest: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


def checkpoints(run: Path, metrics_at: Callable[[int], Mapping[str, float]]) -> list[Checkpoint]:
    """The newest checkpoints, oldest first. `metrics_at` tells the metrics of a step."""
    folder = run / "checkpoints"
    try:
        steps = sorted(int(match[1]) for name in list_folder(folder) if (match := _STEP.fullmatch(name)))
    except OSError:
        return []
    best, latest = _linked(folder / "best"), _linked(folder / "latest")
    found = []
    for step in steps[-_MOST:]:
        name = f"step-{step:08d}"
        manifest = folder / name / "MANIFEST.json"
        try:
            time = manifest.lstat().st_mtime
        except OSError:  # removed meanwhile
            continue
        found.append(Checkpoint(step, _size(read_json(manifest)), time, name == best, name == latest, metrics_at(step)))
    return found


def best_evaluation(run: Path) -> dict[str, Any]:
    """The "step", "metric" and "value" of the best evaluation so far, by the checkpoint that was kept of it."""
    name = _linked(run / "checkpoints" / "best")
    position = read_json(run / "checkpoints" / name / "state.json").get("position") if name else None
    if not isinstance(position, dict) or (value := number(position.get("best"))) is None:
        return {}
    if not isinstance(metric := plain(position.get("best_metric")), str):
        return {}
    # A metric of which more is better is negated there.
    return {"step": plain(position.get("best_step")), "metric": metric, "value": metric_sign(metric) * value}


def _linked(link: Path) -> str | None:
    """The name of the checkpoint that a link of the folder names; None for any other."""
    try:
        name = str(link.readlink())
    except OSError:
        return None
    return name if _STEP.fullmatch(name) else None


def _size(manifest: Mapping[str, Any]) -> int:
    files = manifest.get("files")
    entries = files.values() if isinstance(files, dict) else ()
    return sum(int(number(entry.get("size")) or 0) for entry in entries if isinstance(entry, dict))
