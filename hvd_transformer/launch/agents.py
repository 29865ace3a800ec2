"""A job's private folder on every host, and what the launcher hears of its ranks from there.

On each host a keeper (`keeper.py`, through ssh where the host is another one) makes the folder, only for its user, and
removes it when the connection ends: also when the launcher was killed. Everything travels through standard input and
output: the variables of `--env` to the ranks; heartbeats, printed lines and exit codes back.
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
_SILENCE_SECONDS = 8.0  # of a keeper, which speaks every second: its host or the network is gone
_END_SECONDS = 10.0  # that keepers have to end

Show = Callable[[int, str, str], object]  # rank, "out" or "err", and what it printed
Beat = dict[str, Any]  # training/heartbeat.py


class Failure(NamedTuple):
    """A rank that ended with an exit code other than 0."""

    time: float  # of this process's monotonic clock
    rank: int
    code: int
    host: str


class HostLost(UserError):
    """A host that cannot be used."""

    def __init__(self, host: str, why: str) -> None:
        super().__init__(f"host {host}: cannot be used: {why}")
        self.host = host


class HostAgents:
    """The folder on all hosts, from construction to `close`; it is there after `wait_ready`."""

    def __init__(
        self,
        hosts: Sequence[str],
        ssh: Ssh,
        values: Mapping[str, str],
        environment: Mapping[str, str],
        show: Show = lambda rank, stream, text: None,
    ) -> None:
        self.path = f"/tmp/hvd-transformer-{os.getpid()}-{secrets.token_hex(16)}"
        self._keepers: list[AgentConnection] = []
        keeper = [sys.executable, "-m", "hvd_transformer.launch.node_agent", self.path]
        if "PYTHONPATH" in environment:
            keeper = ["env", f"PYTHONPATH={environment['PYTHONPATH']}", *keeper]
        with ThreadPoolExecutor(64) as pool:
            local = dict(zip(hosts, pool.map(is_local, hosts), strict=True))
        # All names of this machine are one host.
        names = [host for host in hosts if not local[host]] + [host for host in hosts if local[host]][:1]
        self._closed = threading.Event()
        try:
            for host in names:
                words = keeper if local[host] else ssh_command(ssh, host, keeper)
                self._keepers.append(AgentConnection(host, words, environment, show))
            for one in self._keepers:
                one.send({"environment": dict(values)})
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._ping, daemon=True).start()

    def wait_ready(self) -> None:
        """Raises `HostLost` for the first host where it cannot be made, and says why."""
        for keeper in self._keepers:
            keeper.wait_ready()

    @property
    def running(self) -> int:
        """Ranks that run now."""
        return sum(keeper.running for keeper in self._keepers if not keeper.lost)

    @property
    def beats(self) -> dict[int, Beat]:
        """The newest heartbeat of each rank."""
        return {rank: beat for keeper in self._keepers for rank, beat in list(keeper.beats.items())}

    @property
    def failures(self) -> list[Failure]:
        """Ranks that have failed, the first one first."""
        found = sorted(failure for keeper in self._keepers for failure in list(keeper.failures.values()))
        return list({failure.rank: failure for failure in reversed(found)}.values())[::-1]  # hosts may share /tmp

    @property
    def lost(self) -> list[str]:
        """Hosts that are heard of no more."""
        return [keeper.host for keeper in self._keepers if keeper.lost]

    def stop(self) -> int:
        """Asks every rank to save and end; the number of those that run."""
        for keeper in self._keepers:
            keeper.send({"do": "stop"})
        return sum(keeper.wait_stopping() for keeper in self._keepers)

    def write_stacks(self) -> None:
        """Asks every rank to write its Python stacks into its log."""
        for keeper in self._keepers:
            keeper.send({"do": "stacks"})

    def close(self) -> list[Failure]:
        """Ends what still runs on any host and removes the folder; the ranks that had failed, the first one first."""
        self._closed.set()
        for keeper in self._keepers:
            keeper.send({"do": "end"})
        deadline = time.monotonic() + _END_SECONDS
        for keeper in self._keepers:
            keeper.wait_ended(deadline)
        for keeper in self._keepers:
            keeper.send({"do": "remove"})
        for keeper in self._keepers:
            keeper.close(deadline)
        return self.failures

    def _ping(self) -> None:
        """Keepers end where the launcher is silent."""
        while not self._closed.wait(_PING_SECONDS):
            for keeper in self._keepers:
                keeper.send({"do": "ping"})


class AgentConnection:
    """The keeper of one host."""

    def __init__(self, host: str, words: Sequence[str], environment: Mapping[str, str], show: Show) -> None:
        self.host, self._show = host, show
        self.running, self.beats, self.failures = 0, dict[int, Beat](), dict[int, Failure]()
        self._heard = time.monotonic()
        self._ready, self._stopping, self._ended = threading.Event(), threading.Event(), threading.Event()
        self._opened, self._number_stopping = False, 0
        self._sending = threading.Lock()
        # In a session of its own: Ctrl-C is for the launcher alone, which tells the ranks.
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
        with suppress(OSError, ValueError), self._sending:  # a host that is gone answers with the end of its output
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
            with suppress(ValueError):  # what a login shell prints
                self._take(json.loads(line))
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
