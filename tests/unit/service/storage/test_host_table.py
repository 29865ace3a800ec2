"""Hosts: added, changed, drained, down and removed."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from new_jobs import new_job, on

from hvd_transformer.errors import UserError
from hvd_transformer.service.jobs import Host, State
from hvd_transformer.service.storage.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "service.db")
    store.put_hosts([Host("h2", 4, (0, 1), 8), Host("h1", 2)])
    yield store
    store.close()


def test_hosts_keep_their_order_and_what_admins_said_of_them(store: Store) -> None:
    store.set_drained("h2", True)
    store.set_down("h1", "ssh: connection refused")
    store.put_hosts([Host("h1", 3), Host("h0", 1), Host("h2", 8, (0, 1, 2, 3), 16)])
    assert store.hosts() == [
        Host("h2", 8, (0, 1, 2, 3), 16, drained=True),
        Host("h1", 3, down="ssh: connection refused"),
        Host("h0", 1),
    ]
    store.set_drained("h2", False)
    store.set_down("h1", "")
    assert store.hosts() == [Host("h2", 8, (0, 1, 2, 3), 16), Host("h1", 3), Host("h0", 1)]


def test_a_host_in_another_case_is_the_same_host(store: Store) -> None:
    """Name servers make no difference; as two hosts its GPUs would be given out twice."""
    store.put_hosts([Host("H2", 8), Host("N1", 1)])
    assert store.hosts() == [Host("h2", 8, (0, 1)), Host("h1", 2), Host("N1", 1)]
    store.put_hosts([Host("H2", 8)], without_gpus=["H2"])
    store.set_drained("H2", True)
    assert store.hosts()[0] == Host("h2", 8, drained=True)
    store.remove_host("H2")
    assert [host.name for host in store.hosts()] == ["h1", "N1"]


def test_an_ipv6_address_is_refused_as_every_job_there_would_fail(store: Store) -> None:
    before = store.hosts()
    with pytest.raises(UserError, match=r"^\[2001:db8::5\]: horovodrun knows no IPv6 addresses; use a host name or an"):
        store.put_hosts([Host("h3", 1), Host("2001:db8::5", 8)])
    assert store.hosts() == before


def test_only_changes_are_told(store: Store) -> None:
    store.set_down("h1", "gone")
    seq = store.last_seq()
    store.set_down("h1", "gone")
    store.set_drained("h1", False)
    assert store.last_seq() == seq
    store.set_drained("h1", True)
    assert [(event.kind, event.id) for event in store.events_after(seq)] == [("hosts", "")]


def test_a_host_is_removed_when_nobody_uses_it(store: Store) -> None:
    store.add_jobs([new_job("a"), new_job("b")])
    store.start(1, on("h2"), 2000.0)
    store.start(2, (*on("h2", 1, 0), *on("h2", 1, 1)), 2000.0)
    with pytest.raises(UserError, match="^host h2: in use by job 1, 2; drain it and wait, or cancel the job$"):
        store.remove_host("h2")
    store.end_attempt(1, 1, ended=2100.0, state=State.SUCCEEDED)
    store.end_attempt(2, 1, ended=2100.0, state=State.SUCCEEDED)
    store.remove_host("h2")
    assert store.hosts() == [Host("h1", 2)]
    assert store.attempts(1)[0].allocation == on("h2")  # what was is still known


def test_a_host_may_shrink_below_what_is_used(store: Store) -> None:
    store.add_jobs([new_job("a"), new_job("b")])
    store.start(1, on("h2", 3), 2000.0)
    store.put_hosts([Host("h2", 2)])
    assert store.start(2, on("h2"), 2000.0) is None
    store.end_attempt(1, 1, ended=2100.0, state=State.SUCCEEDED)
    assert store.start(2, on("h2"), 2000.0)


def test_unknown_hosts(store: Store) -> None:
    for call in (
        lambda: store.set_drained("h9", True),
        lambda: store.remove_host("h9"),
    ):
        with pytest.raises(UserError, match="^host h9: no such host; see hvd-transformer hosts$"):
            call()


def test_a_host_that_comes_again_keeps_its_gpus(store: Store) -> None:
    """As when they were given with `hosts add`, and the service is started again with -H."""
    store.put_hosts([Host("h2", 3), Host("h1", 2)])
    assert [host.gpus for host in store.hosts()] == [(0, 1), ()]
    store.put_hosts([Host("h2", 3, (4,)), Host("h3", 1, (0,))], without_gpus=["h1"])
    assert [host.gpus for host in store.hosts()] == [(4,), (), (0,)]
    store.put_hosts([Host("h2", 3), Host("h3", 1)], without_gpus=["h2"])
    assert [host.gpus for host in store.hosts()] == [(), (), (0,)]


def test_a_host_that_comes_again_keeps_its_threads(store: Store) -> None:
    """As when the service is started again with the same -H: jobs start before the host has been asked."""
    store.put_hosts([Host("h2", 4, (0, 1))])
    assert store.hosts()[0].threads == 8
    store.put_hosts([Host("h2", 5, (0, 1))])
    assert store.hosts()[0].threads == 0
