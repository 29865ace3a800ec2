"""Settings of this process: signals that request a stop, the memory allocator, and garbage collection."""

import ctypes
import gc
import os
import signal
from _thread import start_new_thread
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType


class StopRequest:
    """Records the first SIGINT or SIGTERM; a second Ctrl-C interrupts at once."""

    def __init__(self) -> None:
        self.signal: str | None = None
        self.on_first: Callable[[], object] | None = None  # called at the first signal, in a thread of its own
        self._previous = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}

    def __bool__(self) -> bool:
        return self.signal is not None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        is_first, self.signal = self.signal is None, signal.Signals(number).name
        if is_first and self.on_first is not None:
            # The signal may have interrupted a print, within which another one fails or waits forever. Not `threading`,
            # whose locks may be held likewise.
            with suppress(RuntimeError):  # no more threads
                start_new_thread(self.on_first, ())

    def end_at_once(self) -> None:
        """Let a signal end this process at once from now on: there is nothing to save."""
        for number in self._previous:
            signal.signal(number, signal.SIG_DFL)

    def restore(self) -> None:
        """Restore the earlier signal handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)


# Parameters of mallopt(3), from glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
# Larger blocks are mapped and unmapped one by one. This is where glibc's own sliding threshold ends up.
LARGEST_KEPT_BLOCK = 32 * 2**20
# The largest free end of the heap that is kept.
KEPT_END = 2**30


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory; False if the user has set the allocator, or the C library is not glibc."""
    chosen = any(name.startswith("MALLOC_") for name in os.environ)
    if chosen or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, LARGEST_KEPT_BLOCK)) and bool(mallopt(_TRIM_THRESHOLD, KEPT_END))


def tune_memory() -> None:
    """Let the steps of a job share their memory: `keep_freed_memory`, and small caches of oneDNN."""
    from hvd_transformer.nn.matmul import limit_onednn_caches  # imports torch, unlike the rest of this file

    keep_freed_memory()
    limit_onednn_caches()


@contextmanager
def only_new_garbage() -> Iterator[None]:
    """Within it, Python's garbage collector looks at objects made since it was entered only.

    torch's import alone leaves 300,000 objects. A full collection visits each of them, on each rank at another step,
    and the other ranks wait. In a process that has frozen its objects itself, they stay frozen.
    """
    gc.collect()
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
