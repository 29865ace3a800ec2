"""Runs one job under horovodrun: starts it, passes signals on, and finds out how its ranks ended."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import NamedTuple

from hvd_transformer.launch.command import Horovodrun
from hvd_transformer.launch.folder import Failure, JobFolder

_SAVE_SECONDS = 120.0  # that ranks which were asked to stop have to save
_END_SECONDS = 20.0  # that horovodrun has to end; it gives its ranks up to ten


class Ended(NamedTuple):
    """How a job ended."""

    code: int  # of the rank that failed first; 1 where horovodrun failed and no rank
    first: Failure | None
    stopped: bool  # by a signal to this process


def run(
    horovodrun: Horovodrun, worker: Sequence[str], values: Mapping[str, str], environment: Mapping[str, str]
) -> Ended:
    """Runs `worker` on every rank until all have ended; nothing of the job is left on any host.

    `environment` is horovodrun's own and seen by everyone on the hosts; `values` are for the ranks alone. SIGINT,
    SIGTERM and SIGHUP let the ranks save and end; a second one ends them at once.

    Raises `UserError` for a host that cannot be used.
    """
    stop = _Stop()
    try:
        folder = JobFolder([host.name for host in horovodrun.hosts], horovodrun.ssh, values, environment)
        failures: list[Failure] = []
        try:
            words = [sys.executable, "-m", "hvd_transformer.launch.worker", folder.path, *worker]
            # In a session of its own, as mpirun and its ranks end only where the whole group gets the signal.
            process = subprocess.Popen(
                horovodrun.words(words), env=environment, stdin=subprocess.DEVNULL, start_new_session=True
            )
            _wait(process, folder, stop)
            code = _end(process)
        finally:
            failures = folder.close()
    finally:
        stop.restore()
    first = failures[0] if code and failures else None
    return Ended(first.code if first else int(code != 0), first, stop.count > 0)


def _wait(process: subprocess.Popen[bytes], folder: JobFolder, stop: "_Stop") -> None:
    """Until horovodrun has ended, or was told to after ranks were asked to stop and did not."""
    deadline: float | None = None
    while process.poll() is None:
        if stop.count and deadline is None:
            ranks = folder.stop()
            print(f"{ranks} ranks save and end; a second signal ends them at once", file=sys.stderr, flush=True)
            deadline = time.monotonic() + (_SAVE_SECONDS if ranks else 0)
        if deadline is not None and (stop.count > 1 or time.monotonic() > deadline):
            _signal_group(process, signal.SIGTERM)
            return
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.1)


def _end(process: subprocess.Popen[bytes]) -> int:
    """Waits for horovodrun and all that it started in its session; its exit code."""
    deadline = time.monotonic() + _END_SECONDS
    while process.poll() is None or _signal_group(process, 0):
        if time.monotonic() > deadline:
            _signal_group(process, signal.SIGKILL)
            break
        time.sleep(0.05)
    return process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: int) -> bool:
    """Whether there is any process left in the group."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return False
    return True


class _Stop:
    """Counts the signals that ask this process to end."""

    def __init__(self) -> None:
        self.count = 0
        self._previous = {
            number: signal.signal(number, self._note)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if signal.getsignal(number) != signal.SIG_IGN  # as nohup wants it
        }

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1

    def restore(self) -> None:
        """Puts the earlier handlers back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
