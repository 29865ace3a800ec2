"""Which slots and GPUs launches outside the service use: those that this user started on this machine.

Every launcher listens on a socket that /proc/net/unix lists (`launch/output/launch_server.py`), and tells who connects
the hosts of its ranks. The connection tells of new hosts after a restart, and ends with the job.
"""

import json
import logging
import re
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvd_transformer.launch.connection.ssh import is_local
from hvd_transformer.launch.output.launch_server import is_trusted
from hvd_transformer.service.jobs import Placement

_LISTENING = re.compile(rb" 00010000 0001 01 +\d+ @(hvd-transformer-[0-9a-f]{32})$", re.MULTILINE)
_START, _EXIT = b'{"event": "start"', b'{"event": "exit"'
_READ_BYTES, _READS = 1 << 16, 64  # at a time, and times in a look
_LINE_BYTES = 1 << 24  # of a message; more than 10,000 hosts need
_LOOK_SECONDS = 1.0  # between two looks at what is listening
_FIRST_SECONDS = 1.0  # for the launchers that are there at the start to tell their hosts
_KNOWN_SECONDS = 600.0  # for which it is remembered which machine a name stands for

_log = logging.getLogger(__name__)


class _Launch:
    """The connection to a launcher. `hosts`: (name, ranks, GPUs) of its ranks that run, () where it named no GPUs."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.hosts: list[tuple[str, int, tuple[int, ...]]] = []
        self.gpus_per_rank = 0
        self.visible: tuple[int, ...] | None = None  # GPUs on this machine; None: all
        self._unended = b""

    def read(self) -> bool:
        """Take what the launcher has told; returns whether it may tell more."""
        for _ in range(_READS):
            try:
                data = self.connection.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                return False
            if not data or len(self._unended) > _LINE_BYTES or not self._take(data):
                return False
        return True

    def _take(self, data: bytes) -> bool:
        *lines, self._unended = (self._unended + data).split(b"\n")
        for line in lines:
            if line.startswith(_START):  # the others, with heartbeats and output, are of no interest
                with suppress(ValueError, KeyError, TypeError):
                    self._take_start(json.loads(line))
            elif line.startswith(_EXIT):
                return False
        return True

    def _take_start(self, start: Mapping[str, Any]) -> None:
        hosts = [(str(name), int(ranks), tuple(*gpus)) for name, ranks, *gpus in start["hosts"]]
        self.gpus_per_rank = int(start.get("gpus_per_rank", 0))
        self.visible = _numbers(start.get("visible"))
        self.hosts = hosts


class PlainLaunches:
    """Looks from `start` to `close`, on a thread of its own; `refresh` does it once.

    `own`: the processes of the service's own launchers, which do not count. `hosts`: the names of the service's hosts.
    `changed` is called when `taken` has.
    """

    def __init__(
        self,
        own: Callable[[], Collection[int]],
        hosts: Callable[[], Iterable[str]],
        changed: Callable[[], object] = lambda: None,
    ) -> None:
        self._own, self._hosts, self._changed = own, hosts, changed
        self._launches: dict[bytes, _Launch] = {}  # by the name of the socket
        self._left: set[bytes] = set()  # sockets of others: of this service's launchers, and of other users
        self._names = _Machines()
        self._selector = selectors.DefaultSelector()
        self._closed = threading.Event()
        self._taken: tuple[Placement, ...] = ()
        self._thread = threading.Thread(target=self._run, name="plain launches", daemon=True)

    def taken(self) -> tuple[Placement, ...]:
        """What the launches use, by the service's names of hosts, those of other machines by their own."""
        return self._taken

    def start(self) -> None:
        """Begin to look. On return all is known, unless a launcher has no ranks yet."""
        deadline = time.monotonic() + _FIRST_SECONDS
        self.refresh()
        while any(not launch.hosts for launch in self._launches.values()) and time.monotonic() < deadline:
            self._selector.select(_FIRST_SECONDS / 10)
            self.refresh()
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
        for launch in self._launches.values():
            launch.connection.close()
        self._selector.close()

    def refresh(self) -> None:
        """Read what launchers have told, and connect to new ones and those that gave up telling."""
        for key, _ in self._selector.select(0):
            name, launch = key.data
            if not launch.read():
                self._selector.unregister(launch.connection)
                launch.connection.close()
                del self._launches[name]
        listening = set(_listening())
        for name in listening - self._launches.keys() - self._left:
            self._connect(name)
        self._left &= listening
        hosts = set(self._hosts()) if self._launches else set()
        taken = tuple(place for launch in self._launches.values() for place in self._places(launch, hosts))
        if taken != self._taken:
            self._taken = taken
            self._changed()

    def _run(self) -> None:
        while not self._closed.wait(_LOOK_SECONDS):
            try:
                self.refresh()
            except Exception:  # whatever it is, the next look may go well
                _log.exception("launches outside the service cannot be seen")

    def _connect(self, name: bytes) -> None:
        connection = socket.socket(socket.AF_UNIX)
        connection.setblocking(False)
        try:
            connection.connect(b"\0" + name)
        except OSError:  # it has just ended, or too many connect: the next look tells
            connection.close()
            return
        if not is_trusted(connection) or _pid(connection) in self._own():
            connection.close()
            self._left.add(name)
            return
        self._launches[name] = launch = _Launch(connection)
        self._selector.register(connection, selectors.EVENT_READ, (name, launch))

    def _places(self, launch: _Launch, hosts: Collection[str]) -> Iterator[Placement]:
        for name, ranks, gpus in launch.hosts:
            known = name if name in hosts else self._names.same(name, hosts)
            count = ranks * launch.gpus_per_rank
            if not gpus and launch.visible is not None and self._names.is_here(name):
                gpus = launch.visible
            yield Placement(known, ranks, (gpus or tuple(range(count)))[:count])


class _Machines:
    """Which machine a host's name stands for, remembered for a while: name servers may be slow."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, float]] = {}

    def is_here(self, name: str) -> bool:
        """Whether it is this machine."""
        return self._address(name) == "here"

    def same(self, name: str, others: Iterable[str]) -> str:
        """The one of the others that stands for the same machine; the name itself if none does."""
        address = self._address(name)
        return next((other for other in sorted(others) if self._address(other) == address), name)

    def _address(self, name: str) -> str:
        address, until = self._known.get(name, ("", 0.0))
        if time.monotonic() >= until:
            address = name
            if is_local(name):
                address = "here"
            else:
                with suppress(OSError, UnicodeError):  # an unknown name is a machine of its own
                    address = socket.gethostbyname(name)
            self._known[name] = address, time.monotonic() + _KNOWN_SECONDS
        return address


def _listening() -> list[bytes]:
    """The names of the sockets on which launchers listen, of all users of this machine."""
    try:
        return _LISTENING.findall(Path("/proc/net/unix").read_bytes())
    except OSError:  # not Linux
        return []


def _pid(connection: socket.socket) -> int:
    """The process that listens at the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[0])


def _numbers(visible: object) -> tuple[int, ...] | None:
    """The GPUs of CUDA_VISIBLE_DEVICES; None if it does not give their numbers."""
    words = [word.strip() for word in str(visible).split(",")] if visible is not None else []
    return tuple(map(int, words)) if words and all(map(str.isdigit, words)) else None
