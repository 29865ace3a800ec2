"""Finds hosts that come back, are new or have more slots while a job runs."""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from hvd_transformer.errors import UserError
from hvd_transformer.launch.agents import HostLost
from hvd_transformer.launch.connection.connections import HostConnections
from hvd_transformer.launch.connection.host_connection import NoConnection
from hvd_transformer.launch.doctor.findings import Finding
from hvd_transformer.launch.horovodrun_command import Horovodrun
from hvd_transformer.launch.host_pool import HostPool
from hvd_transformer.launch.hostfile import Host

_LOOK_SECONDS = 5.0  # between two searches for new hosts

# The first problem of each host that cannot run the job (`examine.Admission.refused`).
Examine = Callable[[Sequence[Host]], Mapping[str, Finding]]


def of_no_host(refused: Mapping[str, Finding], hosts: Sequence[Host]) -> list[Finding]:
    """The findings about none of these hosts: about this one, which reaches the others and may run no rank."""
    names = {host.name for host in hosts}
    return [finding for host, finding in refused.items() if host not in names]


class HostDiscovery:
    """Searches, while a job runs, for new hosts that would give it more ranks, and connects to them.

    Those that cannot be reached or used go, each with the reason, to `set_aside`, which excludes them for a while.
    `examining` is held while hosts are examined, here and by the job's own starts.
    """

    def __init__(
        self,
        pool: HostPool,
        now: Horovodrun,
        connections: HostConnections,
        examine: Examine,
        examining: threading.Lock,
        set_aside: Callable[[Mapping[str, object]], object],
    ) -> None:
        self.found: list[Host] | None = None
        self._pool, self._now, self._connections, self._examine = pool, now, connections, examine
        self._examining, self._set_aside = examining, set_aside
        self._closed = threading.Event()
        threading.Thread(target=self._look, daemon=True).start()

    def close(self) -> None:
        """End the search."""
        self._closed.set()

    def _look(self) -> None:
        while self.found is None and not self._closed.wait(_LOOK_SECONDS):
            with suppress(UserError):  # no answer from the script or a host: try again later
                if new := self._new():
                    unusable = self._unusable(new)
                    if self._closed.is_set():
                        return
                    if unusable:
                        self._set_aside(unusable)
                    else:
                        self.found = new

    def _unusable(self, new: Sequence[Host]) -> Mapping[str, object]:
        names, connections = [host.name for host in new], self._connections
        opened = connections.run(connections.open(names, connections.limits.start))
        silent = {
            host: HostLost(host, connection.last_words())
            for host, connection in opened.items()
            if isinstance(connection, NoConnection)
        }
        if silent:
            return silent
        hosts = [*(host for host in self._now.hosts if host.name not in names), *new]
        try:
            replace(self._now, hosts=hosts)
        except UserError as error:  # Horovod takes no such host
            return {name: HostLost(name, str(error)) for name in names}
        with self._examining:
            if self._closed.is_set():  # the next start may have agents on them, which answer no questions
                return {}
            refused = self._examine(hosts)
        # The job runs without them, on hosts that only differ from the new ones, too: these stay.
        for finding in refused.values():
            own = {name: found for name, found in refused.items() if name in names}
            return own or {name: HostLost(name, str(finding)) for name in names}
        return {}

    def _new(self) -> list[Host]:
        """The hosts with slots that the job does not have, if they give it more ranks."""
        hosts, known = self._pool.hosts(), {host.name: host.slots for host in self._now.hosts}
        more = sum(host.slots for host in hosts) > self._now.num_ranks
        return [host for host in hosts if host.slots > known.get(host.name, 0)] if more else []
