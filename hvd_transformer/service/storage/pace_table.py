"""What tells how long queued jobs will run: the speed of jobs of their kind, and how long recent jobs ran."""

import sqlite3

from hvd_transformer.service.scheduling.run_length import Pace, Steps, kind_of, seconds_left, steps_of
from hvd_transformer.service.storage.event_log import EventLog
from hvd_transformer.service.storage.new_job import NewJob

_MOST_KINDS = 10_000  # those seen last
_RECENT = 500  # jobs that have ended

# For a query of jobs: what `expected_seconds` needs of each.
COLUMNS = (
    "time_limit, seconds_per_step, total_steps, ranks, max_steps, shared, num_ranks,"
    " CASE WHEN ranks IS NULL THEN 0 ELSE (SELECT max(last_step) FROM attempts WHERE job = jobs.id) END"
)
JOINS = "LEFT JOIN job_kinds ON job_kinds.job = jobs.id LEFT JOIN paces USING (kind)"


def insert(connection: sqlite3.Connection, number: int, new: NewJob) -> None:
    """Write of which kind a new job is."""
    row = (number, kind_of(new.owner, new.config), *steps_of(new.config))
    connection.execute("INSERT INTO job_kinds VALUES (?, ?, ?, ?)", row)


def expected_seconds(
    limit: float | None,
    per_step: float | None,
    total: int | None,
    ranks: int | None,
    max_steps: int | None,
    shared: int | None,
    num_ranks: int,
    done: int | None,
) -> float | None:
    """How long a job will run, by the values of `COLUMNS`; None: unknown."""
    if per_step is None or ranks is None:
        return limit
    left = seconds_left(Pace(per_step, total, ranks), Steps(max_steps, bool(shared)), num_ranks, done or 0)
    return min((value for value in (left, limit) if value is not None), default=None)


class PaceTable(EventLog):
    """The speed of each kind of jobs, as it was seen last."""

    def put_pace(self, job: int, pace: Pace, now: float) -> None:
        """Note how fast a job runs, for the others of its kind. The kinds not seen for longest are forgotten."""
        with self.database.write(durable=False) as connection:
            connection.execute(
                "INSERT OR REPLACE INTO paces SELECT kind, ?, ?, ?, ? FROM job_kinds WHERE job = ?", (*pace, now, job)
            )
            beyond = "SELECT seen FROM paces ORDER BY seen DESC LIMIT 1 OFFSET ?"
            connection.execute(f"DELETE FROM paces WHERE seen <= ({beyond})", (_MOST_KINDS,))

    def recent_seconds(self) -> list[float]:
        """How long the jobs ran that succeeded lately."""
        query = (
            "SELECT (SELECT sum(ended - began) FROM attempts WHERE job = recent.id) FROM"
            " (SELECT id, state, engine FROM jobs WHERE ended IS NOT NULL ORDER BY ended DESC LIMIT ?) AS recent"
            " WHERE state = 'SUCCEEDED' AND engine = 'hosts'"
        )
        with self.database.read() as connection:
            return [seconds for (seconds,) in connection.execute(query, (_RECENT,)) if seconds is not None]
