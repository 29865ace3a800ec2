"""Talks with the probe on each host: starts it there, asks it, and tells why there is no answer."""

import asyncio
import json
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, TypeVar

from hvd_transformer.errors import UserError
from hvd_transformer.launch.command import Ssh
from hvd_transformer.launch.doctor.findings import Finding
from hvd_transformer.launch.doctor.probe import MARK
from hvd_transformer.launch.ssh import is_local, ssh_command, why_refused

_SOURCE = Path(__file__).with_name("probe.py").read_bytes()
_START = "import sys; exec(sys.stdin.buffer.read(int(sys.argv[1])))"
_CONNECT_SECONDS = 5
_T = TypeVar("_T")


class NoAnswer(Exception):
    """A host that is of no use, with the finding."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


class Conversation:
    """A probe that runs on a host: as here, by the Python of the same path."""

    def __init__(self, host: str, local: bool, process: Process, errors: IO[bytes]) -> None:
        self.host = host
        self.local = local
        self._process = process
        self._errors = errors

    @classmethod
    async def start(cls, host: str, ssh: Ssh, environment: Mapping[str, str]) -> "Conversation":
        """Raises `UserError` where there is no ssh here."""
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
                env={**environment, "LC_ALL": "C"},
                start_new_session=True,  # Ctrl-C is for the doctor alone
            )
        except FileNotFoundError:
            raise UserError("ssh: not found on this host; install an ssh client") from None
        assert process.stdin
        process.stdin.write(_SOURCE)
        return cls(host, local, process, errors)

    async def ask(self, question: str, until: float, **arguments: Any) -> Any:
        """The answer of a function of the probe, until a time of the event loop. Raises `NoAnswer`."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps({"ask": question, **arguments}).encode() + b"\n")
        seconds = until - asyncio.get_running_loop().time()
        try:
            return await asyncio.wait_for(self._answer(self._process.stdout), seconds)
        except asyncio.TimeoutError:
            cure = f"look at its load, its disks and its network file systems: `ssh {self.host} uptime`"
            raise NoAnswer(Finding(self.host, "it answers too slowly or not at all", cure)) from None

    async def close(self) -> None:
        """Ends the probe: with ssh goes its standard input."""
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
            cure = "install the same environment under the same path; a file system that all hosts share does it"
            return Finding(self.host, f"there is no Python at {sys.executable}", cure)
        last = said.splitlines()[-1] if said else f"exit code {code}"
        return Finding(self.host, f"its Python fails: {last}", f"make `{sys.executable} -c ''` work there")


class Conversations:
    """Those with many hosts at once, within a context; `silent` says why some no longer answer."""

    def __init__(self, hosts: Iterable[str], ssh: Ssh, environment: Mapping[str, str]) -> None:
        self.silent: list[Finding] = []
        self.local: set[str] = set()
        self._starting = [Conversation.start(host, ssh, environment) for host in hosts]
        self._talks: dict[str, Conversation] = {}

    async def __aenter__(self) -> "Conversations":
        self._talks = {talk.host: talk for talk in await asyncio.gather(*self._starting)}
        self.local = {talk.host for talk in self._talks.values() if talk.local}
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.gather(*(talk.close() for talk in self._talks.values()))

    async def each(self, ask: Callable[[Conversation], Awaitable[_T]]) -> dict[str, _T]:
        """The answer of every host, by name; one without an answer is not asked again."""
        results = await asyncio.gather(*map(ask, self._talks.values()), return_exceptions=True)
        answers = {}
        for talk, result in zip(list(self._talks.values()), results, strict=True):
            if isinstance(result, NoAnswer):
                self.silent.append(result.finding)
                await self._talks.pop(talk.host).close()
            elif isinstance(result, BaseException):
                raise result
            else:
                answers[talk.host] = result
        return answers
