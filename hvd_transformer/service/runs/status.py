"""Whether a run is at work, and how it ended: from its locks and from what its processes left.

config.yaml    written at each start, so an end that was recorded before it was the end of an earlier start
.lock          rank 0 of hvd-train is at work
.launcher      so is a launcher, also between two starts
summary.json   rank 0 got to the end: "finished", or "stopped" when it was asked to
exit.json      the launcher's exit code, and its cause
"""

import stat
import time
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from hvd_transformer.folder_lock import LEFT_OVER_SECONDS, Owner, owner_of

LOCKS = (".launcher", ".lock")
_MOST_LOCK_BYTES = 1 << 16


class RunStatus(str, Enum):
    """What a table shows of a run. UNKNOWN: its lock is of another host, and may be left over."""

    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"
    UNKNOWN = "unknown"


def lock_owner(path: Path) -> Owner | None:
    """The owner of a lock of a run directory, unless its process is known to be gone; None if nobody has it."""
    try:
        status = path.lstat()
        return owner_of(path) if stat.S_ISREG(status.st_mode) and status.st_size < _MOST_LOCK_BYTES else None
    except OSError:
        return None


class LockWatch:
    """What has been seen of one lock of a run.

    Of a lock of this host, the process is known. One of another host is renewed every few seconds: its file changes.
    Until that has been seen or missed, its time must do, which is of the clock of whoever has the storage.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._modified: int | None = None
        self._changed: float | None = None  # by this process's clock: when the file was last seen to have changed
        self._first = 0.0

    def state(self) -> RunStatus | None:
        """RUNNING, UNKNOWN, or None: nobody has the folder."""
        try:
            modified = self._path.lstat().st_mtime_ns
            owner = lock_owner(self._path)
        except OSError:
            owner = None
        if owner is None:
            self._modified = self._changed = None
            return None
        if owner.here:
            return RunStatus.RUNNING
        now = time.monotonic()
        if self._modified is None:
            self._first = now
            if abs(time.time() - modified / 1e9) < LEFT_OVER_SECONDS:
                self._changed = now
        elif modified != self._modified:
            self._changed = now
        self._modified = modified
        if self._changed is not None and now - self._changed <= LEFT_OVER_SECONDS:
            return RunStatus.RUNNING
        return RunStatus.UNKNOWN if now - self._first <= LEFT_OVER_SECONDS else None


class Ended:
    """How a run ended, if it did since its last start. `code` is None without a launcher."""

    def __init__(self, summary: Mapping[str, Any], exit_record: Mapping[str, Any]) -> None:
        code, cause = exit_record.get("code"), exit_record.get("cause")
        self.code = code if isinstance(code, int) else None
        self.cause = cause if isinstance(cause, str) else ""
        self._summary = summary.get("status")

    def status(self) -> RunStatus:
        """Status of a run without a live process: without a record of its end, it was killed or failed."""
        if self._summary == "finished":
            return RunStatus.FINISHED
        if self._summary == "stopped" or self.cause == "it was asked to stop":
            return RunStatus.STOPPED
        return RunStatus.FAILED
