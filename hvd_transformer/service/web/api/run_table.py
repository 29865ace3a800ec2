"""All runs and jobs as one table in memory, brought up to date by what has changed since the last look.

What jobs have in common, such as the keys of their configurations, is kept once, so that ten thousand queued ones fit.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from sys import intern
from typing import Any

from hvd_transformer.service.jobs import Job
from hvd_transformer.service.runs.index import RunIndex, RunRow, run_id
from hvd_transformer.service.runs.query import TableRow
from hvd_transformer.service.storage.event_log import EVENTS_KEPT
from hvd_transformer.service.storage.store import Store

_PAGE = 500  # jobs that are read at once


class RunTable:
    """The rows by run id. A job in them is as it was at its last change, without its words. Thread-safe."""

    def __init__(self, store: Store, runs: RunIndex) -> None:
        self._store, self._runs = store, runs
        self._turn = threading.Lock()
        self._jobs: dict[int, tuple[str, Job]] = {}  # with the ids of their runs
        self._tags: dict[str, tuple[str, ...]] = {}  # of runs, which count where they have no job
        self._seq = self._version = -1
        self._shapes: dict[tuple[str, ...], Mapping[str, int]] = {}
        self._rows: dict[str, TableRow] = {}

    def rows(self) -> Mapping[str, TableRow]:
        """All rows as they are now; not to be changed."""
        with self._turn:
            seq, version = self._store.last_seq(), self._runs.version
            if (seq, version) == (self._seq, self._version):
                return self._rows
            if seq != self._seq:
                self._read_changes(seq)
            newest = dict(self._jobs[number] for number in sorted(self._jobs))  # of two jobs on one folder
            rows = {
                run.id: _row(run.id, run, newest.pop(run.id, None), self._tags.get(run.id, ()))
                for run in self._runs.rows()
            }
            rows.update((run, _row(run, None, job)) for run, job in newest.items())
            self._rows, self._seq, self._version = rows, seq, version
            return rows

    def _read_changes(self, seq: int) -> None:
        if not 0 <= self._seq <= seq <= self._seq + EVENTS_KEPT:
            self._read_all()
            return
        for event in self._store.events_after(self._seq, EVENTS_KEPT):
            if event.kind == "job":
                job = self._store.job(int(event.id))
                if job is None:
                    self._jobs.pop(int(event.id), None)
                else:
                    self._keep(job)
            elif event.kind == "run":
                self._tags.pop(event.id, None)
                self._tags.update(self._store.run_tags([event.id]))
            elif event.kind == "waits":
                self._read_estimates()

    def _read_estimates(self) -> None:
        """All of them, but nothing else: after every pass of the scheduler those of many jobs may have moved."""
        for number, start in self._store.estimated_starts().items():
            run, job = self._jobs.get(number, ("", None))
            if job is not None and job.estimated_start != start:
                self._jobs[number] = run, replace(job, estimated_start=start)

    def _read_all(self) -> None:
        self._jobs.clear()
        self._tags = self._store.run_tags()
        last = 0
        while page := self._store.jobs(after_id=last, limit=_PAGE):
            for job in page:
                self._keep(job)
            last = page[-1].id

    def _keep(self, job: Job) -> None:
        run, known = self._jobs.get(job.id, ("", None))
        config = self._packed(job.config) if known is None else known.config  # it never changes
        self._jobs[job.id] = run or run_id(Path(job.output_dir)), replace(job, words=(), launch=(), config=config)

    def _packed(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        keys = tuple(config)
        places = self._shapes.get(keys)
        if places is None:
            places = self._shapes[keys] = {intern(key): place for place, key in enumerate(keys)}
        return _Packed(places, [intern(value) if type(value) is str else value for value in config.values()])


class _Packed(Mapping[str, Any]):
    """A mapping that shares its keys with others."""

    __slots__ = ("_places", "_values")

    def __init__(self, places: Mapping[str, int], values: list[Any]) -> None:
        self._places, self._values = places, values

    def __getitem__(self, key: str) -> Any:
        return self._values[self._places[key]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._values)


def _row(run: str, row: RunRow | None, job: Job | None, tags: Sequence[str] = ()) -> TableRow:
    if job is not None:
        name = job.run_name if row is None else row.name
        return TableRow(run, name, job.state.value, job.owner, job.tags, row, job)
    assert row is not None
    return TableRow(run, row.name, row.status.name, row.user, tags, row)
