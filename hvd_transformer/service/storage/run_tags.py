"""Tags of runs that have no job. Those of jobs are in `JobTable`."""

import json
from collections.abc import Collection, Iterable

from hvd_transformer.service.storage.event_log import EventLog


class RunTagTable(EventLog):
    """The tags by the ids of runs. They stay when a run directory is away, as it may come back."""

    def run_tags(self, runs: Iterable[str] | None = None) -> dict[str, tuple[str, ...]]:
        """The tags of each of these runs that has any; None: of all."""
        query, values = "SELECT run, tag FROM run_tags", list[str]()
        if runs is not None:
            query, values = f"{query} WHERE run IN (SELECT value FROM json_each(?))", [json.dumps(list(runs))]
        found: dict[str, tuple[str, ...]] = {}
        with self.database.read() as connection:
            for run, tag in connection.execute(f"{query} ORDER BY run, tag", values):
                found[run] = (*found.get(run, ()), tag)
        return found

    def tag_runs(self, runs: Collection[str], add: Collection[str] = (), remove: Collection[str] = ()) -> None:
        """Add tags to runs and remove some."""
        new = set(add) - set(remove)
        with self.database.write() as connection:
            connection.executemany(
                "DELETE FROM run_tags WHERE run = ? AND tag = ?", ((run, tag) for run in runs for tag in remove)
            )
            connection.executemany(
                "INSERT OR IGNORE INTO run_tags VALUES (?, ?)", ((run, tag) for run in runs for tag in new)
            )
            self.changed(connection, "run", runs)
