"""Attempts that other schedulers have: light rows, apart from those on the service's own hosts."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from new_jobs import new_job, on

from hvd_transformer.errors import UserError
from hvd_transformer.service.jobs import ACTIVE, Cause, Engine, Host, State
from hvd_transformer.service.storage.external_table import ExternalAttempt
from hvd_transformer.service.storage.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "service.db")
    store.put_hosts([Host("h1", 4)])
    store.add_jobs([new_job("own"), new_job("a", engine=Engine.SLURM), new_job("b", engine=Engine.KUBERNETES)])
    yield store
    store.close()


def test_jobs_on_hosts_and_elsewhere_are_apart(store: Store) -> None:
    store.start(1, on("h1"), 2000.0)
    assert store.start(2, (), 2000.0) is not None and store.start(3, (), 2000.0) is not None
    assert [attempt.job for attempt in store.open_attempts()] == [1]
    assert [job.id for job in store.jobs(ACTIVE, engine=Engine.HOSTS)] == [1]
    first, second = store.external_attempts()
    assert first == ExternalAttempt(2, 1, Engine.SLURM, State.STARTING, "", None, False)
    assert (second.job, second.engine) == (3, Engine.KUBERNETES)
    assert store.external_owners() == {"ann": 2}
    store.end_attempt(3, 1, ended=2100.0, state=State.FAILED)
    assert [attempt.job for attempt in store.external_attempts()] == [2]


def test_how_an_attempt_goes_elsewhere(store: Store) -> None:
    store.start(2, (), 2000.0)
    store.set_external(2, 1, "17")
    store.set_reasons({2: "Slurm job 17: Resources"})
    assert store.external_attempts()[0].reason == "Slurm job 17: Resources"
    store.begin_external(2, 1, "Slurm job 17 on h[1-2]", 2500.0)
    job, (attempt,) = store.job(2), store.attempts(2)
    assert job is not None and (job.state, job.reason) == (State.RUNNING, "Slurm job 17 on h[1-2]")
    assert (attempt.external, attempt.began) == ("17", 2500.0)  # it waited there until then
    store.set_asked_to_stop([(2, 1)])
    assert store.external_attempts()[0].asked_to_stop
    store.update(2, state=State.STOPPING)
    with pytest.raises(UserError):
        store.begin_external(2, 1, "", 2600.0)
    assert store.attempts(2)[0].began == 2500.0


def test_an_attempt_has_run_since_it_began_there(store: Store) -> None:
    store.start(1, on("h1"), 2000.0)
    store.start(2, (), 2000.0)
    store.begin_external(2, 1, "", 2500.0)
    store.start(3, (), 2000.0)  # never begins
    for job in (1, 2, 3):
        store.end_attempt(job, 1, ended=2600.0, state=State.FAILED)
    assert [store.attempts(job)[0].seconds for job in (1, 2, 3)] == [600.0, 100.0, 0.0]


def test_the_service_has_one_id_for_ever(store: Store, tmp_path: Path) -> None:
    id = store.service_id()
    store.close()
    with_it = Store(tmp_path / "service.db")
    assert with_it.service_id() == id
    with_it.close()
    other = Store(tmp_path / "other.db")
    assert other.service_id() != id
    other.close()


def test_an_attempt_that_was_never_handed_over_is_forgotten(store: Store) -> None:
    (job,) = store.add_jobs([new_job(engine=Engine.SLURM)])
    for _ in range(3):
        store.start(job, (), 1000.0)
        store.withdraw(job, 1, "not started: /project: does not answer")
        assert (store.job(job).state, store.job(job).reason) == (  # type: ignore[union-attr]
            State.QUEUED,
            "not started: /project: does not answer",
        )
        assert (store.attempts(job), store.external_attempts(), store.external_owners()) == ([], [], {})
    store.start(job, (), 1000.0)
    store.update(job, state=State.STOPPING, stopping=Cause.CANCELLED)
    store.withdraw(job, 1, "")  # too late
    assert [attempt.state for attempt in store.external_attempts()] == [State.STOPPING]


@pytest.mark.parametrize(("since", "seconds"), [(0.0, 100.0), (1060.0, 40.0)])
def test_ranks_that_nobody_saw_begin_ran(store: Store, since: float, seconds: float) -> None:
    (job,) = store.add_jobs([new_job(engine=Engine.SLURM)])
    store.start(job, (), 1000.0)
    store.set_ran(job, 1, since)
    store.set_ran(job, 1, 1090.0)  # that is known
    store.end_attempt(job, 1, ended=1100.0, state=State.FAILED)
    assert [attempt.seconds for attempt in store.attempts(job)] == [seconds]


@pytest.mark.parametrize("query", ["external_attempts", "external_owners", "open_attempts"])
def test_looking_costs_nothing_for_jobs_that_have_ended(store: Store, query: str) -> None:
    """In steps of SQLite's machine: ten times the ended jobs, the same number of them."""

    def steps() -> int:
        count = 0

        def step() -> None:
            nonlocal count
            count += 1

        with store.database.read() as connection:
            connection.set_progress_handler(step, 1)
        getattr(store, query)()
        with store.database.read() as connection:
            connection.set_progress_handler(None, 1)
        return count

    def end(number: int, engine: Engine) -> None:
        ids = store.add_jobs([new_job(f"{engine.value}{number}{at}", engine=engine) for at in range(number)])
        with store.batch():
            for job in ids:
                store.start(job, (), 2000.0)
                store.end_attempt(job, 1, ended=2100.0, state=State.SUCCEEDED)

    store.start(2, (), 2000.0)
    before = steps()
    for engine in Engine:
        end(200, engine)
    assert before > 0 and steps() <= before + 20
