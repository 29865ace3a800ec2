"""Keeps a database for one service: a lock of the kernel, which ends with its process, however that ends.

Unlike the folders of jobs (`folder_lock.py`), a database in WAL mode is of one host, whose kernel sees all who use it.
"""

import fcntl
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from hvd_transformer.errors import UserError

_PATIENCE = 1.0  # seconds: a child of a service that was killed has its descriptors until it starts its program
_LOOK_SECONDS = 0.05


class DatabaseOwner:
    """The lock of a database, from construction to `release`. Raises `UserError`, which names the other owner."""

    def __init__(self, database: Path) -> None:
        path = database.with_name(f"{database.name}.lock")
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise UserError(
                f"{path}: cannot be written: {error.strerror}; choose another folder with --state"
            ) from None
        try:
            self._take(database)
        except BaseException:
            os.close(self._file)
            raise
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        who = f"hvd-transformer serve on host {socket.gethostname()} (process {os.getpid()}, since {since})"
        with suppress(OSError):  # a full disk: the lock holds without the name
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, who.encode(), 0)

    def release(self) -> None:
        """Let another service have the database. The file stays: who removes a locked file lets two in."""
        os.close(self._file)

    def _take(self, database: Path) -> None:
        end = time.monotonic() + _PATIENCE
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > end:
                    who = os.pread(self._file, 1000, 0).decode(errors="replace") or "an unknown process"
                    raise UserError(
                        f"{database}: in use by {who}; end it, or choose another folder with --state"
                    ) from None
            except OSError as error:
                raise UserError(
                    f"{database}: its file system cannot lock files ({error.strerror}); choose a folder on a local "
                    "disk with --state"
                ) from None
            time.sleep(_LOOK_SECONDS)
