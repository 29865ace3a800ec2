"""SIGTERM as schedulers send it, to every process of a job at once: what the ranks need to save must outlive it.

Slurm does so at `scancel`, a requeue and the time limit. A child inherits which signals its parent's thread blocks.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def sigterm_blocked() -> Iterator[None]:
    """In this thread and the children that it starts meanwhile. Another thread gets this process's own SIGTERM."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def unblock_sigterm() -> None:
    """In a child that handles SIGTERM itself."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
