"""The starts of jobs. A job is active (it has slots) as long as it has an attempt that has not ended."""

import sqlite3
from collections import defaultdict

from hvd_transformer.errors import UserError
from hvd_transformer.service.jobs import ACTIVE, ENDED, Allocation, Attempt, Engine, Job, Placement, State
from hvd_transformer.service.storage.host_table import HostTable, can_have, place, placement_of
from hvd_transformer.service.storage.job_table import JobTable


class AttemptTable(JobTable, HostTable):
    """The attempts of jobs, with the slots that they have or had."""

    def start(self, job_id: int, allocation: Allocation, now: float) -> Attempt | None:
        """Give a queued job its slots and a new attempt: QUEUED → STARTING, in one transaction.

        None if the job is not queued any more, or if another job, a drained or a removed host stand in the way.
        """
        with self.database.write() as connection:
            job = self._known(connection, job_id)
            if job.state is not State.QUEUED or not can_have(connection, job_id, allocation):
                return None
            query = "SELECT coalesce(max(number), 0) + 1 FROM attempts WHERE job = ?"
            number = int(connection.execute(query, (job_id,)).fetchone()[0])
            waits = job.engine is not Engine.HOSTS  # in the queue of the other scheduler, until `begin_external`
            row = (job_id, number, now, waits)
            connection.execute("INSERT INTO attempts (job, number, began, waits) VALUES (?, ?, ?, ?)", row)
            place(connection, job_id, number, allocation)
            self._write(connection, job, {"state": State.STARTING})
            return Attempt(job_id, number, allocation, now)

    def reallocate(self, job_id: int, allocation: Allocation) -> Attempt | None:
        """Give a job that runs these slots in place of its own. None if it does not run, or if they are not free."""
        with self.database.write() as connection:
            self._known(connection, job_id)
            open_attempt = next(iter(_attempts(connection, "job = ? AND ended IS NULL", job_id)), None)
            if open_attempt is None or not can_have(connection, job_id, allocation):
                return None
            place(connection, job_id, open_attempt.number, allocation)
            self.changed(connection, "job", [job_id])
            return _attempts(connection, "job = ? AND ended IS NULL", job_id)[0]

    def attempts(self, job_id: int) -> list[Attempt]:
        """All attempts of the job, the first one first."""
        with self.database.read() as connection:
            return _attempts(connection, "job = ?", job_id)

    def open_attempts(self) -> list[Attempt]:
        """The attempts that have not ended, of all jobs on the service's hosts."""
        with self.database.read() as connection:
            return _attempts(connection, f"ended IS NULL AND {_ON_HOSTS}")

    def end_attempt(
        self,
        job_id: int,
        number: int,
        *,
        ended: float,
        state: State,
        code: int | None = None,
        cause: str = "",
        first_step: int | None = None,
        last_step: int | None = None,
        reason: str = "",
        retries: int | None = None,
    ) -> Job:
        """End an attempt, free its slots and move its job to `state`, in one transaction.

        `retries`: the new number, if it changes. An attempt that another scheduler never began has run for no time,
        however long it waited there. Raises `UserError` if the attempt has ended before.
        """
        assert state not in ACTIVE
        with self.database.write() as connection:
            job = self._known(connection, job_id)
            done = connection.execute(
                "UPDATE attempts SET began = iif(waits, ?, began), waits = 0, ended = ?, code = ?, cause = ?,"
                " first_step = ?, last_step = ? WHERE job = ? AND number = ? AND ended IS NULL",
                (ended, ended, code, cause, first_step, last_step, job_id, number),
            )
            if done.rowcount == 0:
                raise UserError(f"job {job_id}: its attempt {number} does not run")
            connection.execute("UPDATE placements SET in_use = 0 WHERE job = ? AND number = ?", (job_id, number))
            fields = {"state": state, "reason": reason, "ended": ended if state in ENDED else None}
            return self._write(connection, job, fields if retries is None else {**fields, "retries": retries})


_ON_HOSTS = "(SELECT engine FROM jobs WHERE id = job) = 'hosts'"


def _attempts(connection: sqlite3.Connection, where: str, *values: int) -> list[Attempt]:
    placements: dict[tuple[int, int], list[Placement]] = defaultdict(list)
    attempts = connection.execute(f"SELECT * FROM attempts WHERE {where} ORDER BY job, number", values).fetchall()
    query = (
        "SELECT placements.* FROM attempts CROSS JOIN placements USING (job, number)"
        f" WHERE {where} ORDER BY job, number, position"
    )
    for row in connection.execute(query, values):
        placements[row["job"], row["number"]].append(placement_of(row))
    return [
        Attempt(
            row["job"],
            row["number"],
            tuple(placements[row["job"], row["number"]]),
            row["began"],
            row["ended"],
            row["first_step"],
            row["last_step"],
            row["code"],
            row["cause"],
            row["external"],
        )
        for row in attempts
    ]
