"""The most anonymous memory that a process holds while it does something: what it allocates, without mapped files."""

import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType

_SECONDS = 0.005


def anonymous_bytes(pid: int | str = "self") -> int:
    """Resident anonymous memory of a process; 0 if it has ended."""
    with suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])
    return 0


class PeakMemory:
    """Samples this process's anonymous memory from `__enter__` to `__exit__`; `bytes` is the most, above the start."""

    def __enter__(self) -> "PeakMemory":
        self._before = self._most = anonymous_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        self._most = max(self._most, anonymous_bytes())

    @property
    def bytes(self) -> int:
        return self._most - self._before

    def _sample(self) -> None:
        while not self._done.wait(_SECONDS):
            self._most = max(self._most, anonymous_bytes())
