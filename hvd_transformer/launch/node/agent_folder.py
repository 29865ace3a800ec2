"""The private folder of a node agent on its host: made for one user, removed with the agent or by the next one."""

import fcntl
import json
import os
import shutil
import stat
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

_SOCKET = "runners"
_LOCK = "agent"
_NAMES = "hvd-transformer-[0-9]*-????????-????????-*"  # of all agents' folders: process, start, host


class AgentFolder:
    """A new folder whose name begins with `base` and tells the hosts of a shared /tmp apart. Raises `OSError`."""

    def __init__(self, base: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=f"{Path(base).name}-{_host_mark()}-", dir=Path(base).parent))
        self.socket = self.path / _SOCKET
        # Held while this process lives, and taken before other agents can find the file by its name.
        self._lock = (self.path / f".{_LOCK}").open("w", encoding="utf-8")
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        (self.path / f".{_LOCK}").replace(self.path / _LOCK)
        _remove_leftovers(self.path.parent)

    def beats(self, ranks: Iterable[int]) -> Iterator[dict[str, Any]]:
        """The newest heartbeat of each rank that has written one."""
        for rank in ranks:
            with suppress(OSError, ValueError):  # none yet, or truncated by a full disk
                yield json.loads((self.path / f"beat-{rank}").read_bytes())

    def clear(self) -> None:
        """Remove the heartbeats of an earlier start."""
        for file in self.path.glob("beat-*"):
            file.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the folder; the second pass takes what ranks were still writing."""
        for _ in range(2):
            shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def sockets(base: str) -> list[str]:
    """The sockets of this host's agents of this user whose folder's name begins with `base`."""
    base_path = Path(base)
    found = sorted(base_path.parent.glob(f"{base_path.name}-{_host_mark()}-*"))
    # `base` is on mpirun's command line: another user could have such a folder, to be sent the ranks' environment.
    return [str(folder / _SOCKET) for folder in found if _is_own(folder)]


def _host_mark() -> str:
    """This host's name, short enough for the path of a socket, which is limited to 108 bytes."""
    return f"{zlib.crc32(os.uname().nodename.encode()):08x}"


def _remove_leftovers(parent: Path) -> None:
    """Remove folders of this user's agents that were killed, as when the host crashed."""
    for folder in filter(_is_own, parent.glob(_NAMES)):
        with suppress(OSError), ExitStack() as locks:  # in use: the lock is held
            fcntl.flock(locks.enter_context((folder / _LOCK).open(encoding="utf-8")), fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)


def _is_own(folder: Path) -> bool:
    """Whether it is a folder of this user; another user's may contain anything, such as a pipe that blocks readers."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
