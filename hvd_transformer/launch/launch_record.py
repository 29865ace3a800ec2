"""What a launcher leaves in a run directory: that it is at work, and how its job ended.

.launcher    the lock that keeps other launchers out, with the socket that `attach` and `stop` use
exit.json    how the last launch ended: exit code, cause, restarts, last step, times
"""

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvd_transformer.atomic import write_text
from hvd_transformer.errors import UserError
from hvd_transformer.folder_lock import FolderLock, Owner, owner_of
from hvd_transformer.own_folder import make_own_folder

_LOCK, _EXIT = ".launcher", "exit.json"


class LaunchRecord:
    """One launch of the job of a run directory, from `claim` to `close`. `socket`: the name of the launcher's."""

    def __init__(self, folder: Path, socket: str) -> None:
        self._folder, self._lock = folder, FolderLock(folder / _LOCK, "a launcher", socket=socket)
        self._made: list[Path] = []  # folders that `claim` created, the innermost first
        self._began = _now()

    def claim(self, waits: Callable[[str], object]) -> None:
        """Keep other launchers out. Raises `UserError`, which names the one that is at work, or if the folder is not
        this user's (`own_folder.py`).

        A folder that this host cannot write is left to the ranks, which may see another one.
        """
        self._made = [folder for folder in (self._folder, *self._folder.parents) if not folder.exists()]
        try:
            make_own_folder(self._folder)
        except UserError as error:
            raise UserError(f"output_dir={error}") from None
        except OSError:
            return
        try:
            self._lock.take(waits)
        except UserError as error:
            raise UserError(f"output_dir={error}, or see it with hvd-transformer attach {self._folder}") from None
        except OSError:
            return

    def begun(self) -> None:
        """The ranks run: how an earlier launch ended is of no interest any more."""
        with suppress(OSError):
            (self._folder / _EXIT).unlink(missing_ok=True)

    def ended(self, how: Mapping[str, Any]) -> None:
        """Write exit.json, if the job has a run directory that this host can write."""
        if (self._folder / "logs").is_dir():
            with suppress(OSError):
                text = json.dumps({**how, "began": self._began, "ended": _now()}, indent=1)
                write_text(self._folder / _EXIT, text + "\n")

    def close(self) -> None:
        """Let other launchers in, and leave no empty folder."""
        self._lock.release()
        for folder in self._made:
            with suppress(OSError):  # not empty any more
                folder.rmdir()


def launcher_of(folder: Path) -> Owner:
    """The launcher that is at work on a run directory. Raises `UserError` if none is."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such run directory")
    if (owner := owner_of(folder / _LOCK)) is not None:
        return owner
    raise UserError(f"{folder}: no launcher is at work here{_last(folder)}")


def wait_for_launcher(folder: Path, waits: Callable[[str], object]) -> None:
    """Wait until no launcher is at work on a run directory; `waits` is told, in a line, that one is."""
    lock = FolderLock(folder / _LOCK, "a launcher")
    if folder.is_dir():
        with suppress(UserError, OSError):  # the next launcher says why it cannot take the folder
            lock.take(waits, look=lambda: None)
            lock.release()


def _last(folder: Path) -> str:
    """How the last launch ended, if that is known."""
    try:
        found = json.loads((folder / _EXIT).read_text(encoding="utf-8"))
        cause = f": {found['cause']}" if found["cause"] else ""
        return f"; the last one ended at {found['ended']} with exit code {found['code']}{cause}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
