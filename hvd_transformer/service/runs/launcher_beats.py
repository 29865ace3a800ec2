"""The heartbeats of launched ranks, which only their launcher has: it tells who is connected to it once a second."""

import json
import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

from hvd_transformer.launch.output.launch_server import is_trusted
from hvd_transformer.monitoring.stall_report import PeerHeartbeat
from hvd_transformer.service.runs.status import lock_owner

_FIRST_SECONDS = 1.5  # within which a launcher tells the heartbeats
_IDLE_SECONDS = 30.0  # after which a connection that nobody asks is closed
_MOST_CONNECTIONS = 64
_MOST_LINE_BYTES = 1 << 24
_HEARTBEATS, _START, _EXIT = (b'{"event": "%s"' % event for event in (b"look", b"start", b"exit"))


class LauncherBeats:
    """Connections to the launchers on this host of the runs that are looked at."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connections: dict[Path, _Connection] = {}

    def of(self, run: Path, wait: float = _FIRST_SECONDS) -> list[PeerHeartbeat]:
        """The newest heartbeats of the ranks; empty if no launcher that can be reached is at work.

        The first time it may take `wait` seconds.
        """
        with self._lock:
            connection = self._connections.get(run)
            if connection is None or connection.closed:
                connection = _Connection.to(run) if len(self._connections) < _MOST_CONNECTIONS else None
                self._connections = {path: known for path, known in self._connections.items() if not known.closed}
                if connection is not None:
                    self._connections[run] = connection
        return [] if connection is None else connection.newest(wait)

    def close(self) -> None:
        """End all connections."""
        with self._lock:
            for connection in self._connections.values():
                connection.close()
            self._connections.clear()


class _Connection:
    """Reads what one launcher tells, on a thread of its own, until nobody has asked for a while."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._news = threading.Condition()
        self._line, self._received = b"", 0.0
        self._began = self._asked = time.monotonic()
        self.closed = False
        threading.Thread(target=self._read, name="launcher", daemon=True).start()

    @classmethod
    def to(cls, run: Path) -> "_Connection | None":
        owner = lock_owner(run / ".launcher")
        name = owner.more.get("socket") if owner is not None and owner.here else None
        if not isinstance(name, str) or not name:
            return None
        connected = socket.socket(socket.AF_UNIX)
        connected.settimeout(_FIRST_SECONDS)
        try:
            connected.connect(f"\0{name}")
            # The name was read from a file: another user's process may answer. Root may see the jobs of all users.
            if os.geteuid() != 0 and not is_trusted(connected):
                raise OSError("another user answers")
        except (OSError, ValueError):
            connected.close()
            return None
        connected.settimeout(_IDLE_SECONDS)
        return cls(connected)

    def newest(self, wait: float) -> list[PeerHeartbeat]:
        self._asked = time.monotonic()
        with self._news:  # later it is known that there are none, as between two starts of the job
            self._news.wait_for(lambda: self._line or self.closed, max(0.0, self._began + wait - self._asked))
            line, since = self._line, time.monotonic() - self._received
        try:
            beats = json.loads(line)["beats"]
            return [PeerHeartbeat(beat, float(beat["age"]) + since) for beat in beats]
        except (ValueError, TypeError, KeyError, RecursionError):
            return []

    def close(self) -> None:
        with suppress(OSError):  # the launcher has ended
            self._socket.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        with suppress(OSError), self._socket, self._socket.makefile("rb") as lines:
            while time.monotonic() - self._asked < _IDLE_SECONDS:
                line = lines.readline(_MOST_LINE_BYTES)
                if not line.endswith(b"\n") or line.startswith(_EXIT):
                    break
                if line.startswith((_HEARTBEATS, _START)):
                    with self._news:
                        self._line, self._received = line if line.startswith(_HEARTBEATS) else b"", time.monotonic()
                        self._news.notify_all()
        with self._news:
            self.closed = True
            self._news.notify_all()
