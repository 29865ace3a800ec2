"""What the service does beside the queue: looks for runs, measures disks, forgets old jobs and unused code."""

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from hvd_transformer.errors import UserError
from hvd_transformer.service.runs.index import RunIndex, RunRow
from hvd_transformer.service.runs.metrics.curves import Curves
from hvd_transformer.service.storage.sessions import Sessions
from hvd_transformer.service.storage.store import Store
from hvd_transformer.service.submitting.code_snapshot import remove_unused

_LOOK_SECONDS = 1.0  # between two looks for new lines of runs
_TIDY_SECONDS = 60.0  # after which the curves that nobody looks at are forgotten
_DISK_SECONDS = 600.0
_FORGET_SECONDS = 3600.0
_END_SECONDS = 2.0  # for work that goes on at the end; storage may stand still

_log = logging.getLogger(__name__)


class Housekeeping:
    """Threads, from `start` to `close`."""

    def __init__(self, store: Store, runs: RunIndex, curves: Curves, state: Path) -> None:
        self._store, self._runs, self._state = store, runs, state
        self._sessions = Sessions(store.database)
        self._closed, self._looked = threading.Event(), threading.Event()
        self._disk_bytes: Mapping[str, int] | None = None
        self._threads = [
            threading.Thread(target=self._repeat, args=work, name=name, daemon=True)
            for name, work in {
                "runs": (self._look, _LOOK_SECONDS),
                "curves": (curves.tidy, _TIDY_SECONDS),
                "disks": (self._measure, _DISK_SECONDS),
                "retention": (self._forget, _FORGET_SECONDS),
            }.items()
        ]

    def disk_bytes(self) -> Mapping[str, int] | None:
        """What the run directories of each user took when they were last measured; None until then."""
        return self._disk_bytes

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the threads. One that waits for the storage is left to the end of the process."""
        self._closed.set()
        self._looked.set()
        end = time.monotonic() + _END_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _repeat(self, work: Callable[[], object], seconds: float) -> None:
        told = ""
        while not self._closed.is_set():
            try:
                work()
            except (OSError, UserError) as error:  # a full disk, storage that is away
                if str(error) != told and not self._closed.is_set():
                    _log.warning("%s", error)
                told = str(error)
            except Exception:  # whatever it is, the next time may go well
                if not self._closed.is_set():  # otherwise the database may be closed
                    _log.exception("%s", threading.current_thread().name)
            self._closed.wait(seconds)

    def _look(self) -> None:
        self._runs.refresh()
        self._looked.set()

    def _measure(self) -> None:
        self._looked.wait()  # before, no run is known
        if any(limits.disk_bytes is not None for limits in self._store.all_limits().values()):
            runs = self._runs.rows()
            jobs = self._store.jobs_by_output(str(run.path) for run in runs)
            owners = {path: job.owner for path, job in jobs.items()}
            found = disk_bytes(runs, owners, self._closed.is_set)
            if not self._closed.is_set():
                self._disk_bytes = found

    def _forget(self) -> None:
        if (days := self._store.retention_days()) is not None:
            self._store.forget(time.time() - days * 86_400, self._state / "jobs")
        remove_unused(self._state / "code", self._store.code_in_use())
        self._sessions.forget_ended()


def disk_bytes(runs: Iterable[RunRow], owners: Mapping[str, str], ends: Callable[[], bool]) -> dict[str, int]:
    """What the run directories take on the disk, by user: those of jobs count for who has submitted them.

    `owners`: of the jobs, by folder, which all belong to the service's user. `ends`: whether to stop halfway.
    """
    sizes: Counter[str] = Counter()
    for run in runs:
        sizes[owners.get(str(run.path), run.user)] += _size(run.path, ends)
    return dict(sizes)


def _size(folder: Path, ends: Callable[[], bool]) -> int:
    """Links are not followed; what goes away meanwhile does not count."""
    total, folders = 0, [str(folder)]
    while folders and not ends():
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    else:
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
        except OSError:
            continue
    return total
