"""How long queued jobs will run, by what the database knows of others."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from new_jobs import new_job, on

from hvd_transformer.service.jobs import Host, Needs, State
from hvd_transformer.service.scheduling.run_length import Pace
from hvd_transformer.service.storage import pace_table
from hvd_transformer.service.storage.store import Store

EPOCHS = {"task": "language_model", "optimizer.lr": 1e-3}
STEPS = {**EPOCHS, "training.max_steps": 200}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "service.db")
    store.put_hosts([Host("h1", 8)])
    yield store
    store.close()


def seconds(store: Store) -> dict[int, float | None]:
    return {job.id: job.seconds for job in store.waiting()}


def finish(store: Store, job: int, began: float, ended: float, state: State = State.SUCCEEDED) -> None:
    assert store.start(job, on("h1"), began)
    store.end_attempt(job, len(store.attempts(job)), ended=ended, state=state, last_step=50)


def test_the_length_of_a_job_like_others(store: Store) -> None:
    two = Needs(2, 2)
    seen, rate, small, limited, steps = store.add_jobs(
        [
            new_job("seen", needs=two, config=EPOCHS),
            new_job("rate", needs=two, config={**EPOCHS, "optimizer.lr": 3e-4}),
            new_job("small", config=EPOCHS),
            new_job("limited", needs=two, config=EPOCHS, time_limit=60.0),
            new_job("steps", needs=two, config=STEPS),
        ]
    )
    (stranger,) = store.add_jobs([new_job("stranger", needs=two, owner="ben", config=EPOCHS, time_limit=9e9)])
    unknown = {seen: None, rate: None, small: None, limited: 60.0, steps: None, stranger: 9e9}
    assert seconds(store) == unknown
    store.put_pace(seen, Pace(0.5, 300, 2), 1000.0)
    assert seconds(store) == {**unknown, seen: 150.0, rate: 150.0, small: 300.0}
    store.put_pace(steps, Pace(0.2, None, 2), 1001.0)
    store.put_pace(rate, Pace(1.0, 300, 2), 1002.0)  # what was seen last
    assert seconds(store) == {**unknown, seen: 300.0, rate: 300.0, small: 600.0, steps: 40.0}


def test_steps_that_a_job_has_done_are_not_left(store: Store) -> None:
    (job,) = store.add_jobs([new_job(config=STEPS)])
    store.put_pace(job, Pace(2.0, None, 2), 1000.0)
    assert seconds(store) == {job: 400.0}
    finish(store, job, 1000.0, 1100.0, State.QUEUED)
    assert seconds(store) == {job: 300.0}


def test_the_kinds_seen_last_are_kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace_table, "_MOST_KINDS", 3)
    jobs = store.add_jobs([new_job(config={**STEPS, "model.num_layers": layers}) for layers in range(5)])
    for time, job in enumerate(jobs):
        store.put_pace(job, Pace(1.0, None, 2), float(time))
    assert list(seconds(store).values()) == [None, None, 200.0, 200.0, 200.0]


def test_recent_lengths_are_those_of_jobs_that_succeeded_last(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace_table, "_RECENT", 3)
    for number, state in enumerate([State.SUCCEEDED, State.SUCCEEDED, State.FAILED, State.SUCCEEDED]):
        (job,) = store.add_jobs([new_job()])
        if number == 3:  # two attempts
            finish(store, job, 2000.0, 2500.0, State.QUEUED)
        finish(store, job, 3000.0 + number, 3010.0 + 2 * number, state)
    assert store.recent_seconds() == [513.0, 11.0]


def operations(store: Store) -> int:
    """How many instructions SQLite's machine takes for a look at the queue."""
    count = 0

    def tick() -> None:
        nonlocal count
        count += 1

    with store.database.write() as connection:  # the same connection for all
        connection.set_progress_handler(tick, 1)
        store.waiting()
        store.recent_seconds()
        connection.set_progress_handler(None, 1)
    return count


def test_a_look_does_not_grow_with_history(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace_table, "_RECENT", 10)
    waiting = store.add_jobs(
        [new_job(f"waits-{layers}", config={**STEPS, "model.num_layers": layers}) for layers in (0, 1)]
    )

    def live(jobs: range) -> None:
        for number in jobs:
            (job,) = store.add_jobs([new_job(config={**STEPS, "model.num_layers": number})])
            store.put_pace(job, Pace(1.0, None, 1), float(number))
            finish(store, job, 2000.0, 3000.0 + number)

    live(range(20))
    before = operations(store)
    live(range(20, 100))
    assert list(seconds(store)) == waiting
    assert operations(store) == pytest.approx(before, rel=0.05)
