"""The connections to all hosts of a job, kept across its restarts: one ssh per remote host, preflight included."""

import asyncio
import os
import secrets
import threading
from collections.abc import Coroutine, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from hvd_transformer.launch.connection.host_connection import HostConnection, NoConnection
from hvd_transformer.launch.connection.ssh import Ssh, is_local
from hvd_transformer.launch.limits import raise_open_files, require_files_for_hosts
from hvd_transformer.launch.sigterm import sigterm_blocked
from hvd_transformer.launch.time_limits import TimeLimits

_AT_A_TIME = 32  # connections that are being opened
_PING_SECONDS = 1.0
_SUSPENDED_SECONDS = 3.0  # pings that are further apart mean that this process was suspended: it does not count
_END_SECONDS = 10.0  # for the agents to exit
_T = TypeVar("_T")


class HostConnections:
    """Opens what is missing and keeps what works, from construction to `close`.

    One thread serves all hosts; coroutines run there through `run`. `environment` is that of ssh and of local programs.
    """

    def __init__(self, ssh: Ssh, environment: Mapping[str, str], limits: TimeLimits | None = None) -> None:
        raise_open_files()
        self.limits = limits or TimeLimits()
        # The folder that each agent creates on its host has this name and an ending of its own.
        self.folder = f"/tmp/hvd-transformer-{os.getpid()}-{secrets.token_hex(4)}"
        self._ssh, self._environment = ssh, environment
        self._withheld: set[str] = set()
        self._open: dict[str, HostConnection] = {}
        self._opening: dict[str, asyncio.Lock] = {}
        self._turns = asyncio.Semaphore(_AT_A_TIME)
        self._names = ThreadPoolExecutor(_AT_A_TIME)
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(self._names)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        self._pinging = asyncio.run_coroutine_threadsafe(self._ping(), self._loop)

    def withhold(self, names: Iterable[str]) -> None:
        """Keep variables of this process, which only the ranks may see, from every ssh that is started after this."""
        self._withheld |= set(names)

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine on the thread of the connections and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        """End all programs on all hosts."""
        self._pinging.cancel()
        self.run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._names.shutdown(cancel_futures=True)
        self._loop.close()

    async def open(self, hosts: Iterable[str], seconds: float) -> dict[str, HostConnection | NoConnection]:
        """A connection to each host, or why there is none. Each new one may take `seconds` once it is its turn.

        Raises `UserError` if this host has no ssh, or may not open enough files.
        """
        names = list(hosts)
        require_files_for_hosts(len(names))
        local = await self.local(names)
        opening = (self._one(host, local[host], seconds) for host in names)
        results = await asyncio.gather(*opening, return_exceptions=True)
        found: dict[str, HostConnection | NoConnection] = {}
        for host, result in zip(names, results, strict=True):
            if not isinstance(result, HostConnection | NoConnection):
                raise result
            found[host] = result
        return found

    async def drop(self, hosts: Iterable[str]) -> None:
        """End the programs on these hosts: the next `open` connects anew."""
        dropped = [self._open.pop(host) for host in set(hosts) & self._open.keys()]
        await asyncio.gather(*(connection.close() for connection in dropped))

    async def local(self, hosts: Iterable[str]) -> dict[str, bool]:
        """Whether each host is this machine; name servers are asked in parallel."""
        names, loop = list(hosts), asyncio.get_running_loop()
        found = await asyncio.gather(*(loop.run_in_executor(None, is_local, host) for host in names))
        return dict(zip(names, found, strict=True))

    async def make_agent(self, connection: HostConnection) -> None:
        """Replace the probe of a host by its node agent. Raises `NoConnection`."""
        await connection.become_agent(self.folder, self._environment)

    def _serve(self) -> None:
        with sigterm_blocked():  # for ssh
            self._loop.run_forever()

    async def _one(self, host: str, local: bool, seconds: float) -> HostConnection:
        async with self._opening.setdefault(host, asyncio.Lock()):  # two threads may want the same new host
            connection = self._open.get(host)
            if connection is not None and connection.has_ended:
                await connection.close()
                connection = None
            if connection is None:
                connection = await HostConnection.open(
                    host, local, self._ssh, self._environment, seconds, self._turns, self._withheld
                )
                self._open[host] = connection
            return connection

    async def _ping(self) -> None:
        while True:
            began = self._loop.time()
            await asyncio.sleep(_PING_SECONDS)
            slept = self._loop.time() - began
            for connection in self._open.values():
                if slept > _SUSPENDED_SECONDS:
                    connection.excuse(slept)
                if connection.is_agent and not connection.lost:
                    connection.ping(self.limits.silence)

    async def _close(self) -> None:
        await asyncio.gather(*(connection.leave(_END_SECONDS) for connection in self._open.values()))
