"""Which new hosts a running job takes in, and what becomes of a search that has been ended."""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from node_agents import connections_opened
from waiting import wait_until

from hvd_transformer.launch import host_discovery
from hvd_transformer.launch.connection.connections import HostConnections
from hvd_transformer.launch.doctor.findings import Finding
from hvd_transformer.launch.horovodrun_command import Horovodrun
from hvd_transformer.launch.host_discovery import Examine, HostDiscovery
from hvd_transformer.launch.host_pool import HostPool
from hvd_transformer.launch.hostfile import Host

HERE = Host("localhost", 1)
FAR = Host("far.invalid", 1)


class Stand:
    """A search for hosts beside HERE, which finds FAR."""

    def __init__(self, connections: HostConnections, log: Path) -> None:
        self.examining, self.log = threading.Lock(), log
        self.aside: dict[str, object] = {}
        self._connections = connections

    @contextmanager
    def search(self, examine: Examine, new: Host = FAR) -> Iterator[HostDiscovery]:
        pool, now = HostPool(lambda: [HERE, new], None), Horovodrun([HERE])
        found = HostDiscovery(pool, now, self._connections, examine, self.examining, self.aside.update)
        yield found
        found.close()


@pytest.fixture
def stand(connections: HostConnections, ssh_log: Path, monkeypatch: pytest.MonkeyPatch) -> Stand:
    monkeypatch.setattr(host_discovery, "_LOOK_SECONDS", 0.05)
    return Stand(connections, ssh_log)


def test_a_search_that_has_ended_examines_nothing(stand: Stand) -> None:
    """Its hosts may be those of the next start, whose agents answer no questions."""
    examined = []

    def examine(hosts: Sequence[Host]) -> Mapping[str, Finding]:
        examined.append(hosts)
        return {}

    with stand.examining:
        with stand.search(examine) as ended:
            wait_until(lambda: connections_opened(stand.log) == 1)
            time.sleep(1.0)  # it is connected, and waits for its turn
        assert not examined
    time.sleep(0.3)
    assert (examined, ended.found, stand.aside) == ([], None, {})


@pytest.mark.parametrize("refused", [{}, {"far.invalid": Finding("far.invalid", "there is no Python", "install it")}])
def test_a_search_that_ends_meanwhile_finds_nothing(stand: Stand, refused: Mapping[str, Finding]) -> None:
    began, goes_on = threading.Event(), threading.Event()

    def examine(hosts: Sequence[Host]) -> Mapping[str, Finding]:
        began.set()
        assert goes_on.wait(20)
        return refused

    with stand.search(examine) as ended:
        assert began.wait(20)
    goes_on.set()
    time.sleep(0.3)
    assert (ended.found, stand.aside) == (None, {})


def test_where_this_host_does_not_reach_the_new_ones_they_are_set_aside(stand: Stand) -> None:
    """It runs no rank of the job: nobody can exclude it."""
    own = Finding("launcher", "no network interface in common with the others: it has eth0", "give it the same name")
    with stand.search(lambda hosts: {own.host: own}):
        wait_until(lambda: stand.aside)
    assert {host: str(why) for host, why in stand.aside.items()} == {
        "far.invalid": f"host far.invalid: cannot be used: {own}"
    }


def test_hosts_on_which_the_job_runs_are_never_set_aside(stand: Stand) -> None:
    """They only differ from the new one, such as one with GPUs or a newer torch."""
    differs = Finding(HERE.name, "torch 2.11.0, the others 2.13.0", "install the same")
    with stand.search(lambda hosts: {HERE.name: differs}) as search:
        wait_until(lambda: stand.aside)
    assert {host: str(why) for host, why in stand.aside.items()} == {
        "far.invalid": f"host far.invalid: cannot be used: {differs}"
    }
    assert search.found is None


def test_a_host_that_horovod_does_not_take_is_set_aside(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next start would refuse it, and end the job."""
    new = Host("fe80::1", 1)
    with stand.search(lambda hosts: {}, new) as search:
        wait_until(lambda: stand.aside)
    assert search.found is None
    assert [str(why).startswith("host fe80::1: cannot be used: ") for why in stand.aside.values()] == [True]
