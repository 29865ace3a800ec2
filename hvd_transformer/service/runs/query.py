"""Filters, sorts and pages the table of runs and jobs: a pure function over its rows."""

import base64
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hvd_transformer.config.schema import shown
from hvd_transformer.errors import UserError
from hvd_transformer.service.jobs import Job, State
from hvd_transformer.service.runs.metrics.metrics_rows import number
from hvd_transformer.service.runs.watched_run import RunRow, run_id

MOST_ROWS = 500  # of a page
_RUN_COLUMNS = ("step", "total_steps", "epoch", "samples", "tokens_per_second", "world", "task", "began", "updated")
_JOB_COLUMNS = ("priority", "submitted", "estimated_start", "ended")
_FAR = 1e13  # behind every time


@dataclass(frozen=True)
class TableRow:
    """A run, its job, or both. `state` is that of the job, if there is one."""

    id: str
    name: str
    state: str
    user: str
    tags: Sequence[str] = ()
    run: RunRow | None = None
    job: Job | None = None

    @property
    def path(self) -> Path:
        """The run directory, which may not be there yet."""
        if self.run is not None:
            return self.run.path
        assert self.job is not None
        return Path(self.job.output_dir)

    @property
    def config(self) -> Mapping[str, Any]:
        """By dotted key: that of the run, or else of the job."""
        if self.run is not None and self.run.config:
            return self.run.config
        return {} if self.job is None else self.job.config

    @property
    def metrics(self) -> Mapping[str, float]:
        return {} if self.run is None else self.run.metrics


@dataclass(frozen=True)
class Query:
    """What is asked for. `where`: keys of the configuration and their values, as on the command line."""

    text: str = ""
    state: str = ""
    user: str = ""
    tag: str = ""
    where: Sequence[tuple[str, str]] = ()
    sort: str = "updated"
    descending: bool = True
    cursor: str | None = None
    limit: int = 50


@dataclass(frozen=True)
class Page:
    """`next`: the cursor of the next page; `total`: rows of all pages; `keys`: metrics that any of them has."""

    items: Sequence[TableRow]
    next: str | None
    total: int
    keys: Sequence[str] = field(default_factory=list)


def table_rows(runs: Iterable[RunRow], jobs: Iterable[Job], tags: Mapping[str, Sequence[str]]) -> list[TableRow]:
    """Every run and every job. Of several jobs on one folder, the newest is that of the run.

    `tags`: of runs without a job, by run.
    """
    newest = {run_id(Path(job.output_dir)): job for job in sorted(jobs, key=lambda job: job.id)}
    rows = []
    for run in runs:
        job = newest.pop(run.id, None)
        if job is None:
            rows.append(TableRow(run.id, run.name, run.status.value.upper(), run.user, tags.get(run.id, ()), run))
        else:
            rows.append(_of_job(run.id, job, run))
    return rows + [_of_job(run, job, None) for run, job in newest.items()]


def select(
    rows: Iterable[TableRow], query: Query, estimated_end: Callable[[TableRow], float | None] = lambda row: None
) -> Page:
    """The page of rows that match. Raises `UserError` for a damaged cursor.

    `estimated_end`: asked for each of them, but only to sort by it: it moves while no row changes.
    """
    value = estimated_end if query.sort == "estimated_end" else partial(_value, key=query.sort)
    matching = [row for row in rows if _matches(row, query)]
    keys = dict.fromkeys(key for row in matching for key in row.metrics)
    ordered = sorted(((_place(value(row)), row.id, row) for row in matching), key=lambda item: item[:2])
    there = [item for item in ordered if item[0][0] < _MISSING]
    missing = ordered[len(there) :]  # always at the end
    ordered = (there[::-1] if query.descending else there) + missing
    start = 0 if query.cursor is None else _after(query.cursor, ordered, query.descending)
    end = start + min(max(query.limit, 1), MOST_ROWS)
    following = _cursor(ordered[end - 1]) if end < len(ordered) else None
    return Page([row for *_, row in ordered[start:end]], following, len(ordered), list(keys))


_Place = tuple[int, Any]  # kind of the value, value: kinds are not comparable with each other
_Item = tuple[_Place, str, TableRow]
_NUMBER, _TEXT, _MISSING = range(3)


def _of_job(run: str, job: Job, row: RunRow | None) -> TableRow:
    name = job.run_name if row is None else row.name
    return TableRow(run, name, State(job.state).value, job.owner, job.tags, row, job)


def _matches(row: TableRow, query: Query) -> bool:
    if query.state and row.state != query.state.upper():
        return False
    if query.user and row.user != query.user:
        return False
    if query.tag and query.tag not in row.tags:
        return False
    if query.text:
        text, of_job = query.text.lower(), () if row.job is None else (row.job.name, str(row.job.id))
        words = (row.name, row.user, str(row.config.get("task", "")), *of_job, *row.tags)
        if not any(text in word.lower() for word in words):
            return False
    return all(_has(row.config, key, wanted) for key, wanted in query.where)


def _has(config: Mapping[str, Any], key: str, wanted: str) -> bool:
    """Whether the key has this value: 0.001 and 1e-3 are the same."""
    if key not in config:
        return False
    value = config[key]
    if number(value) is not None:
        try:
            return float(wanted) == float(value)
        except ValueError:
            return False
    return shown(value) == wanted or (value is None and wanted == "none")


def _value(row: TableRow, key: str) -> Any:
    """What the row has in a column, or as a metric or key of the configuration; None if it has nothing there."""
    if key in ("name", "state", "user"):
        return getattr(row, key)
    if key in _RUN_COLUMNS:
        value = None if row.run is None else getattr(row.run, key)
        if value is None and key in ("began", "updated") and row.job is not None:
            return row.job.submitted
        return value
    if key == "job":
        return None if row.job is None else row.job.id
    if key == "turn":
        return None if row.job is None else _turn(row.job)
    if key in _JOB_COLUMNS:
        return None if row.job is None else getattr(row.job, key)
    return row.metrics.get(key, row.config.get(key))


def _turn(job: Job) -> float:
    """The place in the queue: by the estimated start, and behind those that have one by priority and time."""
    return _FAR - 1e9 * job.priority + job.id if job.estimated_start is None else job.estimated_start


def _place(value: Any) -> _Place:
    """Where a row with this value belongs in the order."""
    if value is None:
        return (_MISSING, 0)
    of_number = number(value)
    return (_TEXT, shown(value)) if of_number is None else (_NUMBER, of_number)


def _cursor(item: _Item) -> str:
    """Where a page ended, by the value and the id of its last row: rows that come and go shift nothing."""
    (kind, value), run, _ = item
    return base64.urlsafe_b64encode(json.dumps([kind, value, run], ensure_ascii=False).encode()).decode()


def _after(cursor: str, ordered: Sequence[_Item], descending: bool) -> int:
    """The place of the first row behind the cursor."""
    try:
        kind, value, run = json.loads(base64.urlsafe_b64decode(cursor))
        last = ((int(kind), value), str(run))
        for place, item in enumerate(ordered):
            kind = item[0][0]
            backwards = descending and kind != _MISSING and last[0][0] != _MISSING
            if (item[:2] < last) if backwards else (item[:2] > last):
                return place
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise UserError(f"cursor={cursor[:40]}: is not one that a list has given") from None
    return len(ordered)
