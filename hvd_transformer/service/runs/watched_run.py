"""One run directory: what the table shows of it, read again only where its files have changed."""

import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from hvd_transformer.own_folder import user_name
from hvd_transformer.service.runs.checkpoints import best_evaluation
from hvd_transformer.service.runs.metrics.metrics_rows import MOST_STEP, number
from hvd_transformer.service.runs.newest_values import NewestValues
from hvd_transformer.service.runs.pace import Pace, Progress
from hvd_transformer.service.runs.plain_files import list_folder, plain, read_config, read_json
from hvd_transformer.service.runs.start_log import StartFacts, read_start
from hvd_transformer.service.runs.status import LOCKS, Ended, LockWatch, RunStatus

_SETTLED_SECONDS = 3.0  # after which a folder's time tells of every later change
_LOCK_SECONDS = 3.0  # between two looks at the locks of a running run
_EVENT_FILE = re.compile(r"events\.out\.tfevents\.([0-9]{10})\.")
_MOST_TRIES = 10  # to find what the log tells of a start
_MOST_PATHS = 1 << 16  # that are remembered


@dataclass(frozen=True)
class RunRow:
    """What is known of a run. Times are seconds since the epoch; `samples` counts those trained on."""

    id: str
    name: str  # its path below the runs folder
    path: Path
    user: str
    status: RunStatus = RunStatus.UNKNOWN
    step: int = 0
    total_steps: int | None = None
    epoch: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)  # the newest value of each key
    best: Mapping[str, Any] = field(default_factory=dict)  # "step", "metric", "value"
    samples: int | None = None
    tokens_per_second: float | None = None
    world: int | None = None  # ranks
    task: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)  # by dotted key
    summary: Mapping[str, Any] = field(default_factory=dict)  # of the end of the last start, if it has come
    began: float | None = None  # the first start
    updated: float | None = None  # the last line
    cause: str = ""  # why the last launch ended
    problem: str = ""  # what cannot be read, and why


def resolved(path: Path) -> Path:
    """The absolute path without symbolic links, as it was at first: a file system that stands still is not asked."""
    return _resolved(path.absolute())


@lru_cache(_MOST_PATHS)
def _resolved(path: Path) -> Path:
    return path.resolve()


def run_id(path: Path) -> str:
    """The name of a run in addresses: the first 12 hex digits of the SHA-256 of its absolute, resolved path."""
    return sha256(os.fsencode(resolved(path))).hexdigest()[:12]


class WatchedRun:
    """Refreshes the row of one run directory."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.row = RunRow(run_id(path), name, path, "")
        self._values = NewestValues(path / "metrics.jsonl")
        self._locks = [LockWatch(path / lock) for lock in LOCKS]
        self._times: dict[str, tuple[int, int] | None] = {}  # of files: changed, size; None: there is none
        self._ended = Ended({}, {})
        self._facts, self._tries = StartFacts(), 0
        self._pace = Pace()
        self._folder_changed, self._settled = -1, False
        self._looked_at_locks = 0.0
        self._held: RunStatus | None = None

    def refresh(self, thorough: bool = False) -> bool:
        """Look for changes; returns whether the row has changed. Raises `FileNotFoundError` if the run is gone.

        Of a run that has ended, only the time of its folder is looked at, unless `thorough`: a start, an end and a
        replaced file change it.
        """
        status = self.path.lstat()
        changed = status.st_mtime_ns != self._folder_changed or not self._settled
        if not (changed or thorough or self.row.status in (RunStatus.RUNNING, RunStatus.UNKNOWN)):
            return False
        self._folder_changed = status.st_mtime_ns
        self._settled = time.time() - status.st_mtime > _SETTLED_SECONDS
        before, self.row = self.row, replace(self.row, user=user_name(status.st_uid))
        if changed or thorough:
            self._read_end(started=self._read_start())
        self._read_best()
        self._read_metrics()
        self._judge(look=changed or thorough)
        return self.row != before

    def progress(self) -> Progress:
        """How far the run is, and how long it still takes."""
        step, total = self.row.step, self.row.total_steps
        if self.row.status is not RunStatus.RUNNING:
            return Progress(step, total, None)
        return Progress(step, total, self._pace.seconds_left(total), self._pace.seconds_per_step())

    def _read_start(self) -> bool:
        """config.yaml is written again at every start; returns whether it was."""
        if not self._is_new("config.yaml"):
            return False
        if self._times["config.yaml"] is None:
            raise FileNotFoundError(self.path)
        config = _shared(read_config(self.path / "config.yaml"))
        task = config.get("task")
        self.row = replace(
            self.row,
            config=config,
            task=task if isinstance(task, str) else "",
            began=_first_start(self.path) or self._time("config.yaml"),
        )
        self._facts, self._tries = StartFacts(), 0
        self._pace = Pace()  # the time between two starts is no step's
        self._times.pop("checkpoints", None)
        return True

    def _read_end(self, started: bool) -> None:
        """Records of an end before the last start are out of date."""
        new = [self._is_new(name) for name in ("summary.json", "exit.json")]
        if not started and not any(new):
            return
        began = self._time("config.yaml") or 0.0
        summary, record = (
            _shared(read_json(self.path / name)) if (self._time(name) or 0.0) >= began else {}
            for name in ("summary.json", "exit.json")
        )
        self._ended = Ended(summary, record)
        self.row = replace(self.row, summary=summary, cause=self._ended.cause)

    def _read_best(self) -> None:
        summary = self.row.summary
        if summary.get("best_step") is not None:
            best = {key: summary.get(f"best_{key}") for key in ("step", "metric", "value")}
        elif self._is_new("checkpoints"):
            best = best_evaluation(self.path)
        else:
            return
        self.row = replace(self.row, best=best)

    def _read_metrics(self) -> None:
        problem = "" if self.row.config else "config.yaml cannot be read"
        try:
            grown = self._values.refresh()
        except FileNotFoundError:
            raise
        except OSError as error:
            problem, grown = f"metrics.jsonl cannot be read: {error.strerror or error}", False
        values, step = self._values.values, self._values.step
        if grown and step is not None:
            self._pace.saw(self._values.modified, step, values.get("milliseconds_per_step"))
        unknown = self._facts.total_steps is None and self._tries < _MOST_TRIES
        if unknown and (grown or self._tries == 0):
            self._facts, self._tries = read_start(self.path), self._tries + 1
        ended = self.row.summary
        of_end = {key: item for key, item in ended.items() if key.startswith(("valid_", "test_"))}
        self.row = replace(
            self.row,
            step=_count(ended.get("steps")) or int(step or 0),
            total_steps=self._facts.total_steps
            or (_count(ended.get("steps")) if ended.get("status") == "finished" else None)
            or _count(self.row.config.get("training.max_steps")),
            epoch=_count(values.get("epoch")),
            metrics=_shared(values)
            | {key: value for key, item in of_end.items() if (value := number(item)) is not None},
            samples=_count(ended.get("samples")) or _count(values.get("samples")),
            tokens_per_second=number(ended.get("tokens_per_second")) or values.get("tokens_per_second"),
            world=_count(ended.get("world")) or self._facts.world,
            updated=self._values.modified or None,
            problem=problem,
        )

    def _judge(self, look: bool) -> None:
        """The status, from the locks and the records of the end."""
        now = time.monotonic()
        if look or now - self._looked_at_locks >= _LOCK_SECONDS:
            self._looked_at_locks = now
            held = [state for lock in self._locks if (state := lock.state()) is not None]
            self._held = min(held, key=lambda state: state is not RunStatus.RUNNING, default=None)
        self.row = replace(self.row, status=self._held or self._ended.status())

    def _is_new(self, name: str) -> bool:
        """Whether the file has changed since the last time, or has come or gone."""
        try:
            status = (self.path / name).lstat()
            found = (status.st_mtime_ns, status.st_size)
        except OSError:
            found = None
        if name in self._times and self._times[name] == found:
            return False
        self._times[name] = found
        return True

    def _time(self, name: str) -> float | None:
        found = self._times.get(name)
        return None if found is None else found[0] / 1e9


def _first_start(run: Path) -> float | None:
    """By the names of the event files."""
    try:
        names = list_folder(run / "tensorboard")
    except OSError:
        return None
    return min((float(found[1]) for name in names if (found := _EVENT_FILE.match(name))), default=None)


def _shared(values: Mapping[str, Any]) -> dict[str, Any]:
    """Copy of `values` in which equal texts of several runs share memory; empty if they are nested too deep."""
    try:
        kept = {sys.intern(plain(key)): plain(value) for key, value in values.items()}
    except RecursionError:
        return {}
    return {key: sys.intern(value) if type(value) is str else value for key, value in kept.items()}


def _count(value: object) -> int | None:
    found = number(value)
    return None if found is None or abs(found) > MOST_STEP else int(found)
