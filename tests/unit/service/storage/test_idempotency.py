"""Requests that are sent again add their jobs once."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from new_jobs import new_job

from hvd_transformer.errors import UserError
from hvd_transformer.service.storage.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "service.db")
    yield store
    store.close()


def test_a_request_that_is_sent_again_adds_nothing(store: Store) -> None:
    jobs = [new_job("a"), new_job("b")]
    ids = store.add_jobs(jobs, "key")
    later = [replace(job, submitted=job.submitted + 60) for job in jobs]
    assert store.add_jobs(later, "key") == ids
    assert len(store.jobs()) == 2
    with pytest.raises(
        UserError, match="^Idempotency-Key 'key': was sent with another request before; take a new key$"
    ):
        store.add_jobs([new_job("a"), new_job("c")], "key")
    assert store.add_jobs([new_job("a", owner="ben")], "key") == [3]  # keys of others
    assert store.add_jobs(jobs, "other") == [4, 5]
    assert store.add_jobs(jobs) == [6, 7]
    for key in ("", "x" * 201):
        with pytest.raises(UserError, match="^Idempotency-Key: must have 1 to 200 characters$"):
            store.add_jobs(jobs, key)


def test_a_request_is_known_by_its_body_before_it_is_prepared(store: Store) -> None:
    assert store.submitted_before("ann", "key", "body") is None
    ids = store.add_jobs([new_job()], "key", "body")
    assert store.submitted_before("ann", "key", "body") == ids
    assert store.add_jobs([new_job("made otherwise by a newer release")], "key", "body") == ids
    assert store.submitted_before("ben", "key", "body") is None
    with pytest.raises(UserError, match="was sent with another request before"):
        store.submitted_before("ann", "key", "another body")


def test_a_key_is_forgotten_after_a_week(store: Store) -> None:
    day = 86_400.0
    store.add_jobs([new_job(submitted=0.0)], "old", "1")
    store.add_jobs([new_job(submitted=6.9 * day)], "young", "2")
    assert store.submitted_before("ann", "old", "1") == [1]
    store.add_jobs([new_job(submitted=7.1 * day)], "new", "3")
    assert store.submitted_before("ann", "old", "1") is None
    assert store.submitted_before("ann", "young", "2") == [2]


def test_of_many_that_send_the_same_request_one_adds_it(store: Store) -> None:
    results: list[list[int]] = []
    together = threading.Barrier(8)

    def send() -> None:
        together.wait()
        results.append(store.add_jobs([new_job()], "key", "body"))

    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[1]] * 8 and len(store.jobs()) == 1
