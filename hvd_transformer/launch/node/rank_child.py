"""A rank as a child process of the node agent: its output, its end, and that it never outlives the agent."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

_READ_BYTES = 1 << 16
_LINE_BYTES = 1 << 16  # after which a line without an end is passed on as it is
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


class RankChild:
    """The command in a process group of its own, from construction until `reap` returns true.

    `ended`: time of its end on the monotonic clock; `code`: its exit code, 128 + N if signal N killed it, as in a
    shell, and 127 if it could not be started.
    """

    def __init__(
        self, rank: int, command: Sequence[str], cwd: str, environment: Mapping[str, str], umask: int = -1
    ) -> None:
        self.rank, self.code, self.ended = rank, 0, 0.0
        self._unended = {"out": b"", "err": b""}
        self._popen: subprocess.Popen[bytes] | None = None
        self.streams: dict[str, IO[bytes]] = {}
        try:
            self._popen = subprocess.Popen(
                command,
                env={**environment, "PYTHONUNBUFFERED": "1"},
                cwd=cwd if os.path.isdir(cwd) else None,  # noqa: PTH112
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                umask=umask,  # -1: that of this process
                preexec_fn=_end_with_parent,
            )
        except OSError as error:
            self._unended["err"] = f"hvd-transformer: {command[0]}: cannot be started: {error.strerror}\n".encode()
            return
        assert self._popen.stdout and self._popen.stderr
        self.streams = {"out": self._popen.stdout, "err": self._popen.stderr}
        for stream in self.streams.values():
            os.set_blocking(stream.fileno(), False)

    def signal(self, number: int) -> None:
        """Send a signal to the process, unless it has ended."""
        if self._popen is not None and not self.ended:
            self._popen.send_signal(number)

    def kill(self) -> None:
        """Kill the process and everything that it has started."""
        if self._popen is not None and not self.ended:
            with suppress(ProcessLookupError):
                os.killpg(self._popen.pid, signal.SIGKILL)

    def reap(self) -> bool:
        """Whether the process has ended; what it has started ends with it."""
        code = 127 if self._popen is None else self._popen.poll()
        if code is None:
            return False
        self.kill()
        self.code, self.ended = code if code >= 0 else 128 - code, time.monotonic()
        return True

    def read(self, name: str) -> list[dict[str, Any]]:
        """Whole lines of new output; an unended line is kept for later. At its end the stream is closed."""
        data = self._data(name)
        if data is None:
            return []
        text = self._unended[name] + data
        whole = text.rfind(b"\n") + 1
        if not data or (not whole and len(text) > _LINE_BYTES):
            whole = len(text)
        self._unended[name] = text[whole:]
        return self._printed(name, text[:whole])

    def read_rest(self) -> list[dict[str, Any]]:
        """All that an ended process has printed, also without a last line end."""
        result = []
        for name in ("out", "err"):
            while name in self.streams and (data := self._data(name)):
                self._unended[name] += data
            if name in self.streams:  # another process still holds the other end
                self.streams.pop(name).close()
            result += self._printed(name, self._unended[name])
            self._unended[name] = b""
        return result

    def _data(self, name: str) -> bytes | None:
        """What can be read now, up to a limit; empty at the end of the stream, None if there is nothing."""
        try:
            data = os.read(self.streams[name].fileno(), _READ_BYTES)
        except BlockingIOError:
            return None
        if not data:
            self.streams.pop(name).close()
        return data

    def _printed(self, name: str, data: bytes) -> list[dict[str, Any]]:
        return [{"rank": self.rank, "stream": name, "text": data.decode(errors="replace")}] if data else []


def _end_with_parent() -> None:
    """In the child: ask for SIGKILL when the agent dies, which then could not end it."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
