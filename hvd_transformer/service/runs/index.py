"""The runs below a folder, kept up to date at a cost that grows with what changes, not with what is there.

About once a second a background thread calls `refresh`: one `stat` per folder, and a look into the runs at work.
"""

import threading
from collections import OrderedDict
from pathlib import Path

from hvd_transformer.service.runs import folders
from hvd_transformer.service.runs.folders import FolderScan
from hvd_transformer.service.runs.pace import Progress
from hvd_transformer.service.runs.plain_files import plain
from hvd_transformer.service.runs.watched_run import RunRow, WatchedRun, resolved, run_id

__all__ = ["RunIndex", "RunRow", "run_id"]
_THOROUGH_EVERY = 300  # refreshes between two thorough looks at a run that has ended
_MOST_GONE = 10_000  # removed runs that are remembered


class RunIndex:
    """The runs below `runs`. `refresh` is called by one thread, everything else by any."""

    def __init__(self, runs: Path) -> None:
        self.root = runs.resolve()
        self._scan = FolderScan(self.root)
        self._watched: dict[Path, WatchedRun] = {}
        self._lock = threading.Lock()
        self._rows: dict[str, RunRow] = {}
        self._changed: OrderedDict[str, int] = OrderedDict()  # run → version of its last change, the newest at the end
        self._refreshes = 0
        self.version = 0

    @property
    def notes(self) -> list[str]:
        """What users should know: what is not shown, and why."""
        if not self._scan.cut:
            return []
        most = f"{folders.MOST_FOLDERS:,} folders that are no runs"
        return [f"{self.root} has more than {most}: new runs may be missing here; move other folders away"]

    def refresh(self) -> None:
        """Find new runs and what has changed in those that are known. Unreadable ones are shown as such."""
        found = self._scan.find()
        for path in self._watched.keys() - found:
            self._remove(path)
        for path in sorted(found - self._watched.keys()):
            name = path.name if path == self.root else str(path.relative_to(self.root))
            self._watched[path] = WatchedRun(path, plain(name))
        self._refreshes += 1
        for number, watched in enumerate(list(self._watched.values()), self._refreshes):
            self._look(watched, thorough=number % _THOROUGH_EVERY == 0)

    def rows(self) -> list[RunRow]:
        """All runs, in the order in which they were found."""
        with self._lock:
            return list(self._rows.values())

    def row(self, run: str) -> RunRow | None:
        """The run with this id."""
        with self._lock:
            return self._rows.get(run)

    def changed_since(self, version: int) -> list[str]:
        """The runs that have changed since the index had this version, also those that are gone since."""
        found = []
        with self._lock:
            for run, changed in reversed(self._changed.items()):
                if changed <= version:
                    break
                found.append(run)
        return found[::-1]

    def progress(self, path: Path) -> Progress:
        """How far the run in this folder is, and how many seconds it still takes, by the steps of the last minutes."""
        watched = self._watched.get(resolved(path))
        return Progress(0, None, None) if watched is None else watched.progress()

    def _look(self, watched: WatchedRun, thorough: bool) -> None:
        try:
            if watched.refresh(thorough):
                self._note(watched.row.id, watched.row)
        except OSError:
            self._remove(watched.path)
            self._scan.forget(watched.path)

    def _remove(self, path: Path) -> None:
        self._note(self._watched.pop(path).row.id, None)

    def _note(self, run: str, row: RunRow | None) -> None:
        with self._lock:
            if row is None:
                self._rows.pop(run, None)
            else:
                self._rows[run] = row
            self.version += 1
            self._changed[run] = self.version
            self._changed.move_to_end(run)
            while len(self._changed) > len(self._rows) + _MOST_GONE:
                self._changed.popitem(last=False)
