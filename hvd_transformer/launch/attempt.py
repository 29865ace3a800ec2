"""One start of a job under horovodrun, to its end: forwards signals, and finds out how the ranks ended."""

import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from types import FrameType, MappingProxyType
from typing import IO, Any, NamedTuple

from hvd_transformer.errors import STALLED
from hvd_transformer.launch.agents import Beat, Failure, HostAgents
from hvd_transformer.launch.connection.connections import HostConnections
from hvd_transformer.launch.horovodrun_command import Horovodrun
from hvd_transformer.launch.root_cause import root_cause
from hvd_transformer.launch.sigterm import sigterm_blocked

_FAIL_SECONDS = 1.0  # for ranks to exit by themselves after another rank failed: their messages are more specific
_STACK_SECONDS = 0.5  # for ranks to write their stacks
_END_SECONDS = 10.0  # for horovodrun to exit after its ranks
_TERMINATED_SECONDS = 2.0  # for horovodrun to exit after SIGTERM
_SAME_SECONDS = 5.0  # in which several SIGTERM are one: of a scheduler, and of its script
_LOOK_SECONDS = 0.05

Show = Callable[[int, str, str], object]  # rank, "out" or "err", printed text


class AttemptResult(NamedTuple):
    """How one start of a job ended."""

    code: int  # exit code of the rank that failed first; 1 if horovodrun failed without a failed rank
    first: Failure | None
    lost: Mapping[str, str]  # hosts that no longer answered, and their last words
    stopped: bool  # the ranks were asked to save and exit
    beats: dict[int, Beat]  # the last heartbeat of each rank
    said: str  # output of horovodrun itself
    leaving: Mapping[str, str] = MappingProxyType({})  # hosts that are about to end, and that in words
    at_fault: str | None = None  # the host, by its name on the command line; None: not known
    saved: bool = False  # asked to save and exit, all ranks did in time
    begun: bool = True  # whether a rank has run


class Stop:
    """Counts the signals that ask this process to exit, from construction to `restore`."""

    def __init__(self) -> None:
        self.count = 0
        self.by: str | None = None  # who asked first: a signal's name, or "request"
        self._ended = -math.inf  # when the last signal was counted that is not Ctrl-C
        self._previous = {
            number: signal.signal(number, self._note)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if signal.getsignal(number) != signal.SIG_IGN  # ignored under nohup
        }
        # To the node agents a suspended launcher looks like a dead one.
        self._previous[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, signal.SIG_IGN)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        self.by = self.by or signal.Signals(number).name
        # One request: a scheduler and its script, or a closed terminal and its shell, may both send one.
        if number == signal.SIGINT:
            self.count += 1
        elif now - self._ended > _SAME_SECONDS:
            self.count, self._ended = self.count + 1, now

    def request(self, signals: int) -> None:
        """Do as these many signals do in all. Asking again changes nothing."""
        self.by = self.by or "request"
        self.count = max(self.count, signals)

    def restore(self) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)


def run_attempt(
    horovodrun: Horovodrun,
    worker: Sequence[str],
    values: Mapping[str, str],
    environment: Mapping[str, str],
    connections: HostConnections,
    stop: Stop,
    show: Show,
    say: Callable[[str], object],
    look: Callable[[HostAgents], bool] = lambda agents: False,
) -> AttemptResult:
    """Run `worker` on every rank until all have ended, and leave no rank behind on any host.

    `environment` is that of horovodrun, visible to everyone on the hosts; `values` go to the ranks only. After a signal
    that `stop` counts, the ranks save and exit; a second signal kills them. They also save and exit when `look`, which
    is polled, returns true. `show` receives what the ranks print, and `say` what the launcher has to say.

    Raises `HostLost` for a host that cannot be used, and `UserError` if the hosts do not fit together.
    """
    agents = HostAgents([host.name for host in horovodrun.hosts], connections)
    with TemporaryFile() as said, closing(agents):
        interfaces = agents.interfaces(horovodrun.network_interface)
        process = _start(replace(horovodrun, network_interface=interfaces), worker, connections, environment, said)
        stopped = saved = False
        try:
            agents.begin(values, {host.name: host.gpus for host in horovodrun.hosts if host.gpus})
            agents.wait_ready()
            plan = None if horovodrun.mpi else _plan(process, stop)
            if plan is not None:
                order = {"command": list(worker), "cwd": str(Path.cwd()), "environment": plan["environment"]}
                agents.start(order, plan["ranks"])
            if horovodrun.mpi or plan is not None or stop.count:
                stopped = _wait(process, horovodrun.num_ranks, agents, stop, show, say, look, connections.limits.save)
            saved = stopped and not agents.running
        finally:
            leaving = dict(agents.leaving)
            lost = {host: why for host, why in agents.lost.items() if host not in leaving}
            failures = agents.close()
            _show(agents, show)
            code = _end(process, terminate=bool(lost or failures))
        said.seek(0)
        text = said.read().decode(errors="replace")
    beats, finished = dict(agents.beats), agents.num_ended == horovodrun.num_ranks
    cause = root_cause(failures, beats, agents.is_silent)
    code = cause.first.code if cause.first else int(code != 0 or not finished)
    return AttemptResult(code, cause.first, lost, stopped, beats, text, leaving, cause.host, saved, agents.have_begun)


def _start(
    horovodrun: Horovodrun,
    worker: Sequence[str],
    connections: HostConnections,
    environment: Mapping[str, str],
    said: IO[bytes],
) -> subprocess.Popen[bytes]:
    """Start horovodrun: over MPI with the ranks' runners, over gloo with its rendezvous alone."""
    if horovodrun.mpi:
        worker = [sys.executable, "-m", "hvd_transformer.launch.node.rank_runner", connections.folder, *worker]
    # mpirun passes SIGTERM on to its ranks; the rendezvous ends with its standard input.
    with nullcontext() if horovodrun.mpi else sigterm_blocked():
        return subprocess.Popen(
            [sys.executable, "-m", "hvd_transformer.comm.horovodrun", *horovodrun.words(worker)[1:]],
            env=environment,
            stdin=subprocess.DEVNULL if horovodrun.mpi else subprocess.PIPE,
            stdout=said if horovodrun.mpi else subprocess.PIPE,
            stderr=said,
            # In its own session: mpirun and its ranks only exit if the whole process group is signalled.
            start_new_session=True,
        )


def _plan(process: subprocess.Popen[bytes], stop: Stop) -> dict[str, Any] | None:
    """What `comm/horovodrun.py` prints over gloo; None if it has failed, or if it is asked to stop before."""
    assert process.stdout
    while not select.select([process.stdout], [], [], _LOOK_SECONDS)[0]:  # a file system may stand still
        if stop.count:
            return None
    line = process.stdout.readline()
    return dict(json.loads(line)) if line.endswith(b"\n") else None


def _wait(
    process: subprocess.Popen[bytes],
    num_ranks: int,
    agents: HostAgents,
    stop: Stop,
    show: Show,
    say: Callable[[str], object],
    look: Callable[[HostAgents], bool],
    save_seconds: float,
) -> bool:
    """Wait until all ranks have ended or must be killed; return whether they were asked to stop."""
    deadline, stopped = math.inf, False
    while process.poll() is None and agents.num_ended < num_ranks and time.monotonic() < deadline:
        _show(agents, show)
        if agents.silent:
            agents.write_stacks()
            time.sleep(_STACK_SECONDS)
            break
        if agents.lost.keys() - agents.leaving.keys() or stop.count > 1:
            break
        if (look(agents) or stop.count or agents.leaving) and not stopped:
            stopped = True
            ranks = agents.stop()
            if stop.count:
                say(f"saving on {ranks} rank{'' if ranks == 1 else 's'}; a second signal kills them")
            deadline = time.monotonic() + save_seconds
        if stopped and not agents.running:  # the last rank has saved
            break
        if deadline == math.inf and agents.failures:
            if agents.failures[0].code == STALLED:  # ranks on other hosts may not know yet
                agents.write_stacks()
            deadline = time.monotonic() + _FAIL_SECONDS
        time.sleep(_LOOK_SECONDS)
    return stopped


def _show(agents: HostAgents, show: Show) -> None:
    for printed in agents.printed():
        show(*printed)


def _end(process: subprocess.Popen[bytes], terminate: bool) -> int:
    """Wait for horovodrun and its session, whose ranks have ended; return its exit code."""
    if process.stdin is not None:  # the end of the rendezvous
        process.stdin.close()
    if process.stdout is not None:
        process.stdout.close()
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
            text = file.read_text(encoding="utf-8", errors="replace")  # a name may be cut within a character
            state, _, its_group, *_ = text.rpartition(")")[2].split()
            if its_group == str(group) and state not in "ZX":
                return True
    return False
