"""Runs one job under horovodrun, once: starts it, passes signals on, and finds out how its ranks ended."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from types import FrameType
from typing import IO, NamedTuple

from hvd_transformer.errors import STALLED
from hvd_transformer.launch.agents import Beat, Failure, HostAgents, Show
from hvd_transformer.launch.horovodrun_command import Horovodrun

_SAVE_SECONDS = 120.0  # that ranks which were asked to stop have to save
_SILENT_SECONDS = 10.0  # behind its limit: a rank whose watchdog does not run, or that was stopped alone
_FAIL_SECONDS = 1.0  # that ranks have to end by themselves after one has failed: their messages tell more
_STACK_SECONDS = 0.5  # that ranks have to write their stacks
_END_SECONDS = 10.0  # that horovodrun has to end after its ranks
_TOLD_SECONDS = 2.0  # the same where it was told to
_LOOK_SECONDS = 0.05


class AttemptResult(NamedTuple):
    """How a job ended."""

    code: int  # of the rank that failed first; 1 where horovodrun failed and no rank
    first: Failure | None
    lost: list[str]  # hosts that were heard of no more
    stopped: bool  # ranks were asked to save and end
    beats: dict[int, Beat]  # the last heartbeat of each rank
    said: str  # by horovodrun itself


class Stop:
    """Counts the signals that ask this process to end, from construction to `restore`."""

    def __init__(self) -> None:
        self.count = 0
        self._previous = {
            number: signal.signal(number, self._note)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if signal.getsignal(number) != signal.SIG_IGN  # as nohup wants it
        }
        # A launcher that sleeps is a launcher that is gone, for the hosts.
        self._previous[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, signal.SIG_IGN)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1

    def restore(self) -> None:
        """Puts the earlier handlers back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)


def run_attempt(
    horovodrun: Horovodrun,
    worker: Sequence[str],
    values: Mapping[str, str],
    environment: Mapping[str, str],
    stop: Stop,
    show: Show,
    look: Callable[[HostAgents], bool] = lambda folder: False,
) -> AttemptResult:
    """Runs `worker` on every rank until all have ended; nothing of the job is left on any host.

    `environment` is horovodrun's own and seen by everyone on the hosts; `values` are for the ranks alone. A signal
    that `stop` counts lets the ranks save and end, a second one ends them at once; and so does `look`, which is called
    all the time, where it returns true. `show` gets what the ranks print.

    Raises `HostLost` for a host that cannot be used.
    """
    folder = HostAgents([host.name for host in horovodrun.hosts], horovodrun.ssh, values, environment, show)
    with TemporaryFile() as said:
        try:
            words = [sys.executable, "-m", "hvd_transformer.launch.rank_runner", folder.path, *worker]
            # In a session of its own, as mpirun and its ranks end only where the whole group gets the signal.
            process = subprocess.Popen(
                _command(horovodrun.words(words), environment),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            stopped = False
            try:
                folder.wait_ready()  # while horovodrun starts, which takes longer
                stopped = _wait(process, folder, stop, look)
            finally:
                lost, beats = folder.lost, folder.beats
                failures = folder.close()
                code = _end(process, told=bool(lost or failures))
        finally:
            folder.close()
        silent = [beat for beat in beats.values() if _is_silent(beat)]
        failures += [Failure(0.0, beat["rank"], STALLED, beat["host"]) for beat in silent]
        first = failures[0] if failures else None
        return AttemptResult(first.code if first else int(code != 0), first, lost, stopped, beats, _text(said))


def _command(horovodrun: list[str], environment: Mapping[str, str]) -> list[str]:
    """This Python's own horovodrun is started without its question for what it was built with (`controller.py`)."""
    program = shutil.which(horovodrun[0], path=environment["PATH"])
    if program is None or Path(program).parent != Path(sys.executable).parent:
        return horovodrun
    return [sys.executable, "-m", "hvd_transformer.comm.horovodrun", *horovodrun[1:]]


def _wait(process: subprocess.Popen[bytes], folder: HostAgents, stop: Stop, look: Callable[[HostAgents], bool]) -> bool:
    """Until all has ended or has to be ended; whether the ranks were asked to stop."""
    deadline: float | None = None
    stopped = False
    while process.poll() is None and (deadline is None or time.monotonic() < deadline):
        if any(map(_is_silent, folder.beats.values())):
            folder.write_stacks()
            time.sleep(_STACK_SECONDS)
            break
        if folder.lost or stop.count > 1:
            break
        wanted = look(folder) or stop.count > 0
        if wanted and not stopped:
            stopped = True
            ranks = folder.stop()
            if stop.count:
                print(f"{ranks} ranks save and end; a second signal ends them at once", file=sys.stderr, flush=True)
            deadline = time.monotonic() + _SAVE_SECONDS
        if stopped and not folder.running:  # the last one has saved
            break
        if deadline is None and folder.failures:
            if folder.failures[0].code == STALLED:  # ranks of other hosts may not know yet
                folder.write_stacks()
            deadline = time.monotonic() + _FAIL_SECONDS
        time.sleep(_LOOK_SECONDS)
    return stopped


def _is_silent(beat: Beat) -> bool:
    return float(beat["age"]) > float(beat["limit_seconds"]) + _SILENT_SECONDS


def _end(process: subprocess.Popen[bytes], told: bool) -> int:
    """Waits for horovodrun and all that it started in its session, whose ranks have ended; its exit code."""
    if told:  # it would wait for hosts that are gone, or for their ssh
        _signal_group(process, signal.SIGTERM)
    deadline = time.monotonic() + (_TOLD_SECONDS if told else _END_SECONDS)
    while process.poll() is None or _group_lives(process.pid):
        if time.monotonic() > deadline:
            _signal_group(process, signal.SIGKILL)
            break
        time.sleep(_LOOK_SECONDS)
    return process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _group_lives(group: int) -> bool:
    """Whether any process is left in the group that does not only wait to be reaped."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, its_group, *_ = file.read_text(encoding="utf-8").rpartition(")")[2].split()
            if its_group == str(group) and state not in "ZX":
                return True
    return False


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
