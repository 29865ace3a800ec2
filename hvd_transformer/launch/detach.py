"""A launcher that goes on without its terminal: `launch --detach` starts it in a session of its own.

Until the ranks run it keeps the terminal, so that whatever is wrong is seen there.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

BEGUN = "HVD_TRANSFORMER_BEGUN"  # the descriptor, of a pipe or a file, to which it writes "!" once the ranks run


def is_detached() -> bool:
    """Whether this process is such a launcher."""
    return BEGUN in os.environ


def detach(words: Sequence[str]) -> int | None:
    """Start `hvd-transformer` with these arguments; returns its exit code, or None as soon as its ranks run."""
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as told:
        launcher = subprocess.Popen(
            # No PYTHONSAFEPATH: a discovery script may import what is beside it.
            [
                sys.executable,
                *(["-P"] if sys.version_info >= (3, 11) else []),
                "-m",
                "hvd_transformer.cli.main",
                *words,
            ],
            env={**os.environ, BEGUN: str(writing)},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=[writing],
        )
        os.close(writing)
        try:
            return None if told.read(1) else launcher.wait()
        except KeyboardInterrupt:  # which does not reach another session
            launcher.terminate()
            return launcher.wait()


def leave_terminal() -> None:
    """Tell the process that started this one that the ranks run, and print nothing more.

    The job goes on if that process has ended, or its disk is full.
    """
    if (pipe := os.environ.pop(BEGUN, None)) is None:
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (1, 2):
        os.dup2(nowhere, number)
    os.close(nowhere)
    with suppress(OSError):
        os.write(int(pipe), b"!")
    os.close(int(pipe))
