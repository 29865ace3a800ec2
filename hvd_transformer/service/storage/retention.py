"""Forgets jobs that ended long ago: their spool folders, then their rows."""

import json
import shutil
import sqlite3
from pathlib import Path

from hvd_transformer.service.storage.job_table import JobTable

_AT_ONCE = 50  # jobs per transaction, so that nobody waits for long


class RetentionTable(JobTable):
    """Runs stay: their folders belong to their owners."""

    def forget(self, ended_before: float, spools: Path) -> list[int]:
        """Forget the jobs that ended before this moment, but for those that a job that stays waits for, or would wait
        for if it were retried; returns their ids.

        `spools`: has the folder ID of each job. A crash in between leaves rows, which the next time removes.
        """
        forgotten: list[int] = []
        while ids := self._forget_some(ended_before, spools):
            forgotten += ids
        return forgotten

    def _forget_some(self, ended_before: float, spools: Path) -> list[int]:
        with self.database.write() as connection:  # nobody retries one of them in between
            ids = _ended(connection, ended_before)
            for job in ids:
                shutil.rmtree(spools / str(job), ignore_errors=True)
            if ids:
                connection.execute(f"DELETE FROM jobs WHERE id IN ({_EACH})", (json.dumps(ids),))
                self.changed(connection, "job", ids)
            return ids

    def skip_used_ids(self, spools: Path) -> None:
        """Give no new job the id of a folder in `spools`.

        Once a backup was put back, jobs that it does not know may still run there.
        """
        used = max((int(path.name) for path in spools.glob("*") if path.name.isdecimal()), default=0)
        with self.database.write() as connection:
            last = connection.execute("SELECT max(seq) FROM sqlite_sequence WHERE name = 'jobs'").fetchone()[0]
            if used > (last or 0):
                connection.execute("DELETE FROM sqlite_sequence WHERE name = 'jobs'")
                connection.execute("INSERT INTO sqlite_sequence VALUES ('jobs', ?)", (used,))

    def code_in_use(self) -> set[str]:
        """The code snapshots of all jobs."""
        with self.database.read() as connection:
            return {row["code"] for row in connection.execute("SELECT DISTINCT code FROM jobs WHERE code != ''")}


_EACH = "SELECT value FROM json_each(?)"


def _ended(connection: sqlite3.Connection, before: float) -> list[int]:
    query = """
        SELECT id FROM jobs WHERE ended < :before AND NOT EXISTS (
            SELECT 1 FROM dependencies JOIN jobs AS other ON other.id = job
            WHERE after = jobs.id AND (other.ended IS NULL OR other.ended >= :before)
        ) LIMIT :most
    """
    return [int(row["id"]) for row in connection.execute(query, {"before": before, "most": _AT_ONCE})]
