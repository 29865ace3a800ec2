"""Writes to terminals and disks that may take nothing for a while, without anybody waiting for them."""

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

_MOST_BYTES = 1 << 26  # that wait to be written


class Outlet:
    """Runs actions in order on a thread of its own, from construction to `close`."""

    def __init__(self, name: str) -> None:
        self._actions: SimpleQueue[tuple[Callable[[], object], int] | None] = SimpleQueue()
        self._lock, self._waiting = threading.Lock(), 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, action: Callable[[], object], size: int = 0) -> bool:
        """Run an action after those before it. `size`: the bytes of what it writes, if it may be left out.

        Returns False, and leaves it out, if too much waits already.
        """
        with self._lock:
            if size and self._waiting + size > _MOST_BYTES:
                return False
            self._waiting += size
        self._actions.put((action, size))
        return True

    def close(self, seconds: float) -> bool:
        """Take nothing more; returns whether everything was written within `seconds`."""
        self._actions.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (found := self._actions.get()) is not None:
            action, size = found
            with suppress(OSError):  # a closed terminal, a full disk
                action()
            with self._lock:
                self._waiting -= size
