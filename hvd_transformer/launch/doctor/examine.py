"""Examines all hosts in parallel: queries their probes, measures clocks and network, and collects the findings.

Takes at most ten seconds, even if hosts do not answer.
"""

import asyncio
import json
import os
import secrets
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

from hvd_transformer.errors import UserError
from hvd_transformer.launch.doctor import findings, probe
from hvd_transformer.launch.doctor.findings import Answer, Finding, Job, Link
from hvd_transformer.launch.doctor.probe import MARK
from hvd_transformer.launch.ssh import Ssh, is_local, ssh_command, why_refused

_SOURCE = Path(__file__).with_name("probe.py").read_bytes()
_START = "import sys; exec(sys.stdin.buffer.read(int(sys.argv[1])))"
_CONNECT_SECONDS = 4
_T = TypeVar("_T")


class NoAnswer(Exception):
    """A host that does not answer, with the finding that explains it."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


@dataclass
class ProbeConnection:
    """A probe (`probe.py`) that runs on a host, with the Python of the same path as here."""

    host: str
    local: bool
    _process: Process
    _errors: IO[bytes]

    @classmethod
    async def start(cls, host: str, ssh: Ssh, environment: Mapping[str, str]) -> "ProbeConnection":
        """Start the probe. Raises `UserError` if this host has no ssh."""
        command = [sys.executable, "-u", "-c", _START, str(len(_SOURCE))]
        local = await asyncio.get_running_loop().run_in_executor(None, is_local, host)
        if not local:
            command = ssh_command(ssh, host, command, _CONNECT_SECONDS)
        errors = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=PIPE,
                stdout=PIPE,
                stderr=errors,
                limit=1 << 20,
                env={**environment, "LC_ALL": "C"},
                start_new_session=True,  # Ctrl-C reaches only the doctor
            )
        except FileNotFoundError:
            raise UserError("ssh: not found on this host; install an ssh client") from None
        assert process.stdin
        process.stdin.write(_SOURCE)
        return cls(host, local, process, errors)

    async def ask(self, question: str, until: float, **arguments: Any) -> Any:
        """Call a function of the probe; `until` is a time of the event loop. Raises `NoAnswer`."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps({"ask": question, **arguments}).encode() + b"\n")
        seconds = until - asyncio.get_running_loop().time()
        try:
            return await asyncio.wait_for(self._answer(self._process.stdout), seconds)
        except asyncio.TimeoutError:
            cure = f"check its load, its disks and its network file systems: `ssh {self.host} uptime`"
            raise NoAnswer(Finding(self.host, "it answers too slowly or not at all", cure)) from None

    async def close(self) -> None:
        """End the probe, whose standard input closes with ssh."""
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        self._errors.close()

    async def _answer(self, lines: asyncio.StreamReader) -> Any:
        async for line in lines:
            if line.startswith(MARK.encode()):
                return json.loads(line[len(MARK) :])
        raise NoAnswer(self._ended(await self._process.wait()))

    def _ended(self, code: int) -> Finding:
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip()
        if code == 255:  # ssh's own failure
            return Finding(self.host, *why_refused(self.host, said))
        if code in (126, 127):  # the shell's: the command cannot be started
            cure = "install the same environment under the same path, for example on a shared file system"
            return Finding(self.host, f"there is no Python at {sys.executable}", cure)
        last = said.splitlines()[-1] if said else f"exit code {code}"
        return Finding(self.host, f"its Python fails: {last}", f"make `{sys.executable} -c ''` work there")


class Probes:
    """The probes of many hosts; `silent` holds a finding for each that no longer answers."""

    def __init__(self, connections: Sequence[ProbeConnection]) -> None:
        self.silent: list[Finding] = []
        self._connections = connections

    async def aclose(self) -> None:
        """End all probes."""
        await asyncio.gather(*(connection.close() for connection in self._connections))

    async def each(self, ask: Callable[[ProbeConnection], Awaitable[_T]]) -> dict[str, _T]:
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


# Seconds after the start by which each part has ended; starting the command takes one second more.
_CONNECTED, _ASKED, _MEASURED = 6.0, 6.7, 8.8
_LINK_SECONDS = 0.5
_CLOCK_ROUNDS = 3


class Examination(NamedTuple):
    """The results; `answers`, `skews` and `links` cover the hosts that answered."""

    answers: dict[str, Answer]
    skews: dict[str, tuple[float, float]]  # seconds ahead of this host, and the uncertainty
    common: list[str]  # network interfaces that all hosts share
    links: list[Link]
    findings: list[Finding]


def examine(job: Job, ssh: Ssh, environment: Mapping[str, str]) -> Examination:
    """Run the full examination. Raises `UserError` if this host has no ssh."""
    return asyncio.run(_examine(job, ssh, environment, full=True))


def preflight(job: Job, ssh: Ssh, environment: Mapping[str, str]) -> str | None:
    """Check for problems that would prevent the job, with one query per host.

    Returns the network interface if there is only one that all hosts share, so that horovodrun need not search for it.

    Raises `UserError`, which names the first host with a problem and says what to do.
    """
    found = asyncio.run(_examine(job, ssh, environment, full=False))
    for finding in found.findings:
        if finding.problem:
            raise UserError(f"{finding} (--no-preflight starts anyway)")
    return found.common[0] if len(found.common) == 1 else None


async def _examine(job: Job, ssh: Ssh, environment: Mapping[str, str], full: bool) -> Examination:
    start = asyncio.get_running_loop().time()
    hosts = await asyncio.gather(*(ProbeConnection.start(host.name, ssh, environment) for host in job.hosts))
    local = {connection.host for connection in hosts if connection.local}

    def facts(connection: ProbeConnection) -> Any:
        given = dict(environment)
        if not connection.local:
            given.pop("CUDA_VISIBLE_DEVICES", None)  # horovodrun does not send it to other hosts
        question = {"environment": given, "cwd": job.cwd, "folders": dict(job.folders), "full": full}
        return connection.ask("facts", start + _CONNECTED, **question)

    async with aclosing(Probes(hosts)) as probes:
        answers = await probes.each(facts)
        found = list(findings.about_hosts(job, answers))
        here = next((host for host in answers if host in local), os.uname().nodename)
        interfaces = {host: answer["interfaces"] for host, answer in answers.items() if host not in local}
        common: list[str] = []
        if interfaces:
            interfaces[here] = probe.interfaces()  # the job is started from this host, even if it runs no rank
            found += findings.about_network(job.network_interface, interfaces)
            common = findings.common_interfaces(job.network_interface, interfaces)
        skews, links = {}, []
        if full:
            skews = await probes.each(lambda connection: _skew(connection, start + _ASKED))
            found += findings.about_clocks(skews)
            found += findings.about_sharing(job.folders["output_dir"], await _sees_output(job, probes, start + _ASKED))
            if common:
                addresses = {host: answer["interfaces"][common[0]] for host, answer in answers.items()}
                links = await _ring(probes, addresses, start + _MEASURED)
                found += findings.about_links(common[0], links)
        return Examination(answers, skews, common, links, probes.silent + found)


async def _skew(connection: ProbeConnection, until: float) -> tuple[float, float]:
    """(skew, uncertainty) of the host's clock, from the fastest query: it was read halfway through the round trip."""
    rounds = []
    for _ in range(_CLOCK_ROUNDS):
        sent = time.time()
        there = await connection.ask("clock", until)
        received = time.time()
        rounds.append(((received - sent) / 2, there - (sent + received) / 2))
    uncertainty, skew = min(rounds)
    return skew, uncertainty


async def _sees_output(job: Job, probes: Probes, until: float) -> dict[str, bool]:
    """Whether each host sees a file that this host creates in the output folder, or in its nearest existing parent."""
    folder = Path(job.folders["output_dir"]).expanduser().absolute()
    while not folder.exists():
        folder = folder.parent
    marker = folder / f".hvd-transformer-{secrets.token_hex(8)}"
    try:
        marker.touch(exist_ok=False)
    except OSError:  # reported by this host's own answer
        return {}
    try:
        return await probes.each(lambda connection: connection.ask("exists", until, path=str(marker)))
    finally:
        with suppress(OSError):
            marker.unlink()


async def _ring(probes: Probes, addresses: Mapping[str, str], until: float) -> list[Link]:
    """Measure the links of a ring over the hosts in order, with the traffic of a ring allreduce (`probe.link`)."""
    ports = await probes.each(lambda connection: connection.ask("listen", until, address=addresses[connection.host]))
    hosts = list(ports)
    following = dict(zip(hosts, hosts[1:] + hosts[:1], strict=True))
    if len(hosts) < 2:
        return []

    def link(connection: ProbeConnection) -> Any:
        target = following[connection.host]
        return connection.ask("link", until, address=addresses[target], port=ports[target], seconds=_LINK_SECONDS)

    answers = await probes.each(link)
    links = []
    for source, answer in answers.items():
        target = following[source]
        rate = answers[target]["rate"] if target in answers else None
        links.append(Link(source, target, answer.get("round_trip"), rate, answer.get("error")))
    return links
