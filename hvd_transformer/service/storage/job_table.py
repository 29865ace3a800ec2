"""The jobs: added, searched and changed."""

import sqlite3
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from hvd_transformer.errors import UserError
from hvd_transformer.service.jobs import ACTIVE, ENDED, WAITING, Cause, Engine, Job, Needs, State
from hvd_transformer.service.scheduling.placement import least_ranks
from hvd_transformer.service.scheduling.snapshot import Waiting
from hvd_transformer.service.storage import idempotency, job_rows, pace_table
from hvd_transformer.service.storage.new_job import NewJob, digest
from hvd_transformer.service.storage.news_table import NewsTable
from hvd_transformer.service.storage.transitions import check_transition

_CHANGEABLE = {"state", "priority", "retries", "stopping", "reason", "estimated_start", "ended"}
_MOST_DEPENDENCIES = 100_000  # of an array together: they are written in one transaction
_MOVED = 60.0  # seconds by which an estimate must move to be written


class QueueFull(UserError):
    """The owner has too many jobs in the queue now; there will be room later."""


class JobTable(NewsTable):
    """The jobs. Their starts are in `AttemptTable`."""

    def add_jobs(
        self, jobs: Sequence[NewJob], idempotency_key: str | None = None, body: str | None = None
    ) -> list[int]:
        """Add the jobs of one owner, all or none, and return their ids.

        With an idempotency key that the owner has used before they are those of then. `body`: the request as it was
        sent, to tell whether it is the same; by default the jobs are compared. Raises `UserError` for a limit of the
        owner, an unknown job or too many in `after`, an output_dir that another job uses, or a key of another request;
        `QueueFull` where it is the number of jobs in the queue.
        """
        owner, now = jobs[0].owner, jobs[0].submitted
        with self.database.write() as connection:
            if idempotency_key is not None:
                ids = idempotency.earlier(connection, owner, idempotency_key, digest(jobs, body))
                if ids is not None:
                    return ids
            self._check_limits(connection, owner, jobs)
            last = connection.execute("SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'jobs'")
            first = int(last.fetchone()[0]) + 1
            ids = list(range(first, first + len(jobs)))
            _check_dependencies(connection, first, jobs)
            for number, job in zip(ids, jobs, strict=True):
                array = first if job.array else None
                job_rows.insert(connection, number, array, job)
                pace_table.insert(connection, number, job)
                if (user := job_rows.conflict(connection, number)) is not None:
                    raise UserError(
                        f"output_dir={user.output_dir}: job {user.id} uses it, which is {user.state.value}; choose "
                        f"another folder, or start after it with --after {user.id}"
                    )
            if idempotency_key is not None:
                idempotency.remember(connection, owner, idempotency_key, digest(jobs, body), ids, now)
            self.changed(connection, "job", ids)
            return ids

    def submitted_before(self, owner: str, idempotency_key: str, body: str) -> list[int] | None:
        """What `add_jobs` would return for a key that the owner has used before; None if it is new."""
        with self.database.read() as connection:
            return idempotency.earlier(connection, owner, idempotency_key, digest((), body))

    def job(self, id: int) -> Job | None:
        """The job; None if there is none of this id."""
        with self.database.read() as connection:
            return job_rows.read(connection, id)

    def jobs(
        self,
        states: Iterable[State] | None = None,
        owner: str | None = None,
        tag: str | None = None,
        after_id: int | None = None,
        limit: int | None = None,
        newest_first: bool = False,
        engine: Engine | None = None,
    ) -> list[Job]:
        """The jobs that match, by id. `after_id`: the last id of the page before."""
        with self.database.read() as connection:
            return job_rows.page(connection, states, owner, tag, engine, after_id, limit, newest_first)

    def jobs_by_output(self, folders: Iterable[str]) -> dict[str, Job]:
        """The newest job of each of these output folders that has one."""
        with self.database.read() as connection:
            return job_rows.by_output(connection, folders)

    def waiting(self) -> list[Waiting]:
        """The jobs that may start: queued, and all that they depend on succeeded."""
        query = (
            "SELECT id, owner, priority, submitted, engine, num_ranks, min_ranks, tensor, gpus_per_rank,"
            f" {pace_table.COLUMNS} FROM jobs {pace_table.JOINS}"
            f" WHERE state = 'QUEUED' AND NOT EXISTS ({_UNMET} AND dependencies.job = jobs.id) ORDER BY id"
        )
        with self.database.read() as connection:
            return [
                Waiting(
                    job,
                    owner,
                    priority,
                    submitted,
                    _needs(num_ranks, min_ranks, tensor, gpus),
                    pace_table.expected_seconds(*length),
                    _ENGINES[engine],
                )
                for job, owner, priority, submitted, engine, num_ranks, min_ranks, tensor, gpus, *length in (
                    connection.execute(query)
                )
            ]

    def unmet_dependencies(self) -> dict[int, dict[int, State]]:
        """Ids and states of the jobs that each queued job still waits for."""
        unmet: dict[int, dict[int, State]] = {}
        query = f"{_UNMET} AND job IN (SELECT id FROM jobs WHERE state = 'QUEUED') ORDER BY job, after"
        with self.database.read() as connection:
            for row in connection.execute(query):
                unmet.setdefault(row["job"], {})[row["after"]] = State(row["state"])
        return unmet

    def counts(self, owner: str | None = None) -> dict[State, int]:
        """How many jobs, of an owner or of all, are in each state."""
        with self.database.read() as connection:
            return _counts(connection, owner)

    def update(self, job_id: int, **fields: Any) -> Job:
        """Change fields of a job: state, priority, retries, stopping, reason, estimated_start, ended.

        Raises `UserError` for an unknown job, or if it cannot go to that state (`transitions.py`), or is to run again
        while another job uses its run directory. What belongs to the state that it leaves is cleared. A job that is
        being stopped stays stopped for its first cause, or is cancelled, or killed. Only `start` and `end_attempt` give
        and take slots.
        """
        with self.database.write() as connection:
            job = self._known(connection, job_id)
            state = fields.get("state", job.state)
            check_transition(job_id, job.state, state)
            assert (state in ACTIVE) == (job.state in ACTIVE), "slots are given by start, and taken by end_attempt"
            if job.state is state is State.STOPPING and not _outranks(fields.get("stopping"), job.stopping):
                return job  # what it is being stopped for stays, but for a cancel
            again = job.state in ENDED and state not in ENDED
            if again and (user := job_rows.conflict(connection, job_id)) is not None:
                raise UserError(
                    f"job {job_id}: job {user.id} uses its run directory, {job.output_dir}, and is {user.state.value}; "
                    "wait for its end, or cancel it"
                )
            return self._write(connection, job, fields)

    def set_tags(self, job_id: int, add: Collection[str] = (), remove: Collection[str] = ()) -> Job:
        """Add tags to a job and remove some. Raises `UserError` for an unknown job."""
        with self.database.write() as connection:
            self._known(connection, job_id)
            connection.executemany("DELETE FROM tags WHERE job = ? AND tag = ?", ((job_id, tag) for tag in remove))
            new = set(add) - set(remove)
            connection.executemany("INSERT OR IGNORE INTO tags VALUES (?, ?)", ((job_id, tag) for tag in new))
            self.changed(connection, "job", [job_id])
            return self._known(connection, job_id)

    def estimated_starts(self) -> dict[int, float | None]:
        """When the queued jobs are likely to start, as `set_waits` was last told."""
        query = "SELECT id, estimated_start FROM jobs WHERE state = 'QUEUED'"
        with self.database.read() as connection:
            return {row["id"]: row["estimated_start"] for row in connection.execute(query)}

    def set_waits(self, reasons: Mapping[int, str], estimated: Mapping[int, float]) -> int:
        """Why the queued jobs of `reasons` wait, and when they are likely to start; how many of them changed.

        Only those rows are written. A moment that moved by less than a minute has not changed.
        """
        with self.database.write(durable=False) as connection:
            rows = connection.execute("SELECT id, reason, estimated_start FROM jobs WHERE state = 'QUEUED'")
            changes = [
                (reasons[job], estimated.get(job), job)
                for job, reason, start in rows
                if job in reasons and (reasons[job] != reason or _moved(start, estimated.get(job)))
            ]
            if changes:
                connection.executemany("UPDATE jobs SET reason = ?, estimated_start = ? WHERE id = ?", changes)
                self.changed(connection, "waits")
            return len(changes)

    @contextmanager
    def batch(self) -> Iterator[None]:
        """One transaction of all changes that this thread makes in the block: one sync of the disk, all or none."""
        with self.database.write():
            yield

    def _known(self, connection: sqlite3.Connection, job_id: int) -> Job:
        job = job_rows.read(connection, job_id)
        if job is None:
            raise UserError(f"job {job_id}: no such job")
        return job

    def _write(self, connection: sqlite3.Connection, job: Job, fields: Mapping[str, Any]) -> Job:
        assert fields.keys() <= _CHANGEABLE, fields
        state = fields.get("state", job.state)
        check_transition(job.id, job.state, state)
        if state is not job.state:
            cleared = {"reason": "", "stopping": None, "estimated_start": None, "ended": None}
            fields = {**cleared, **fields}
            assert (state in ENDED) == (fields["ended"] is not None), "the time of a job's end belongs to its end"
            if state in ENDED:
                self._add_news(connection, job.id, state, fields["reason"], fields["ended"])
        columns = ", ".join(f"{name} = :{name}" for name in fields)
        connection.execute(f"UPDATE jobs SET {columns} WHERE id = :id", {**fields, "id": job.id})
        self.changed(connection, "job", [job.id])
        return self._known(connection, job.id)

    def _check_limits(self, connection: sqlite3.Connection, owner: str, jobs: Sequence[NewJob]) -> None:
        limits = self.limits(owner)
        if limits.max_queued is not None:
            counts = _counts(connection, owner)
            waiting = sum(counts.get(state, 0) for state in WAITING)
            if waiting + len(jobs) > limits.max_queued:
                kind = QueueFull if len(jobs) <= limits.max_queued else UserError
                raise kind(
                    f"{owner} has {waiting} jobs in the queue and may have {limits.max_queued}; "
                    f"{len(jobs)} more are too many"
                )
        for job in jobs:
            on_hosts, least = job.engine is Engine.HOSTS, least_ranks(job.needs)
            if on_hosts and limits.max_slots is not None and least > limits.max_slots:
                needs = f"{'at least ' * (least < job.needs.num_ranks)}{least}"
                raise UserError(f"{owner} may use {limits.max_slots} slots; {job.name} needs {needs}")


# Dependencies of which the other job has not succeeded. Retention keeps jobs that others wait for.
_UNMET = (
    "SELECT job, after, other.state FROM dependencies JOIN jobs AS other ON other.id = after"
    " WHERE other.state != 'SUCCEEDED'"
)


_ENGINES = {engine.value: engine for engine in Engine}
_needs = lru_cache(Needs)  # of thousands of jobs most need the same


def _outranks(new: Cause | None, old: Cause | None) -> bool:
    """Whether a job that is being stopped for `old` is to be stopped for `new` instead."""
    return new is Cause.KILLED or (new is Cause.CANCELLED and old is not Cause.KILLED)


def _moved(old: float | None, new: float | None) -> bool:
    if old is None or new is None:
        return old is not new
    return abs(new - old) >= _MOVED


def _counts(connection: sqlite3.Connection, owner: str | None) -> dict[State, int]:
    whose = "" if owner is None else "WHERE owner = :owner"
    rows = connection.execute(f"SELECT state, count(*) FROM jobs {whose} GROUP BY state", {"owner": owner})
    return {State(state): number for state, number in rows}


def _check_dependencies(connection: sqlite3.Connection, first: int, jobs: Sequence[NewJob]) -> None:
    if (number := sum(len(set(job.after)) for job in jobs)) > _MOST_DEPENDENCIES:
        raise UserError(
            f"after: {number:,} dependencies of {len(jobs):,} jobs; at most {_MOST_DEPENDENCIES:,}: let one job wait "
            "for the others, and these jobs for it"
        )
    for other in sorted({other for job in jobs for other in job.after}):
        if other >= first or connection.execute("SELECT 1 FROM jobs WHERE id = ?", (other,)).fetchone() is None:
            raise UserError(f"after {other}: no such job")
