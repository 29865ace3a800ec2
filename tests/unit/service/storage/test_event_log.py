"""What followers of changes learn, also those who were away."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from new_jobs import new_job

from hvd_transformer.service.jobs import Host, State
from hvd_transformer.service.storage import event_log
from hvd_transformer.service.storage.event_log import Event
from hvd_transformer.service.storage.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "service.db")
    yield store
    store.close()


def test_each_change_is_told_in_order(store: Store) -> None:
    assert store.last_seq() == 0 and store.events_after(0) == []
    store.add_jobs([new_job("a"), new_job("b")])
    store.put_hosts([Host("h1", 1)])
    assert store.events_after(0) == [Event(1, "job", "1"), Event(2, "job", "2"), Event(3, "hosts", "")]
    assert store.last_seq() == 3
    assert store.events_after(1, limit=1) == [Event(2, "job", "2")]


def test_of_a_subject_only_the_latest_change_is_kept(store: Store) -> None:
    store.add_jobs([new_job("a"), new_job("b")])
    for priority in range(5):
        store.update(1, priority=priority)
    assert store.events_after(0) == [Event(2, "job", "2"), Event(7, "job", "1")]
    assert store.events_after(7) == []


def test_who_follows_learns_of_every_subject_that_changed(store: Store) -> None:
    """Whatever happens between two looks, with a small limit per look."""
    ids = store.add_jobs([new_job(f"j{number}") for number in range(7)])
    seen, seq = dict.fromkeys(ids, 0), 0
    for turn in range(60):
        store.update(ids[turn * 3 % 7], priority=turn)
        for event in store.events_after(seq, limit=2):
            seq = event.seq
            seen[int(event.id)] = store.job(int(event.id)).priority  # type: ignore[union-attr]
    while events := store.events_after(seq, limit=2):
        for event in events:
            seq = event.seq
            seen[int(event.id)] = store.job(int(event.id)).priority  # type: ignore[union-attr]
    assert seen == {job.id: job.priority for job in store.jobs()}
    assert seq == store.last_seq()


def test_old_events_are_dropped(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "EVENTS_KEPT", 10)
    store.add_jobs([new_job(f"j{number}") for number in range(25)])
    assert [event.seq for event in store.events_after(0)] == list(range(16, 26))
    assert store.last_seq() == 25


def test_listeners_hear_of_what_is_committed(store: Store) -> None:
    heard: list[int] = []
    with store.listening(lambda: heard.append(store.last_seq())):
        store.add_jobs([new_job("a"), new_job("b")])
        assert heard == [2]
        store.add_usage("ann", 5.0, 1000.0)  # no event
        store.set_waits({1: "resources"}, {})
        store.set_waits({1: "resources"}, {})
        assert heard == [2, 3]
        changing = threading.Thread(target=lambda: store.update(1, state=State.HELD))
        changing.start()
        changing.join()
        assert heard == [2, 3, 4]
    store.update(1, state=State.QUEUED)
    assert len(heard) == 3
