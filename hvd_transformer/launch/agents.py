"""The launcher's side of the node agents: one connection per host.

A node agent (`node_agent.py`, started through ssh on other hosts) creates the job's private folder on its host,
readable by its user only, and removes it when the connection ends, even if the launcher was killed. Everything travels
through standard input and output: the `--env` variables to the ranks; heartbeats, printed lines and exit codes back.
"""

import json
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

from hvd_transformer.errors import UserError
from hvd_transformer.launch.ssh import Ssh, is_local, ssh_command

_READY_SECONDS = 30.0
_PING_SECONDS = 1.0
_SILENCE_SECONDS = 8.0  # without a word from an agent, which reports every second: its host or the network is lost
_END_SECONDS = 10.0  # for the agents to exit

Show = Callable[[int, str, str], object]  # rank, "out" or "err", printed text
Beat = dict[str, Any]  # `Watchdog.beat` in monitoring/watchdog.py, and its "age"


class Failure(NamedTuple):
    """A rank that exited with a code other than 0."""

    time: float  # on this process's monotonic clock
    rank: int
    code: int
    host: str


class HostLost(UserError):
    """A host that cannot be reached or used."""

    def __init__(self, host: str, why: str) -> None:
        super().__init__(f"host {host}: cannot be used: {why}")
        self.host = host


class HostAgents:
    """The node agents of all hosts, from construction to `close`. The folder `path` exists after `wait_ready`."""

    def __init__(
        self,
        hosts: Sequence[str],
        ssh: Ssh,
        values: Mapping[str, str],
        environment: Mapping[str, str],
        show: Show = lambda rank, stream, text: None,
    ) -> None:
        self.path = f"/tmp/hvd-transformer-{os.getpid()}-{secrets.token_hex(16)}"
        self._agents: list[AgentConnection] = []
        command = [sys.executable, "-m", "hvd_transformer.launch.node_agent", self.path]
        if "PYTHONPATH" in environment:
            command = ["env", f"PYTHONPATH={environment['PYTHONPATH']}", *command]
        with ThreadPoolExecutor(64) as pool:
            local = dict(zip(hosts, pool.map(is_local, hosts), strict=True))
        # All names of this machine count as one host.
        names = [host for host in hosts if not local[host]] + [host for host in hosts if local[host]][:1]
        self._closed = threading.Event()
        try:
            for host in names:
                words = command if local[host] else ssh_command(ssh, host, command)
                self._agents.append(AgentConnection(host, words, environment, show))
            for agent in self._agents:
                agent.send({"environment": dict(values)})
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._ping, daemon=True).start()

    def wait_ready(self) -> None:
        """Wait for all agents. Raises `HostLost`, with the reason, for the first host without a folder."""
        for agent in self._agents:
            agent.wait_ready()

    @property
    def running(self) -> int:
        """Number of ranks that are running."""
        return sum(agent.running for agent in self._agents if not agent.lost)

    @property
    def beats(self) -> dict[int, Beat]:
        """The newest heartbeat of each rank."""
        return {rank: beat for agent in self._agents for rank, beat in agent.beats.items()}

    @property
    def failures(self) -> list[Failure]:
        """Failed ranks, in the order of their failures."""
        found = sorted(failure for agent in self._agents for failure in list(agent.failures.values()))
        # Hosts that share /tmp report a rank twice.
        return list({failure.rank: failure for failure in reversed(found)}.values())[::-1]

    @property
    def lost(self) -> list[str]:
        """Hosts that no longer answer."""
        return [agent.host for agent in self._agents if agent.lost]

    def stop(self) -> int:
        """Ask every rank to save and exit; return the number of running ranks."""
        self._order("stop")
        return sum(agent.wait_stopping() for agent in self._agents)

    def write_stacks(self) -> None:
        """Ask every rank to write its Python stacks to its log."""
        self._order("stacks")

    def close(self) -> list[Failure]:
        """Kill the remaining ranks on all hosts and remove the folder; return the failures in order."""
        self._closed.set()
        self._order("end")
        deadline = time.monotonic() + _END_SECONDS
        for agent in self._agents:
            agent.wait_ended(deadline)
        self._order("remove")
        for agent in self._agents:
            agent.close(deadline)
        return self.failures

    def _order(self, what: str) -> None:
        for agent in self._agents:
            agent.send({"do": what})

    def _ping(self) -> None:
        """Show the agents that the launcher lives: they exit when it is silent."""
        while not self._closed.wait(_PING_SECONDS):
            self._order("ping")


class AgentConnection:
    """The connection to the node agent of one host."""

    def __init__(self, host: str, words: Sequence[str], environment: Mapping[str, str], show: Show) -> None:
        self.host, self._show = host, show
        self.running, self.beats, self.failures = 0, dict[int, Beat](), dict[int, Failure]()
        self._heard = time.monotonic()
        self._ready, self._stopping, self._ended = threading.Event(), threading.Event(), threading.Event()
        self._opened, self._number_stopping = False, 0
        self._sending = threading.Lock()
        # In its own session: Ctrl-C reaches only the launcher, which then asks the ranks to stop.
        self._process = subprocess.Popen(
            words,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def lost(self) -> bool:
        return not self._reader.is_alive() or time.monotonic() - self._heard > _SILENCE_SECONDS

    def send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin
        with suppress(OSError, ValueError), self._sending:  # a lost host shows as the end of its output
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def wait_ready(self) -> None:
        if not self._ready.wait(_READY_SECONDS):
            raise HostLost(self.host, f"no answer in {_READY_SECONDS:.0f} seconds")
        if self._opened:
            return
        assert self._process.stderr
        said = self._process.stderr.read().decode(errors="replace").strip().splitlines() or ["no answer"]
        raise HostLost(self.host, said[-1].strip())

    def wait_stopping(self) -> int:
        while not self._stopping.wait(0.1) and not self.lost:
            pass
        self._stopping.clear()
        return self._number_stopping

    def wait_ended(self, deadline: float) -> None:
        while not self._ended.wait(0.05) and not self.lost and time.monotonic() < deadline:
            pass

    def close(self, deadline: float) -> None:
        if not self.lost:
            self._reader.join(max(0.0, deadline - time.monotonic()))
        self._process.kill()
        assert self._process.stdin
        with suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            with suppress(ValueError):  # output of a login shell, which may even be JSON
                message = json.loads(line)
                if isinstance(message, dict):
                    self._take(message)
        self._ready.set()

    def _take(self, message: dict[str, Any]) -> None:
        now = self._heard = time.monotonic()
        if "ready" in message:
            self._opened = True
            self._ready.set()
        elif "stopping" in message:
            self.running = self._number_stopping = message["stopping"]
            self._stopping.set()
        else:
            self.running = message["running"]
            self.beats = {beat["rank"]: beat for beat in message["beats"]}
            for failed in message["failed"]:
                failure = Failure(now - failed["age"], failed["rank"], failed["code"], failed["host"])
                self.failures.setdefault(failure.rank, failure)
            for output in message["output"]:
                self._show(output["rank"], output["stream"], output["text"])
            if message.get("ended"):
                self._ended.set()
