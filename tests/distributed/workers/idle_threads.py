"""How often this rank's threads wake while it has nothing to do."""

import threading
import time
from contextlib import suppress
from pathlib import Path

SECONDS = 2


def wake_ups() -> list[int]:
    """Of each thread but this one, a second."""
    before = _counts()
    time.sleep(SECONDS)
    after = _counts()
    return [(count - before[thread]) // SECONDS for thread, count in after.items() if thread in before]


def _counts() -> dict[str, int]:
    found = {}
    for status in Path("/proc/self/task").glob("*/status"):
        if status.parent.name != str(threading.get_native_id()):
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
                found[status.parent.name] = int(lines["voluntary_ctxt_switches"])
    return found
