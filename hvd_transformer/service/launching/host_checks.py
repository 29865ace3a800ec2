"""Which hosts cannot be used now, and why: the launcher's own examination, again and again, on a thread of its own.

Every host is examined when it is new, then every minute, and at once after an attempt could not use it. One ssh per
host stays open in between. A host with ranks is not taken to be down only because it is too busy to answer.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from hvd_transformer.errors import UserError
from hvd_transformer.launch.connection.connections import HostConnections
from hvd_transformer.launch.connection.ssh import Ssh
from hvd_transformer.launch.doctor.examine import Admission, Examination
from hvd_transformer.launch.doctor.findings import Answer, Finding, Job
from hvd_transformer.launch.horovodrun_command import launcher_environment
from hvd_transformer.launch.hostfile import Host as LaunchHost
from hvd_transformer.service.jobs import Host

_CHECK_SECONDS = 60.0
_END_SECONDS = 2.0
_LOOK_SECONDS = 1.0  # between two looks at which hosts there are

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HostState:
    """What the last examination of a host has found. `threads`: CPU threads per slot, 0 if not known."""

    down: str = ""  # why it cannot be used; empty: it can
    findings: Sequence[str] = ()  # all that is worth a look, in words
    threads: int = 0
    load: float | None = None  # average of a minute


class HostChecks:
    """Examines hosts from `start` to `close`.

    `hosts`: those of the service; `busy`: the names of those with ranks; `folder`: where runs are written. `changed` is
    called when `down` has changed, or the threads of a host.
    """

    def __init__(
        self,
        hosts: Callable[[], Sequence[Host]],
        folder: Path,
        busy: Callable[[], Collection[str]] = tuple,
        changed: Callable[[], object] = lambda: None,
        ssh: Ssh | None = None,
    ) -> None:
        self._hosts, self._busy, self._changed = hosts, busy, changed
        self._folder, self._ssh = folder, ssh or Ssh()
        self._states: Mapping[str, HostState] = {}
        self._suspects: dict[str, str] = {}  # hosts that are to be examined at once, and why
        self._lock = threading.Lock()
        self._woken, self._closed = threading.Event(), False
        self._examined: Sequence[tuple[str, int, tuple[int, ...]]] = ()
        self._due = 0.0
        self._thread = threading.Thread(target=self._run, name="host checks", daemon=True)

    def states(self) -> Mapping[str, HostState]:
        """What is known of each host that has been examined."""
        return self._states

    def down(self) -> dict[str, str]:
        """The hosts that cannot be used now, and why."""
        return {name: state.down for name, state in self._states.items() if state.down}

    def suspect(self, hosts: Mapping[str, str]) -> None:
        """Take hosts that an attempt could not use for down, for these reasons, until they have been examined."""
        with self._lock:
            self._suspects |= hosts
            self._publish(self._states)
        self._woken.set()

    def start(self) -> None:
        """Begin to examine."""
        self._thread.start()

    def close(self) -> None:
        """Examine no more. An examination that waits for hosts ends with this process."""
        self._closed = True
        self._woken.set()
        if self._thread.is_alive():
            self._thread.join(_END_SECONDS)

    def _run(self) -> None:
        environment = launcher_environment(os.environ, [])
        with closing(HostConnections(self._ssh, environment)) as connections:
            folders = {"output_dir": str(self._folder), "/tmp": "/tmp"}
            admission = Admission(Job((), 1, "cpu", "/", folders), connections, environment)
            while not self._closed:
                try:
                    self._look(admission, connections)
                except Exception:  # whatever it is, the next examination may go well
                    _log.exception("hosts cannot be examined")
                    self._due = time.monotonic() + _CHECK_SECONDS
                self._woken.wait(_LOOK_SECONDS)
                self._woken.clear()

    def _look(self, admission: Admission, connections: HostConnections) -> None:
        """Examine all hosts if one of them is due: what differs from host to host is a finding, too."""
        hosts = self._hosts()
        wanted = [(host.name, host.slots, host.gpus) for host in hosts]
        if time.monotonic() < self._due and wanted == self._examined and not self._suspects:
            return
        with self._lock:
            suspects, self._suspects = self._suspects, {}
        gone = {name for name, *_ in self._examined} - {host.name for host in hosts}
        connections.run(connections.drop(gone | suspects.keys()))
        busy = set(self._busy()) - suspects.keys()
        try:
            examined = admission.examine([LaunchHost(host.name, host.slots, host.gpus) for host in hosts])
        except UserError as error:  # this machine has no ssh
            states = {host.name: HostState(str(error), [str(error)]) for host in hosts}
        else:
            states = _states(hosts, examined, busy)
        connections.run(_drop_local(connections, [host.name for host in hosts]))
        self._examined, self._due = wanted, time.monotonic() + _CHECK_SECONDS
        with self._lock:
            self._publish(states)

    def _publish(self, states: Mapping[str, HostState]) -> None:
        before = {name: (state.down, state.threads) for name, state in self._states.items()}
        suspected = {
            name: replace(states.get(name, HostState()), down=why, findings=[why])
            for name, why in self._suspects.items()
        }
        self._states = {**states, **suspected}
        if before != {name: (state.down, state.threads) for name, state in self._states.items()}:
            self._changed()


def _states(hosts: Sequence[Host], examined: Examination, busy: Collection[str]) -> dict[str, HostState]:
    found: dict[str, list[Finding]] = {host.name: [] for host in hosts}
    for finding in examined.findings:
        if finding.host in found:  # else it is about this machine, which is none of them
            found[finding.host].append(finding)
    states = {}
    for host in hosts:
        answer = examined.answers.get(host.name)
        its_findings = [*found[host.name], *_about_gpus(host, answer)]
        words = [f"{finding.message}; {finding.cure}" for finding in its_findings]
        problems = [line for line, finding in zip(words, its_findings, strict=True) if finding.problem]
        down = problems[0] if problems and host.name not in busy else ""
        threads, load = (max(1, answer["cores"] // host.slots), answer["load"]) if answer is not None else (0, None)
        states[host.name] = HostState(down, words, threads, load)
    return states


def _about_gpus(host: Host, answer: Answer | None) -> list[Finding]:
    """Whether the GPUs that the service knows of are there."""
    if answer is not None and answer["devices"] and not host.gpus:
        numbers = ",".join(map(str, range(len(answer["devices"]))))
        message = "its GPUs are not assigned to jobs: jobs that share the host use the same ones"
        cure = f"list them: `hvd-transformer hosts add {host.name}:{host.slots} --gpus {host.name}={numbers}`"
        return [Finding(host.name, message, cure, problem=False)]
    if answer is None or len(answer["devices"]) >= len(host.gpus):
        return []
    message = f"GPUs {', '.join(map(str, host.gpus))} are to be used, but it has only {len(answer['devices'])} of them"
    return [Finding(host.name, message, "check `nvidia-smi` there, or name other GPUs")]


async def _drop_local(connections: HostConnections, hosts: Sequence[str]) -> None:
    """Leave no program on this machine, where one is soon started again."""
    await connections.drop(host for host, local in (await connections.local(hosts)).items() if local)
