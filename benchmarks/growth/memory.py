"""Anonymous memory of this process: what it holds itself, without mapped files."""

import threading
from collections.abc import Callable
from pathlib import Path

_STATUS = Path("/proc/self/status")
_INTERVAL = 0.02  # seconds


def anonymous() -> int:
    """Bytes now."""
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("RssAnon"))
    return 1024 * int(line.split()[1])


def added_at_most(action: Callable[[], object]) -> int:
    """The most bytes that an action adds, looked at every few milliseconds."""
    before, most, done = anonymous(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(_INTERVAL):
            most = max(most, anonymous() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        action()
    finally:
        done.set()
        watcher.join()
    return max(most, anonymous() - before)
