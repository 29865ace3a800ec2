"""The node agent's side of its connection to the launcher: standard input and output, which never make it wait."""

import json
import os
import selectors
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_READ_BYTES = 1 << 16


class LauncherPipe:
    """Calls `obey` for each order that comes, when `selector` says so (its keys' data are functions to call)."""

    def __init__(self, selector: selectors.BaseSelector, obey: Callable[[dict[str, Any]], None]) -> None:
        self._selector, self._obey = selector, obey
        self._unread, self._unsent, self._gone = b"", b"", False
        self._heard = time.monotonic()
        self._in, self._out = sys.stdin.fileno(), sys.stdout.fileno()
        os.set_blocking(self._out, False)
        selector.register(self._in, selectors.EVENT_READ, self._read)

    def lives(self, seconds: float) -> bool:
        """Whether the launcher has spoken within `seconds` and is connected."""
        return not self._gone and time.monotonic() - self._heard < seconds

    def excuse(self, seconds: float) -> None:
        """Do not count `seconds` for which this process was suspended."""
        self._heard = min(time.monotonic(), self._heard + seconds)

    @property
    def unsent(self) -> int:
        """Bytes that wait to be sent."""
        return len(self._unsent)

    def say(self, message: dict[str, Any]) -> None:
        """Send a message as far as the launcher takes it now, and the rest later."""
        waiting = bool(self._unsent)
        self._unsent += json.dumps(message).encode() + b"\n"
        if not waiting:
            self._send()
            if self._unsent:
                self._selector.register(self._out, selectors.EVENT_WRITE, self._send_rest)

    def _send_rest(self) -> None:
        self._send()
        if not self._unsent:
            self._selector.unregister(self._out)

    def _send(self) -> None:
        try:
            with suppress(BlockingIOError):
                while self._unsent:
                    self._unsent = self._unsent[os.write(self._out, self._unsent[: 1 << 16]) :]
        except OSError:  # the launcher is gone
            self._gone, self._unsent = True, b""

    def _read(self) -> None:
        with suppress(BlockingIOError):
            data = os.read(self._in, _READ_BYTES)
            if not data:
                self._gone = True
                self._selector.unregister(self._in)
                return
            self._heard = time.monotonic()
            *lines, self._unread = (self._unread + data).split(b"\n")
            for line in lines:
                self._obey(json.loads(line))
