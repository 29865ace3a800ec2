"""File operations that may take minutes or never end, as on a network file system whose server is away."""

import threading
from collections.abc import Callable
from queue import SimpleQueue


class StorageThread:
    """Runs actions on a thread of its own, one at a time, so that nobody else waits for a disk."""

    def __init__(self) -> None:
        self._actions: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        threading.Thread(target=self._run, name="storage", daemon=True).start()

    def start(self, action: Callable[[], object]) -> bool:
        """Run an action some time soon; returns False, and does not, while an earlier one has not ended."""
        if not self._idle.is_set():
            return False
        self._idle.clear()
        self._actions.put(action)
        return True

    def answers(self, action: Callable[[], object], seconds: float) -> bool:
        """Whether an action ends within `seconds`, and those before it."""
        return self._idle.wait(seconds) and self.start(action) and self._idle.wait(seconds)

    def _run(self) -> None:
        while True:
            try:
                self._actions.get()()
            except OSError:  # a full disk answers, too
                pass
            finally:
                self._idle.set()
