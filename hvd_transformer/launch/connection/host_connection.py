"""The connection to a host: one ssh, which first runs the probe there (`node/probe.py`), then the node agent.

On this host the same programs run without ssh. Everything travels through standard input and output, a line of JSON per
message; nothing secret is on a command line.
"""

import asyncio
import json
import os
import random
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from hvd_transformer.errors import UserError
from hvd_transformer.launch.connection.ssh import Ssh, ssh_command, was_dropped
from hvd_transformer.launch.node import probe

_SOURCE = Path(probe.__file__).read_bytes()
# With `-c` and `-m` Python imports from the current folder first, over ssh the home folder, whatever its files are
# called. Python 3.10 has no option against it, so both programs remove that entry, "" with `-c`, before they import.
_SAFE_PATH = "import sys; sys.path[:] = filter(None, sys.path); "
_START = _SAFE_PATH + "exec(sys.stdin.buffer.read(int(sys.argv[1])))"
_AGENT = _SAFE_PATH + "from hvd_transformer.launch.node.node_agent import main; sys.exit(main())"
_PAUSES = (0.5, 1.0, 2.0, 4.0)  # seconds before another try, if sshd dropped the connection
_LINE_BYTES = 1 << 24  # more than the longest message of an agent
_UNSENT_BYTES = 1 << 16  # above which a host is sent no more pings: it takes nothing
_LAST_LINES = 20  # kept of what a host prints to standard error
_LAST_WORDS_SECONDS = 0.5  # to read them
_KILLED_SECONDS, _LOOK_SECONDS = 2.0, 0.02
# Paths, without which ssh may reach no host: it keeps them even if they are also for the ranks.
_FOR_SSH = {"SSH_AUTH_SOCK", "KRB5CCNAME", "KRB5_CONFIG"}

Message = dict[str, Any]


class NoConnection(Exception):
    """No program answers on the host. `code`: exit code of ssh or the program; None: still running, but silent."""

    def __init__(self, host: str, code: int | None, said: str) -> None:
        super().__init__(f"{host}: {said}")
        self.host, self.code, self.said = host, code, said

    def last_words(self) -> str:
        """The last line that ssh or the program printed."""
        return (self.said.splitlines() or ["no answer"])[-1]


class AgentListener(Protocol):
    """Receives the messages of node agents, on the thread of the connections."""

    def took(self, connection: "HostConnection", message: Message) -> None: ...

    def was_lost(self, connection: "HostConnection") -> None: ...


class HostConnection:
    """A program that runs on a host. `hello` is the probe's (`probe.hello`).

    All methods must be called on the thread of the event loop that opened it.
    """

    def __init__(self, host: str, local: bool, process: Process) -> None:
        self.host, self.local = host, local
        self.hello: Message = {}
        self.is_agent = self.lost = False
        self.listener: AgentListener | None = None
        self._process, self._said = process, deque[str](maxlen=_LAST_LINES)
        self._asking = asyncio.Lock()
        self._heard = 0.0
        self._tasks = [asyncio.create_task(self._read_errors())]

    @classmethod
    async def open(
        cls,
        host: str,
        local: bool,
        ssh: Ssh,
        environment: Mapping[str, str],
        seconds: float,
        turns: asyncio.Semaphore,
        withheld: Collection[str] = (),
    ) -> "HostConnection":
        """Start the probe on the host, in its turn, and wait up to `seconds` for its first word.

        `withheld`: variables of this process that ssh does not get. Raises `NoConnection`, and `UserError` if this host
        has no ssh.
        """
        pauses = list(_PAUSES)
        while True:
            try:
                async with turns:
                    return await cls._start(host, local, ssh, environment, seconds, withheld)
            except NoConnection as error:
                if local or not pauses or not was_dropped(error.said):
                    raise
            await asyncio.sleep(pauses.pop(0) * random.uniform(0.5, 1.5))

    @classmethod
    async def _start(
        cls,
        host: str,
        local: bool,
        ssh: Ssh,
        environment: Mapping[str, str],
        seconds: float,
        withheld: Collection[str],
    ) -> "HostConnection":
        command, its_environment = [sys.executable, "-u", "-c", _START, str(len(_SOURCE))], dict(environment)
        if not local:
            command = ssh_command(ssh, host, command, seconds)
            its_environment = _of_ssh(environment, withheld)
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
                limit=_LINE_BYTES,
                env=its_environment,
                start_new_session=True,  # Ctrl-C reaches only this process, which then asks the ranks to stop
            )
        except FileNotFoundError:
            raise UserError("ssh: not found on this host; install an ssh client") from None
        connection = cls(host, local, process)
        try:
            await asyncio.wait_for(connection._greet(), seconds)
        except NoConnection:
            await connection.close()
            raise
        except asyncio.TimeoutError:
            await connection.close()
            raise NoConnection(host, None, f"no answer in {seconds:.0f} seconds") from None
        return connection

    @property
    def last_words(self) -> str:
        """The last line that ssh or the program printed to standard error."""
        return self._said[-1] if self._said else ""

    @property
    def has_ended(self) -> bool:
        """Whether nobody answers any more: an idle probe ends with its ssh, as after a break of the network. The loss
        of an agent is told to its listener first."""
        return self.lost or (not self.is_agent and self._process.returncode is not None)

    async def ask(self, question: str, **arguments: Any) -> Any:
        """Call a function of the probe, one at a time. Raises `NoConnection`, and `UserError` after `become_agent`."""
        async with self._asking:
            if self.is_agent:
                raise UserError(f"host {self.host}: its node agent answers no questions")
            self._write({"ask": question, **arguments})
            return await self._answer()

    async def become_agent(self, folder: str, environment: Mapping[str, str]) -> None:
        """Replace the probe by the node agent, whose private folder's name begins with `folder`.

        Raises `NoConnection`.
        """
        paths = {name: environment[name] for name in ("PYTHONPATH",) if name in environment}
        await self.ask("become", command=[sys.executable, "-c", _AGENT, folder], environment=paths)
        self.is_agent, self._heard = True, asyncio.get_running_loop().time()
        self._tasks.append(asyncio.create_task(self._listen()))

    def send(self, message: Message) -> None:
        """Send an order to the agent, without waiting for a slow host."""
        if not self.lost:
            self._write(message)

    def ping(self, silence: float) -> None:
        """Show the agent that the launcher lives; its host is lost after so many seconds without a word from it."""
        if asyncio.get_running_loop().time() - self._heard > silence:
            self._lose()
        assert self._process.stdin
        if self._process.stdin.transport.get_write_buffer_size() < _UNSENT_BYTES:
            self.send({"do": "ping"})

    def excuse(self, seconds: float) -> None:
        """Do not count `seconds` for which this process was suspended."""
        self._heard = min(asyncio.get_running_loop().time(), self._heard + seconds)

    async def close(self) -> None:
        """End the program, whose standard input closes with ssh, and what ssh has started, such as a jump's ssh."""
        self.listener, self.lost = None, True
        assert self._process.stdin
        self._process.stdin.close()
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        await self._wait(_KILLED_SECONDS)
        for task in self._tasks:
            task.cancel()

    async def leave(self, seconds: float) -> None:
        """Let the program end with its standard input; kill it after `seconds`."""
        assert self._process.stdin
        self.listener = None
        self._process.stdin.close()
        await self._wait(seconds)
        await self.close()

    async def _wait(self, seconds: float) -> None:
        """Wait for the process alone: what ssh leaves behind, as with ControlPersist, may keep its output open."""
        until = asyncio.get_running_loop().time() + seconds
        while self._process.returncode is None and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(_LOOK_SECONDS)

    def _write(self, message: Message) -> None:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(message).encode() + b"\n")  # a lost host shows as the end of its output

    async def _greet(self) -> None:
        """Send the probe and wait for its first word."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(_SOURCE)
        async for line in self._process.stdout:
            if line.startswith(probe.MARK.encode()):
                self.hello = json.loads(line[len(probe.MARK) :])
                return
        raise await self._ended()

    async def _answer(self) -> Any:
        assert self._process.stdout
        line = await self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise await self._ended()
        return json.loads(line)

    async def _ended(self) -> NoConnection:
        code = await self._process.wait()
        await asyncio.wait(self._tasks[:1])
        return NoConnection(self.host, code, "\n".join(self._said))

    async def _listen(self) -> None:
        assert self._process.stdout
        loop = asyncio.get_running_loop()
        async for line in self._process.stdout:
            self._heard = loop.time()
            if self.listener is not None and line.endswith(b"\n"):
                self.listener.took(self, json.loads(line))
        await asyncio.wait(self._tasks[:1], timeout=_LAST_WORDS_SECONDS)
        self._lose()

    def _lose(self) -> None:
        if not self.lost:
            self.lost = True
            if self.listener is not None:
                self.listener.was_lost(self)

    async def _read_errors(self) -> None:
        """Keep the last lines, and let a host that prints many go on."""
        assert self._process.stderr
        unended = b""
        while data := await self._process.stderr.read(1 << 16):
            *lines, unended = (unended + data).split(b"\n")
            unended = unended[-_UNSENT_BYTES:]
            self._said.extend(line.decode(errors="replace").strip() for line in lines)
        if unended.strip():
            self._said.append(unended.decode(errors="replace").strip())


def _of_ssh(environment: Mapping[str, str], withheld: Collection[str]) -> dict[str, str]:
    """The environment of ssh: of this process and `environment`, without what may be secret.

    ssh and its ProxyCommand may need any variable of the user's, but with SendEnv they may also pass it on.
    """
    secret = set(withheld) - _FOR_SSH
    own = {
        name: value
        for name, value in os.environ.items()
        if name not in secret and not name.startswith("HVD_TRANSFORMER_")  # as a token of the service
    }
    result = {**own, **environment, "LC_MESSAGES": "C"}  # `why_refused` reads English
    for name in ("LC_ALL", "DISPLAY"):  # no X11 for the ranks
        result.pop(name, None)
    return result
