"""The private folder of a node agent on its host: made for one user, removed with the agent or by the next one."""

import fcntl
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

_SOCKET = "runners"
_LOCK = "agent"


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
    """The sockets of this host's agents whose folder's name begins with `base`."""
    folder = Path(base)
    return sorted(map(str, folder.parent.glob(f"{folder.name}-{_host_mark()}-*/{_SOCKET}")))


def _host_mark() -> str:
    """This host's name, short enough for the path of a socket, which is limited to 108 bytes."""
    return f"{zlib.crc32(os.uname().nodename.encode()):08x}"


def _remove_leftovers(parent: Path) -> None:
    """Remove folders of this user's agents that were killed, as when the host crashed."""
    for folder in parent.glob("hvd-transformer-*"):
        with suppress(OSError), ExitStack() as locks:  # in use: the lock is held
            if folder.lstat().st_uid != os.geteuid():  # may contain anything, such as a pipe that blocks when opened
                continue
            fcntl.flock(locks.enter_context((folder / _LOCK).open(encoding="utf-8")), fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
