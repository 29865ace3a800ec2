"""Keeps a folder for one owner, over NFS too, until the owner ends, however it ends.

The lock is a small file that names its owner, who renews it. It is left over if its process is known to be gone, or if
it has not been renewed for a while, by the clock of the process that looks. Locks of the kernel would not do: on some
file systems other hosts do not see them, on others they outlive a host that is dead.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from hvd_transformer.errors import UserError

_KEYS = {"what", "host", "pid", "since", "token", "processes", "started", "start"}
RENEW_SECONDS = 4.0
LEFT_OVER_SECONDS = 20.0  # without a renewal; longer than hosts run ranks without their launcher
END_SECONDS = 5.0  # for an owner that was just killed to end
JOB_END_SECONDS = 300.0  # for a rank of an earlier start, whose host ends it once it knows that it is cut off
_LOOK_SECONDS = 0.2


# Set by a launcher: the name of this start, JOB.NUMBER, and those of its earlier ones whose ranks have all ended.
START, ENDED_STARTS = "HVD_TRANSFORMER_START", "HVD_TRANSFORMER_ENDED_STARTS"
# Set by who starts one launcher after another for the same job: what the names of all starts begin with; has no ".".
JOB = "HVD_TRANSFORMER_JOB"


class FolderLock:
    """The lock of the folder of `path`, from `take` to `release`.

    `what`: the owner in words, such as "hvd-train"; `more`: what else the file tells of it.
    """

    def __init__(self, path: Path, what: str, **more: str) -> None:
        self._path = path
        self._owner = {
            **more,
            "what": what,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
            "token": uuid4().hex,
            "processes": _process_table(),
            "started": _start_time(os.getpid()),
            "start": os.environ.get(START),
        }
        self._file: int | None = None
        self._renewals = 0
        self._lost = False
        self._released = threading.Event()
        self._writing = threading.Lock()  # whoever releases waits: the number of the closed file may be another's

    def take(
        self, waits: Callable[[str], object] = lambda line: None, look: Callable[[], object] | None = None
    ) -> None:
        """Take the lock. `waits` is told, in a line, if that means to wait for an owner that may have ended.

        Raises `UserError`, which names the owner, if it is alive, or if the lock is a link, and `OSError` if the
        folder cannot be written. With `look` it waits for a living owner, too; that is called meanwhile, and an
        exception of it ends the wait.
        """
        watch: _Watch | None = None
        told = False
        while not self._create():
            watch = _Watch.of(self._path, watch)
            if watch is None:  # just released
                continue
            folder = self._path.parent
            if watch.left_over():
                self._remove(watch)
                continue
            patience = JOB_END_SECONDS if watch.same_job() else END_SECONDS
            if look is not None:
                look()
            elif watch.alive() and watch.seconds() > patience:
                raise UserError(f"{folder}: in use by {watch.who()}; wait for it, end it, or choose another folder")
            if not told:
                waits(f"{folder}: was in use by {watch.who()}; waiting for its end")
                told = True
            time.sleep(_LOOK_SECONDS)
        threading.Thread(target=self._renew, name="folder lock", daemon=True).start()

    @property
    def lost(self) -> bool:
        """Whether another owner has taken the folder since `take`, as after this process was suspended for long."""
        return self._lost or (self._file is not None and not self._in_place())

    def owner(self) -> str | None:
        """Who has the folder now, in words."""
        watch = _Watch.of(self._path, None)
        return None if watch is None else watch.who()

    def release(self) -> None:
        """Give the folder back."""
        if self._file is None:
            return
        self._released.set()
        with self._writing:
            if self._in_place():
                self._path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = None

    def _create(self) -> bool:
        try:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            if self._path.is_symlink():
                raise UserError(f"{self._path}: is a symbolic link; remove it") from None
            return False
        try:
            self._write()
        except OSError:
            self.release()
            raise
        return True

    def _remove(self, watch: "_Watch") -> None:
        """Remove a lock that is left over. Of several processes that want to, one at a time looks again and does it."""
        turn = self._path.with_name(f"{self._path.name}.{watch.token}")
        try:
            os.close(os.open(turn, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            time.sleep(_LOOK_SECONDS)
            if watch.seconds() > 2 * LEFT_OVER_SECONDS:  # who had the turn has ended, too
                turn.unlink(missing_ok=True)
            return
        try:
            if _Watch.of(self._path, watch) is watch and watch.left_over():
                self._path.unlink(missing_ok=True)
        finally:
            turn.unlink(missing_ok=True)

    def _renew(self) -> None:
        """Write to the own file alone, so that a lock that somebody else has taken meanwhile stays as it is."""
        while not self._released.wait(RENEW_SECONDS):
            with self._writing, suppress(OSError):  # a disk that is full for a while
                if self._file is None:
                    return
                if not self._in_place():
                    self._lost = True
                    return
                self._write()

    def _write(self) -> None:
        assert self._file is not None
        self._renewals += 1
        os.pwrite(self._file, json.dumps({**self._owner, "renewals": f"{self._renewals:012}"}).encode(), 0)
        os.fsync(self._file)

    def _in_place(self) -> bool:
        """Whether the folder's lock is this one."""
        assert self._file is not None
        try:
            return os.path.samestat(os.fstat(self._file), self._path.stat())
        except OSError:
            return False


class Owner(NamedTuple):
    """Who has a folder. `here`: whether this host can see its process."""

    words: str
    host: str
    here: bool
    more: Mapping[str, Any]


def owner_of(path: Path) -> Owner | None:
    """The owner of a lock, unless its process is known to be gone."""
    watch = _Watch.of(path, None)
    return None if watch is None or watch.left_over() else watch.owner()


class _Watch:
    """What has been seen of a lock's file since it was first seen with this owner."""

    def __init__(self, data: bytes) -> None:
        self._owner: dict[str, Any] = {}  # unknown: being written, or truncated by a full disk
        with suppress(ValueError, TypeError):
            found = dict(json.loads(data))
            self._owner = found if found.keys() >= _KEYS else {}
        self._data, self._renewed = data, False
        self._first = self._changed = time.monotonic()
        token = str(self._owner.get("token"))
        self.token = token if token.isalnum() else "unknown"  # it becomes part of a file's name

    @classmethod
    def of(cls, path: Path, before: "_Watch | None") -> "_Watch | None":
        """`before` if the owner is still the same, else a new one; None if nobody has the lock."""
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        now = cls(data)
        if before is None or before.token != now.token:
            return now
        if before._data != data:
            before._data, before._changed, before._renewed = data, now._changed, True
        return before

    def seconds(self) -> float:
        """For how long this owner has been watched."""
        return time.monotonic() - self._first

    def alive(self) -> bool:
        """Whether the owner is known to live."""
        return self._renewed or self._process_lives() is True

    def same_job(self) -> bool:
        """Whether the owner is a rank of an earlier start of this process's job."""
        job = os.environ.get(START, "").partition(".")[0]
        return bool(job) and str(self._owner.get("start")).partition(".")[0] == job

    def left_over(self) -> bool:
        """Whether the owner has ended, as far as can be known."""
        if self._owner.get("start") in os.environ.get(ENDED_STARTS, "").split():
            return True
        return self._process_lives() is False or time.monotonic() - self._changed > LEFT_OVER_SECONDS

    def owner(self) -> Owner:
        """All that the file tells."""
        return Owner(self.who(), str(self._owner.get("host")), self._process_lives() is not None, self._owner)

    def who(self) -> str:
        """The owner in words."""
        if not self._owner:
            return "an unknown process"
        return "{what} on host {host} (process {pid}, since {since})".format_map(self._owner)

    def _process_lives(self) -> bool | None:
        """None: it cannot be seen from here."""
        table = _process_table()
        if table is None or self._owner.get("processes") != table or _is_hidden(self._owner["pid"]):
            return None
        return bool(_start_time(self._owner["pid"]) == self._owner["started"])


def _process_table() -> str | None:
    """Names the running kernel and the table of processes that this one sees: containers have their own.

    None where there is no /proc.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return None


def _is_hidden(pid: int) -> bool:
    """Whether the process is another user's, and /proc does not show it: it may be mounted with hidepid."""
    try:
        Path(f"/proc/{pid}/stat").read_bytes()
    except PermissionError:
        return True
    except OSError:
        try:
            os.kill(pid, 0)
        except PermissionError:
            return True
        except (OSError, OverflowError, TypeError):
            return False
    return False


def _start_time(pid: int) -> str | None:
    """When the process was started, in ticks; None if it has ended. Numbers of processes are used again."""
    try:
        state, *fields = (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        )
    except OSError:
        return None
    return None if state in "ZX" else fields[18]
