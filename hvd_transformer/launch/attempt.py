"""One start of a job under horovodrun, to its end: forwards signals, and finds out how the ranks ended."""

import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from tempfile import TemporaryFile
from types import FrameType
from typing import NamedTuple

from hvd_transformer.errors import STALLED
from hvd_transformer.launch.agents import Beat, Failure, HostAgents, Show
from hvd_transformer.launch.horovodrun_command import Horovodrun

_SAVE_SECONDS = 120.0  # for ranks that were asked to stop to save
_SILENT_SECONDS = 10.0  # past a rank's own limit: its watchdog does not run, or its process was suspended
_FAIL_SECONDS = 1.0  # for ranks to exit by themselves after another rank failed: their messages are more specific
_STACK_SECONDS = 0.5  # for ranks to write their stacks
_END_SECONDS = 10.0  # for horovodrun to exit after its ranks
_TERMINATED_SECONDS = 2.0  # for horovodrun to exit after SIGTERM
_LOOK_SECONDS = 0.05


class AttemptResult(NamedTuple):
    """How one start of a job ended."""

    code: int  # exit code of the rank that failed first; 1 if horovodrun failed without a failed rank
    first: Failure | None
    lost: list[str]  # hosts that no longer answered
    stopped: bool  # the ranks were asked to save and exit
    beats: dict[int, Beat]  # the last heartbeat of each rank
    said: str  # output of horovodrun itself


class Stop:
    """Counts the signals that ask this process to exit, from construction to `restore`."""

    def __init__(self) -> None:
        self.count = 0
        self._previous = {
            number: signal.signal(number, self._note)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if signal.getsignal(number) != signal.SIG_IGN  # ignored under nohup
        }
        # To the node agents a suspended launcher looks like a dead one.
        self._previous[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, signal.SIG_IGN)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1

    def restore(self) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)


def run_attempt(
    horovodrun: Horovodrun,
    worker: Sequence[str],
    values: Mapping[str, str],
    environment: Mapping[str, str],
    stop: Stop,
    show: Show,
    look: Callable[[HostAgents], bool] = lambda agents: False,
) -> AttemptResult:
    """Run `worker` on every rank until all have ended, and leave nothing of the job behind on any host.

    `environment` is that of horovodrun, visible to everyone on the hosts; `values` go to the ranks only. After a signal
    that `stop` counts, the ranks save and exit; a second signal kills them. They also save and exit when `look`, which
    is polled, returns true. `show` receives what the ranks print.

    Raises `HostLost` for a host that cannot be used.
    """
    agents = HostAgents([host.name for host in horovodrun.hosts], horovodrun.ssh, values, environment, show)
    with closing(agents), TemporaryFile() as said:
        words = [sys.executable, "-m", "hvd_transformer.launch.rank_runner", agents.path, *worker]
        # In its own session: mpirun and its ranks only exit if the whole process group is signalled.
        process = subprocess.Popen(
            _command(horovodrun.words(words), environment),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            agents.wait_ready()  # horovodrun, which starts meanwhile, takes longer
            stopped = _wait(process, agents, stop, look)
        finally:
            lost, beats = agents.lost, agents.beats
            failures = agents.close()
            code = _end(process, terminate=bool(lost or failures))
        said.seek(0)
        text = said.read().decode(errors="replace")
    failures += [Failure(0.0, beat["rank"], STALLED, beat["host"]) for beat in beats.values() if _is_silent(beat)]
    first = failures[0] if failures else None
    return AttemptResult(first.code if first else int(code != 0), first, lost, stopped, beats, text)


def _command(horovodrun: list[str], environment: Mapping[str, str]) -> list[str]:
    """Replace this Python's own horovodrun with `comm/horovodrun.py`, which saves an import of torch."""
    program = shutil.which(horovodrun[0], path=environment["PATH"])
    if program is None or Path(program).parent != Path(sys.executable).parent:
        return horovodrun
    return [sys.executable, "-m", "hvd_transformer.comm.horovodrun", *horovodrun[1:]]


def _wait(process: subprocess.Popen[bytes], agents: HostAgents, stop: Stop, look: Callable[[HostAgents], bool]) -> bool:
    """Wait until all ranks have ended or must be killed; return whether they were asked to stop."""
    deadline, stopped = math.inf, False
    while process.poll() is None and time.monotonic() < deadline:
        if any(map(_is_silent, agents.beats.values())):
            agents.write_stacks()
            time.sleep(_STACK_SECONDS)
            break
        if agents.lost or stop.count > 1:
            break
        if (look(agents) or stop.count) and not stopped:
            stopped = True
            ranks = agents.stop()
            if stop.count:
                print(f"{ranks} ranks are saving; a second signal kills them", file=sys.stderr, flush=True)
            deadline = time.monotonic() + _SAVE_SECONDS
        if stopped and not agents.running:  # the last rank has saved
            break
        if deadline == math.inf and agents.failures:
            if agents.failures[0].code == STALLED:  # ranks on other hosts may not know yet
                agents.write_stacks()
            deadline = time.monotonic() + _FAIL_SECONDS
        time.sleep(_LOOK_SECONDS)
    return stopped


def _is_silent(beat: Beat) -> bool:
    return float(beat["age"]) > float(beat["limit_seconds"]) + _SILENT_SECONDS


def _end(process: subprocess.Popen[bytes], terminate: bool) -> int:
    """Wait for horovodrun and its session, whose ranks have ended; return its exit code."""
    if terminate:  # it would wait for lost hosts, or for the ssh to them
        _signal_group(process, signal.SIGTERM)
    deadline = time.monotonic() + (_TERMINATED_SECONDS if terminate else _END_SECONDS)
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
    """Whether the process group has any process left that is not a zombie."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, its_group, *_ = file.read_text(encoding="utf-8").rpartition(")")[2].split()
            if its_group == str(group) and state not in "ZX":
                return True
    return False
