"""The launcher's side of the node agents during one start of a job: orders to them, and the news that they send.

A node agent (`node_agent.py`) starts the ranks of its host and is their parent. It creates a private folder for the
ranks' heartbeats, and ends them all when its connection ends, even if the launcher was killed.
"""

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from queue import Empty, SimpleQueue
from types import MappingProxyType
from typing import Any, NamedTuple

from hvd_transformer.errors import UserError
from hvd_transformer.launch.connection.connections import HostConnections
from hvd_transformer.launch.connection.host_connection import HostConnection, Message, NoConnection
from hvd_transformer.launch.doctor import findings
from hvd_transformer.launch.limits import too_few_files_for_gloo
from hvd_transformer.launch.node import probe

_END_SECONDS = 10.0  # for the agents to end their ranks
_LOOK_SECONDS = 0.02

Beat = dict[str, Any]  # `Watchdog.beat` in monitoring/watchdog.py, its "age", and the host's name on the command line
Printed = tuple[int, str, str]  # rank, "out" or "err", whole lines


class Failure(NamedTuple):
    """A rank that exited with a code other than 0."""

    time: float  # on this process's monotonic clock
    rank: int
    code: int
    host: str  # its own name
    given_host: str  # its name on the command line


class HostLost(UserError):
    """A host that cannot be reached or used."""

    def __init__(self, host: str, why: str) -> None:
        super().__init__(f"host {host}: cannot be used: {why}")
        self.host, self.why = host, why


class HostAgents:
    """The node agents of the hosts of one start, from construction to `close`.

    What changes in it changes on the thread of the connections: each message is looked at once, when it comes, and
    nothing here is searched while the job runs.

    Raises `HostLost` for a host that cannot be reached.
    """

    def __init__(self, hosts: Sequence[str], connections: HostConnections) -> None:
        self.lost: dict[str, str] = {}  # hosts that no longer answer, and their last words
        self.beats: dict[int, Beat] = {}  # the newest heartbeat of each rank
        self.leaving: dict[str, str] = {}  # hosts that are about to end, and why they are excluded
        self.silent = False  # whether a rank's watchdog does not run
        self.num_ended = 0  # ranks
        self.have_begun = False  # whether a rank runs, or has run
        self._closed = False
        self._num_stopping = 0
        self._failures: dict[int, Failure] = {}
        self._printed: SimpleQueue[Printed] = SimpleQueue()
        self._connections, self._limits = connections, connections.limits
        self._running: dict[str, int] = {}
        self._answered: dict[str, set[str]] = {"ready": set(), "stopping": set(), "ended": set()}
        self._failed: dict[str, str] = {}  # why a host cannot be used
        local = connections.run(connections.local(hosts))
        here = next((host for host in hosts if local[host]), None)
        self._agent_of = {host: here if here is not None and local[host] else host for host in hosts}
        opened = connections.run(connections.open(dict.fromkeys(self._agent_of.values()), self._limits.start))
        self._agents: dict[str, HostConnection] = {}
        for host, connection in opened.items():
            if isinstance(connection, NoConnection):
                raise HostLost(host, connection.last_words())
            self._agents[host] = connection

    def interfaces(self, wanted: str | None) -> str | None:
        """The network interfaces for the ranks, separated by commas; None if all of them are on this host.

        `wanted`: the user's choice. Raises `UserError`, which names a host without an interface that all have.
        """
        found = {host: agent.hello["interfaces"] for host, agent in self._agents.items() if not agent.local}
        if not found:
            return None
        reached = {host: self._agents[host].hello["reached"] for host in found}
        here = next((host for host, agent in self._agents.items() if agent.local), "this host")
        return findings.choose_interfaces(wanted, {**found, here: probe.interfaces()}, reached)

    def begin(self, values: Mapping[str, str], gpus: Mapping[str, Sequence[int]] = MappingProxyType({})) -> None:
        """Prepare all agents for a start, whose ranks get this process's umask.

        `values`: environment variables for the ranks only; `gpus`: the GPUs that the ranks of a host see, over gloo and
        MPI. Raises `UserError` for two names of this machine with different GPUs: its ranks have one agent.
        """
        for host, agent in self._agent_of.items():
            if gpus.get(host) != gpus.get(agent):
                raise UserError(f"host {host}: is the same machine as {agent}, with other gpus=; list it once")
        os.umask(umask := os.umask(0o077))
        order = {"do": "begin", "umask": umask}
        order |= {"silence": self._limits.launcher_silence, "save": self._limits.save}
        # In the order of nvidia-smi, which was asked about them; CUDA's own has the fastest first.
        order_of_smi = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        visible = {
            host: {"CUDA_VISIBLE_DEVICES": ",".join(map(str, its_gpus)), **order_of_smi}
            for host, its_gpus in gpus.items()
        }
        orders = {host: {**order, "values": {**values, **visible.get(host, {})}} for host in self._agents}
        self._connections.run(self._begin(orders))

    def wait_ready(self) -> None:
        """Wait for all agents. Raises `HostLost`, with the reason, for the first host without a folder."""
        deadline = time.monotonic() + self._limits.start
        while not self._all("ready") and not self._failed and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        for host in self._agents:
            if host in self._failed or host not in self._answered["ready"]:
                raise HostLost(host, self._failed.get(host, self._silent_words()))

    def start(self, order: Message, ranks: Sequence[Mapping[str, str]]) -> None:
        """Start the ranks over gloo. `ranks`: the environment of each; `order`: what they have in common.

        Raises `HostLost` for a host that allows too few open files.
        """
        by_host: dict[str, list[Mapping[str, str]]] = {}
        for rank in ranks:
            by_host.setdefault(self._agent_of[rank["HOROVOD_HOSTNAME"]], []).append(rank)
        for host in by_host:
            if why := too_few_files_for_gloo(len(ranks), self._agents[host].hello["open_files"]):
                raise HostLost(host, why)
        for host, its_ranks in by_host.items():
            message = {"do": "start", **order, "ranks": its_ranks}
            if not self._agents[host].local:  # which GPUs are visible here says nothing about other hosts
                kept = {name: value for name, value in order["environment"].items() if name != "CUDA_VISIBLE_DEVICES"}
                message["environment"] = kept
            self._order(message, [host])

    def is_silent(self, beat: Beat) -> bool:
        """Whether the rank's watchdog does not run; it would have ended a rank that makes no progress."""
        return float(beat["age"]) > self._limits.rank_silence(beat["phase"])

    @property
    def running(self) -> int:
        """Number of ranks that are running."""
        return sum(count for host, count in self._running.items() if not self._agents[host].lost)

    @property
    def failures(self) -> list[Failure]:
        """Failed ranks, in the order of their failures."""
        return sorted(self._failures.copy().values())

    def printed(self) -> list[Printed]:
        """What the ranks have printed since the last call."""
        result = []
        while True:
            try:
                result.append(self._printed.get_nowait())
            except Empty:
                return result

    def stop(self) -> int:
        """Ask every rank to save and exit; return the number of running ranks."""
        self._order({"do": "stop"})
        while not self._all("stopping"):
            time.sleep(_LOOK_SECONDS)
        return self._num_stopping

    def write_stacks(self) -> None:
        """Ask every rank to write its Python stacks to its log."""
        self._order({"do": "stacks"})

    def close(self) -> list[Failure]:
        """Kill the remaining ranks on all hosts; return the failures in order. The agents wait for another start."""
        # What is still a probe has no ranks. A second "end" might be answered to the next start.
        agents = [host for host, connection in self._agents.items() if connection.is_agent]
        if self._closed or not agents:
            return self.failures
        self._closed = True
        self._order({"do": "end"}, agents)
        deadline = time.monotonic() + _END_SECONDS
        while not self._all("ended", agents) and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        for host in agents:
            agent = self._agents[host]
            agent.listener = None
            if agent.lost or host not in self._answered["ended"]:
                self._connections.run(agent.close())
        return self.failures

    def took(self, connection: HostConnection, message: Message) -> None:
        host = connection.host
        for answer in self._answered.keys() & message.keys():
            self._answered[answer].add(host)
        self._num_stopping += message.get("stopping", 0)
        if "leaving" in message:
            self.leaving[host] = f"host {host} is about to end"
        if "running" not in message:
            return
        self._running[host] = message["running"]
        self.have_begun |= bool(message["running"] or message["ranks_ended"])
        now = time.monotonic()
        for beat in message["beats"]:
            self.beats[beat["rank"]] = {**beat, "given_host": host}
            self.silent |= self.is_silent(beat)
        for rank in message["output"]:
            self._printed.put((rank["rank"], rank["stream"], rank["text"]))
        for ended in message["ranks_ended"]:
            if ended["code"]:
                failure = Failure(now - ended["age"], ended["rank"], ended["code"], message["host"], host)
                self._failures[failure.rank] = failure
            self.num_ended += 1

    def was_lost(self, connection: HostConnection) -> None:
        self.lost[connection.host] = connection.last_words

    def _silent_words(self) -> str:
        return f"no answer in {self._limits.start:.0f} seconds (--start-timeout)"

    def _all(self, answer: str, hosts: Sequence[str] | None = None) -> bool:
        """Whether all agents, or those of `hosts`, that are not lost have answered."""
        asked = self._agents if hosts is None else hosts
        return all(host in self._answered[answer] or self._agents[host].lost for host in asked)

    def _order(self, message: Message, hosts: Sequence[str] | None = None) -> None:
        async def send() -> None:
            for host in self._agents if hosts is None else hosts:
                self._agents[host].send(message)

        self._connections.run(send())

    async def _begin(self, orders: Mapping[str, Message]) -> None:
        async def begin(connection: HostConnection) -> None:
            connection.listener = self
            try:
                if not connection.is_agent:
                    await asyncio.wait_for(self._connections.make_agent(connection), self._limits.start)
                connection.send(orders[connection.host])
            except (NoConnection, asyncio.TimeoutError) as error:
                said = error.last_words() if isinstance(error, NoConnection) else self._silent_words()
                self._failed[connection.host] = said
                await connection.close()

        await asyncio.gather(*map(begin, self._agents.values()))
