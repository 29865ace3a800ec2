"""Forgets jobs that ended long ago: their spool folders, then their rows."""

import json
import shutil
from pathlib import Path

from hvd_transformer.service.storage.job_table import JobTable

_AT_ONCE = 500  # jobs per transaction, so that nobody waits for long


class RetentionTable(JobTable):
    """Runs stay: their folders belong to their owners."""

    def forget(self, ended_before: float, spools: Path) -> list[int]:
        """Forget the jobs that ended before this moment, but for those that a job waits for, and return their ids.

        `spools`: has the folder ID of each job. A crash in between leaves rows, which the next time removes.
        """
        forgotten: list[int] = []
        while ids := self._ended(ended_before):
            for job in ids:
                shutil.rmtree(spools / str(job), ignore_errors=True)
            with self.database.write() as connection:
                connection.execute(f"DELETE FROM jobs WHERE id IN ({_EACH})", (json.dumps(ids),))
                self.changed(connection, "job", ids)
            forgotten += ids
        return forgotten

    def code_in_use(self) -> set[str]:
        """The code snapshots of all jobs."""
        with self.database.read() as connection:
            return {row["code"] for row in connection.execute("SELECT DISTINCT code FROM jobs WHERE code != ''")}

    def _ended(self, before: float) -> list[int]:
        query = """
            SELECT id FROM jobs WHERE ended < ? AND NOT EXISTS (
                SELECT 1 FROM dependencies JOIN jobs AS other ON other.id = job
                WHERE after = jobs.id AND other.ended IS NULL
            ) LIMIT ?
        """
        with self.database.read() as connection:
            return [int(row["id"]) for row in connection.execute(query, (before, _AT_ONCE))]


_EACH = "SELECT value FROM json_each(?)"
