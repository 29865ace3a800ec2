"""The hosts that jobs may use, and which part of them is in use."""

import json
import sqlite3
from collections import Counter
from collections.abc import Collection, Iterable

from hvd_transformer.errors import UserError
from hvd_transformer.launch.hostfile import check_no_ipv6
from hvd_transformer.service.jobs import Allocation, Host, Placement
from hvd_transformer.service.storage.event_log import EventLog


class HostTable(EventLog):
    """The hosts, in the order in which they were added."""

    def hosts(self) -> list[Host]:
        """All hosts."""
        with self.database.read() as connection:
            return [_host(row) for row in connection.execute("SELECT * FROM hosts ORDER BY id")]

    def put_hosts(self, hosts: Iterable[Host], without_gpus: Collection[str] = ()) -> None:
        """Add these hosts, or change the slots, GPUs and threads of those that are known. Others stay.

        A host that comes without `gpus` keeps those that are known, unless it is one of `without_gpus`; one without
        `threads` keeps them if it keeps its slots. One that is known in another case keeps its name. Raises
        `UserError` for an IPv6 address.
        """
        hosts = list(hosts)
        check_no_ipv6(host.name for host in hosts)
        with self.database.write() as connection:
            known = {row["name"].lower(): row["name"] for row in connection.execute("SELECT name FROM hosts")}
            rows = [
                (
                    known.get(h.name.lower(), h.name), h.slots, json.dumps(h.gpus), h.threads, h.drained, h.down,
                    bool(h.gpus) or h.name in without_gpus,
                )
                for h in hosts
            ]  # fmt: skip
            connection.executemany(
                "INSERT INTO hosts (name, slots, gpus, threads, drained, down) VALUES (?, ?, ?, ?, ?, ?)"
                " ON CONFLICT (name) DO UPDATE SET"
                " slots = excluded.slots, gpus = iif(?, excluded.gpus, hosts.gpus), threads ="
                " iif(excluded.threads = 0 AND hosts.slots = excluded.slots, hosts.threads, excluded.threads)",
                rows,
            )
            self.changed(connection, "hosts")

    def set_drained(self, name: str, drained: bool) -> None:
        """Give the host no new job, or let it have jobs again. Raises `UserError` for an unknown host."""
        with self.database.write() as connection:
            host = _known(connection, name)
            if bool(host["drained"]) != drained:
                connection.execute("UPDATE hosts SET drained = ? WHERE name = ?", (drained, host["name"]))
                self.changed(connection, "hosts")

    def set_down(self, name: str, why: str) -> None:
        """Why the host cannot be used now; "" if it can. One that is gone stays so."""
        with self.database.write(durable=False) as connection:
            query = "UPDATE hosts SET down = :why WHERE name = :name AND down != :why"
            if connection.execute(query, {"why": why, "name": name}).rowcount:
                self.changed(connection, "hosts")

    def set_threads(self, name: str, threads: int) -> None:
        """CPU threads per slot. Nothing else of the host changes, and one that is gone stays so."""
        with self.database.write(durable=False) as connection:
            connection.execute("UPDATE hosts SET threads = ? WHERE name = ?", (threads, name))
            self.changed(connection, "hosts")

    def remove_host(self, name: str) -> None:
        """Forget a host. Raises `UserError` for an unknown one, or if jobs are on it."""
        with self.database.write() as connection:
            name = _known(connection, name)["name"]
            jobs = [str(job) for job in dict.fromkeys(row["job"] for row in _in_use(connection, name))]
            if jobs:
                raise UserError(f"host {name}: in use by job {', '.join(jobs)}; drain it and wait, or cancel the job")
            connection.execute("DELETE FROM hosts WHERE name = ?", (name,))
            self.changed(connection, "hosts")


def can_have(connection: sqlite3.Connection, job: int, allocation: Allocation) -> bool:
    """Whether all of this is free for the job, beside what other jobs use: the last look before slots are given."""
    for name in {part.host for part in allocation}:
        row = connection.execute("SELECT * FROM hosts WHERE name = ?", (name,)).fetchone()
        if row is None:
            return False
        host, in_use = _host(row), _in_use(connection, name)
        others = [placement_of(row) for row in in_use if row["job"] != job]
        here = [part for part in allocation if part.host == name]
        if (host.drained or host.down) and len(others) == len(in_use):  # the job has no part of it yet
            return False
        if sum(part.ranks for part in (*here, *others)) > host.slots:
            return False
        gpus = Counter(gpu for part in (*here, *others) for gpu in part.gpus)
        if any(gpus[gpu] > 1 or gpu not in host.gpus for part in here for gpu in part.gpus):
            return False
    return True


def place(connection: sqlite3.Connection, job: int, number: int, allocation: Allocation) -> None:
    """Give an attempt these slots, in place of those that it has."""
    connection.execute("DELETE FROM placements WHERE job = ? AND number = ?", (job, number))
    connection.executemany(
        "INSERT INTO placements (job, number, position, host, ranks, gpus) VALUES (?, ?, ?, ?, ?, ?)",
        ((job, number, i, part.host, part.ranks, json.dumps(part.gpus)) for i, part in enumerate(allocation)),
    )


def placement_of(row: sqlite3.Row) -> Placement:
    """A placement, of a row of `placements`."""
    return Placement(row["host"], row["ranks"], tuple(json.loads(row["gpus"])))


def _in_use(connection: sqlite3.Connection, host: str) -> list[sqlite3.Row]:
    query = "SELECT * FROM placements WHERE in_use AND host = ?"
    return connection.execute(query, (host,)).fetchall()


def _known(connection: sqlite3.Connection, name: str) -> sqlite3.Row:
    """The host of this name, whatever its case."""
    query = "SELECT * FROM hosts WHERE name = ? COLLATE NOCASE"
    row: sqlite3.Row | None = connection.execute(query, (name,)).fetchone()
    if row is None:
        raise UserError(f"host {name}: no such host; see hvd-transformer hosts")
    return row


def _host(row: sqlite3.Row) -> Host:
    return Host(
        row["name"], row["slots"], tuple(json.loads(row["gpus"])), row["threads"], bool(row["drained"]), row["down"]
    )
