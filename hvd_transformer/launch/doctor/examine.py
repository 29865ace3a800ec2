"""Examines all hosts in parallel: queries their probes, measures clocks and network, and collects the findings.

Takes at most ten seconds for up to 32 hosts, even if hosts cannot be reached, a few more if others answer at the last
moment, and up to a minute more where two GPUs of a host are tried.
"""

import asyncio
import os
import secrets
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from hvd_transformer.launch.connection.connections import HostConnections
from hvd_transformer.launch.connection.host_connection import HostConnection, NoConnection
from hvd_transformer.launch.connection.ssh import Ssh, why_refused
from hvd_transformer.launch.doctor import findings, gpu_allreduce
from hvd_transformer.launch.doctor.device_findings import about_devices
from hvd_transformer.launch.doctor.findings import Answer, Finding, Job, Link
from hvd_transformer.launch.doctor.gpu_allreduce import GpuAllreduce
from hvd_transformer.launch.hostfile import Host
from hvd_transformer.launch.node import probe

_T = TypeVar("_T")


class NoAnswer(Exception):
    """A host that does not answer, with the finding that explains it."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


async def ask(connection: HostConnection, question: str, until: float, **arguments: Any) -> Any:
    """Call a function of the host's probe; `until` is a time of the event loop. Raises `NoAnswer`."""
    seconds = until - asyncio.get_running_loop().time()
    try:
        return await asyncio.wait_for(connection.ask(question, **arguments), seconds)
    except asyncio.TimeoutError:
        raise NoAnswer(_too_slow(connection.host)) from None
    except NoConnection as error:
        raise NoAnswer(_why(error)) from None


def _too_slow(host: str) -> Finding:
    cure = f"check its load, its disks and its network file systems: `ssh {host} uptime`"
    return Finding(host, "it answers too slowly or not at all", cure)


def _why(error: NoConnection) -> Finding:
    """The finding for a host that cannot be reached, or no longer."""
    if error.code is None:
        return _too_slow(error.host)
    if error.code == 255:  # ssh's own failure
        return Finding(error.host, *why_refused(error.host, error.said))
    if error.code in (126, 127):  # the shell's: the command cannot be started
        cure = "install the same environment under the same path, for example on a shared file system"
        return Finding(error.host, f"there is no Python at {sys.executable}", cure)
    last = error.last_words() if error.said else f"exit code {error.code}"
    return Finding(error.host, f"its Python fails: {last}", f"make `{sys.executable} -c ''` work there")


class Probes:
    """The probes of many hosts; `silent` holds a finding for each that no longer answers."""

    def __init__(self, opened: Iterable[HostConnection | NoConnection]) -> None:
        self.silent: list[Finding] = []
        self._connections: list[HostConnection] = []
        for connection in opened:
            if isinstance(connection, NoConnection):
                self.silent.append(_why(connection))
            else:
                self._connections.append(connection)

    async def each(self, ask: Callable[[HostConnection], Awaitable[_T]]) -> dict[str, _T]:
        """Ask all hosts in parallel; return the answers by host. A host without an answer is not asked again."""
        results = await asyncio.gather(*map(ask, self._connections), return_exceptions=True)
        answers = {}
        for connection, result in zip(self._connections, results, strict=True):
            if isinstance(result, NoAnswer):
                self.silent.append(result.finding)
                await connection.close()
            elif isinstance(result, BaseException):
                raise result
            else:
                answers[connection.host] = result
        self._connections = [connection for connection in self._connections if connection.host in answers]
        return answers


# Seconds after the start by which each part has ended; starting the command takes one second more. With more hosts than
# `_HOSTS` in proportion to their number, as this host starts that many connections and reads that many answers.
_CONNECTED, _ASKED, _MEASURED = 6.0, 6.7, 8.8
_HOSTS = 32
_ANSWER = 4.5  # seconds, at least: nvidia-smi may take 4 of them
_LINK_SECONDS = 0.5
_SHARING_SECONDS = 3.0
_REMOVED_SECONDS = 1.0  # for a file that was made to be removed before this process may end
_CLOCK_ROUNDS = 3


class Examination(NamedTuple):
    """The results; `answers`, `skews` and `links` cover the hosts that answered."""

    answers: dict[str, Answer]
    skews: dict[str, tuple[float, float]]  # seconds ahead of this host, and the uncertainty
    common: list[str]  # network interfaces that all hosts share, that of the ranks first
    links: list[Link]
    gpu_allreduces: dict[str, GpuAllreduce]  # a trial on two GPUs of each host
    findings: list[Finding]


def examine(job: Job, ssh: Ssh, environment: Mapping[str, str]) -> Examination:
    """Run the full examination. Raises `UserError` if this host has no ssh."""
    with closing(HostConnections(ssh, environment)) as connections:
        return connections.run(_examine(job, connections, environment))


class Admission:
    """Examines hosts before they are taken into a job: all of them at its start, later those with a new connection.

    A host whose node agent has been connected all the time is not asked again; its answer is kept to compare others.
    A host may have an output folder of its own, but not after it has seen this host's: then its mount is missing.
    """

    def __init__(self, job: Job, connections: HostConnections, environment: Mapping[str, str]) -> None:
        self._job, self._connections, self._environment = job, connections, environment
        self._answers: dict[str, Answer] = {}
        self._sharing: set[str] = set()  # hosts that have seen this host's output folder
        self._lock = threading.Lock()  # a probe answers one question at a time

    def refused(self, hosts: Sequence[Host]) -> dict[str, Finding]:
        """The first problem of each host that would prevent the job from running on these hosts.

        Raises `UserError` if this host has no ssh.
        """
        return first_problems(self.examine(hosts).findings)

    def examine(self, hosts: Sequence[Host]) -> Examination:
        """All that is found out about these hosts, without clocks and links. Raises `UserError` like `refused`."""
        with self._lock:
            found = self._connections.run(self._examine(self._job._replace(hosts=hosts)))
            answers = _with_named_gpus(self._job._replace(hosts=hosts), self._answers)
            return Examination(answers, {}, [], [], {}, found)

    async def _examine(self, job: Job) -> list[Finding]:
        until, opened = await _open(job, self._connections)
        agents = {host for host, found in opened.items() if isinstance(found, HostConnection) and found.is_agent}
        probes = Probes(found for host, found in opened.items() if host not in agents)
        new = await probes.each(_facts(job, self._environment, until, full=False))
        kept = {host: answer for host, answer in self._answers.items() if host in agents}
        self._answers = {host: {**kept, **new}[host] for host in opened if host in kept or host in new}
        found = _about(job, _with_named_gpus(job, self._answers), opened)[0]
        if new and "output_dir" in job.folders:
            found += await self._about_sharing(job, probes)
        return probes.silent + found

    async def _about_sharing(self, job: Job, probes: Probes) -> list[Finding]:
        until = asyncio.get_running_loop().time() + _longer(job) * _SHARING_SECONDS
        seen = await _sees_output(job, probes, until)
        before, self._sharing = self._sharing, self._sharing | {host for host, sees in seen.items() if sees}
        seen = {host: sees for host, sees in seen.items() if host in before}
        return list(findings.about_sharing(job.folders["output_dir"], seen))


def first_problems(found: Iterable[Finding]) -> dict[str, Finding]:
    """The first finding of each host that prevents a job from running there."""
    problems: dict[str, Finding] = {}
    for finding in found:
        if finding.problem:
            problems.setdefault(finding.host, finding)
    return problems


async def _examine(job: Job, connections: HostConnections, environment: Mapping[str, str]) -> Examination:
    start, longer = asyncio.get_running_loop().time(), _longer(job)
    until, opened = await _open(job, connections)
    probes = Probes(opened.values())
    answers = await probes.each(_facts(job, environment, until, full=True))
    late = max(0.0, asyncio.get_running_loop().time() - start - longer * _CONNECTED)
    asked, measured = (start + late + longer * seconds for seconds in (_ASKED, _MEASURED))
    found, common = _about(job, answers, opened)
    skews = await probes.each(lambda connection: _skew(connection, asked))
    found += findings.about_clocks(skews)
    found += findings.about_sharing(job.folders["output_dir"], await _sees_output(job, probes, asked))
    links = []
    if common:
        addresses = {host: answer["interfaces"][common[0]] for host, answer in answers.items()}
        links = await _ring(probes, addresses, measured)
        found += findings.about_links(common[0], links)
    sums = await probes.each(lambda connection: _gpu_allreduce(job, answers[connection.host], connection))
    found += gpu_allreduce.about_gpu_allreduces(sums)
    return Examination(answers, skews, common, links, sums, probes.silent + found)


def _longer(job: Job) -> float:
    """By how much everything may take longer than with a few hosts."""
    return max(1.0, len(job.hosts) / _HOSTS)


async def _open(job: Job, connections: HostConnections) -> tuple[float, dict[str, HostConnection | NoConnection]]:
    """Connect to all hosts; also returns by when they must have answered the first question."""
    wanted = connections.limits.preflight
    seconds = _longer(job) * _CONNECTED if wanted is None else wanted
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    opened = await connections.open([host.name for host in job.hosts], seconds)
    return max(until, loop.time() + _longer(job) * _ANSWER), opened  # one that hangs takes no time from the others


def _facts(
    job: Job, environment: Mapping[str, str], until: float, full: bool
) -> Callable[[HostConnection], Awaitable[Any]]:
    gpus = {host.name: ",".join(map(str, host.gpus)) for host in job.hosts if host.gpus}

    def facts(connection: HostConnection) -> Awaitable[Any]:
        given = dict(environment)
        if not connection.local:
            given.pop("CUDA_VISIBLE_DEVICES", None)  # it is not sent to other hosts
        if connection.host in gpus:
            given["CUDA_VISIBLE_DEVICES"] = gpus[connection.host]
        question = {"environment": given, "cwd": job.cwd, "folders": dict(job.folders), "full": full}
        return ask(connection, "facts", until, **question)

    return facts


def _with_named_gpus(job: Job, answers: Mapping[str, Answer]) -> dict[str, Answer]:
    """The answers with the GPUs that gpus= names now: a host that is connected is not asked again when they change.

    CUDA ignores all after the first that is not there.
    """
    gpus = {host.name: host.gpus for host in job.hosts if host.gpus}

    def seen(host: str, answer: Answer) -> Answer:
        devices = answer["all_devices"]
        there = takewhile(lambda gpu: gpu < len(devices), gpus[host])
        return {**answer, "devices": [devices[gpu] for gpu in there]}

    return {host: seen(host, answer) if host in gpus else answer for host, answer in answers.items()}


def _about(
    job: Job, answers: Mapping[str, Answer], opened: Mapping[str, HostConnection | NoConnection]
) -> tuple[list[Finding], list[str]]:
    """Findings about the hosts and their network, and the interfaces that all share, that of the ranks first."""
    connections = [found for found in opened.values() if isinstance(found, HostConnection)]
    local = {found.host for found in connections if found.local}
    found = [*findings.about_hosts(job, answers), *about_devices(job, answers, local)]
    interfaces = {host: answer["interfaces"] for host, answer in answers.items() if host not in local}
    if not interfaces:
        return found, []
    here = next((host for host in answers if host in local), os.uname().nodename)
    interfaces[here] = probe.interfaces()  # the job is started from this host, even if it runs no rank
    found += findings.about_network(job.network_interface, interfaces)
    reached = {
        found.host: found.hello["reached"] for found in connections if found.host in interfaces and not found.local
    }
    return found, findings.common_interfaces(job.network_interface, interfaces, reached)


async def _gpu_allreduce(job: Job, answer: Answer, connection: HostConnection) -> GpuAllreduce:
    async def run(command: list[str], seconds: float) -> Any:
        until = asyncio.get_running_loop().time() + 2 * seconds  # the host itself ends the command after `seconds`
        return await ask(connection, "run", until, command=command, seconds=seconds)

    return await gpu_allreduce.try_allreduce(job.device, answer, run)


async def _skew(connection: HostConnection, until: float) -> tuple[float, float]:
    """(skew, uncertainty) of the host's clock, from the fastest query: it was read halfway through the round trip."""
    rounds = []
    for _ in range(_CLOCK_ROUNDS):
        sent = time.time()
        there = await ask(connection, "clock", until)
        received = time.time()
        rounds.append(((received - sent) / 2, there - (sent + received) / 2))
    uncertainty, skew = min(rounds)
    return skew, uncertainty


async def _sees_output(job: Job, probes: Probes, until: float) -> dict[str, bool]:
    """Whether each host sees a file that this host creates in the output folder, or in its nearest existing parent.

    Empty if this host cannot create one, or not in time: its storage may stand still, and nobody here waits for that.
    """
    marker = _Marker(job.folders["output_dir"])
    try:
        await asyncio.wait([marker.made], timeout=until - asyncio.get_running_loop().time())
        path = marker.made.result() if marker.made.done() else None
        if path is None:
            return {}
        return await probes.each(lambda connection: ask(connection, "exists", until, path=str(path)))
    finally:
        marker.remove()
        await asyncio.wait([marker.ended], timeout=_REMOVED_SECONDS if marker.made.done() else 0.0)


class _Marker:
    """A file in the output folder, which a thread makes and removes: the storage may stand still.

    Nobody waits for the thread, not even the end of this process. `made`: its path, None if it cannot be made.
    """

    def __init__(self, output: str) -> None:
        self._loop = asyncio.get_running_loop()
        self.made: asyncio.Future[Path | None] = self._loop.create_future()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._unwanted = threading.Event()
        threading.Thread(target=self._work, args=[output], daemon=True).start()

    def remove(self) -> None:
        """Remove it, if need be once it is made. Returns at once."""
        self._unwanted.set()

    def _work(self, output: str) -> None:
        path = None
        with suppress(Exception):  # what is wrong with the folder is a finding of this host
            path = _mark(output)
        self._tell(self.made.set_result, path)
        if path is not None:
            self._unwanted.wait()
            _unmark(path)
        self._tell(self.ended.set_result, None)

    def _tell(self, tell: Callable[[_T], object], what: _T) -> None:
        with suppress(RuntimeError):  # the loop is closed: it came too late
            self._loop.call_soon_threadsafe(tell, what)


def _mark(output: str) -> Path:
    folder = Path(output).expanduser().absolute()
    while not folder.exists():
        folder = folder.parent
    marker = folder / f".hvd-transformer-{secrets.token_hex(8)}"
    marker.touch(exist_ok=False)
    return marker


def _unmark(marker: Path) -> None:
    with suppress(OSError):
        marker.unlink()


async def _ring(probes: Probes, addresses: Mapping[str, str], until: float) -> list[Link]:
    """Measure the links of a ring over the hosts in order, with the traffic of a ring allreduce (`probe.link`)."""
    ports = await probes.each(lambda connection: ask(connection, "listen", until, address=addresses[connection.host]))
    hosts = list(ports)
    following = dict(zip(hosts, hosts[1:] + hosts[:1], strict=True))
    if len(hosts) < 2:
        return []

    def link(connection: HostConnection) -> Any:
        target = following[connection.host]
        return ask(connection, "link", until, address=addresses[target], port=ports[target], seconds=_LINK_SECONDS)

    answers = await probes.each(link)
    links = []
    for source, answer in answers.items():
        target = following[source]
        rate = answers[target]["rate"] if target in answers else None
        links.append(Link(source, target, answer.get("round_trip"), rate, answer.get("error")))
    return links
