"""Jobs in a real database: added once, found by page, and changed as their states allow."""

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from new_jobs import new_job, on

from hvd_transformer.errors import UserError
from hvd_transformer.service.jobs import ACTIVE, ENDED, Cause, Host, Job, Needs, State
from hvd_transformer.service.scheduling.snapshot import Waiting
from hvd_transformer.service.storage import job_rows
from hvd_transformer.service.storage.job_table import QueueFull
from hvd_transformer.service.storage.settings import Limits
from hvd_transformer.service.storage.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "service.db")
    store.put_hosts([Host("h1", 8)])
    yield store
    store.close()


def finish(store: Store, job: int, state: State = State.SUCCEEDED, ended: float = 3000.0) -> None:
    assert store.start(job, on("h1"), 2000.0)
    store.end_attempt(job, len(store.attempts(job)), ended=ended, state=state, code=0)


def names(jobs: list[Job]) -> list[str]:
    return [job.name for job in jobs]


def test_an_id_is_never_used_again(store: Store, tmp_path: Path) -> None:
    (last,) = store.add_jobs([new_job()])
    store.update(last, state=State.CANCELLED, ended=2000.0)
    assert store.forget(2001.0, tmp_path) == [last]
    store.close()
    with closing(Store(tmp_path / "service.db")) as again:
        assert again.add_jobs([new_job()]) == [last + 1]


def test_all_or_none_are_added(store: Store) -> None:
    before = store.last_seq()
    with pytest.raises(UserError, match=r"^after 99: no such job$"):
        store.add_jobs([new_job("a"), new_job("b", after=(99,))])
    with pytest.raises(UserError, match="^output_dir=/runs/x: job 1 uses it, which is QUEUED; choose another folder"):
        store.add_jobs([new_job("a", output_dir="/runs/x"), new_job("b", output_dir="/runs/x")])
    with pytest.raises(UserError, match=r"^after 1: no such job$"):  # itself
        store.add_jobs([new_job("a", after=(1,))])
    assert store.jobs() == [] and store.last_seq() == before


def test_an_array_has_no_more_dependencies_than_one_transaction_takes(store: Store) -> None:
    ids = store.add_jobs([new_job("a") for _ in range(401)])
    with pytest.raises(UserError, match=r"^after: 100,250 dependencies of 250 jobs; at most 100,000: let one job wait"):
        store.add_jobs([new_job("b", after=tuple(ids)) for _ in range(250)])
    assert len(store.jobs()) == 401


def test_a_run_directory_is_of_one_job_at_a_time(store: Store) -> None:
    (first,) = store.add_jobs([new_job(output_dir="/runs/x")])
    with pytest.raises(
        UserError, match=rf"^output_dir=/runs/x: job {first} uses it.* start after it with --after {first}$"
    ):
        store.add_jobs([new_job(output_dir="/runs/x")])
    (second,) = store.add_jobs([new_job(output_dir="/runs/x", after=(first,))])
    finish(store, first)
    store.update(second, state=State.CANCELLED, ended=2000.0)
    (third,) = store.add_jobs([new_job(output_dir="/runs/x")])
    store.add_jobs([new_job(output_dir="/runs/y")])
    assert {folder: job.id for folder, job in store.jobs_by_output(["/runs/x", "/runs/z"]).items()} == {
        "/runs/x": third
    }


def test_a_job_is_not_retried_while_another_one_uses_its_run_directory(store: Store) -> None:
    first, other = store.add_jobs([new_job("a", output_dir="/runs/x"), new_job("b", output_dir="/runs/y")])
    finish(store, first, State.FAILED)
    (second,) = store.add_jobs([new_job("c", output_dir="/runs/x")])
    finish(store, other, State.FAILED)
    store.update(other, state=State.QUEUED)
    for state in (State.HELD, State.QUEUED):
        store.update(second, state=state)
        line = rf"^job {first}: job {second} uses its run directory, /runs/x, and is {state.value}; wait for its end, "
        with pytest.raises(UserError, match=line):
            store.update(first, state=State.QUEUED, retries=0)
    finish(store, second)
    assert store.update(first, state=State.QUEUED, retries=0).state is State.QUEUED


def test_jobs_that_wait_for_each_other_share_a_run_directory(store: Store) -> None:
    (first,) = store.add_jobs([new_job(output_dir="/runs/x")])
    (second,) = store.add_jobs([new_job(output_dir="/runs/x", after=(first,))])
    (third,) = store.add_jobs([new_job(output_dir="/runs/x", after=(second,))])
    finish(store, first, State.FAILED)
    for job in (second, third):
        store.update(job, state=State.CANCELLED, ended=3000.0)
    for job in (second, first, third):
        assert store.update(job, state=State.QUEUED, retries=0).state is State.QUEUED
    assert [job.id for job in store.waiting()] == [first]


def test_who_shares_a_run_directory_is_found_at_the_same_cost_beside_many_dependencies(store: Store) -> None:
    def cost(job: int) -> int:
        steps = 0

        def step() -> None:
            nonlocal steps
            steps += 1

        with store.database.read() as connection:
            connection.set_progress_handler(step, 1)
            assert job_rows.conflict(connection, job) is None
            connection.set_progress_handler(None, 1)
        return steps

    ids = [store.add_jobs([new_job("first")])[0]]
    alone = cost(ids[0])
    for number in range(300):
        ids += store.add_jobs([new_job(f"j{number}", after=ids[-3:])])
    assert max(map(cost, ids)) <= 2 * alone


def test_what_a_job_is_stopped_for_stays_but_for_a_cancel(store: Store) -> None:
    """The manager may decide on what it has read a moment before."""
    store.add_jobs([new_job()])
    assert store.start(1, on("h1"), 2000.0)
    for cause, stays in (
        (Cause.PREEMPTED, Cause.PREEMPTED),
        (Cause.TIME_LIMIT, Cause.PREEMPTED),
        (Cause.CANCELLED, Cause.CANCELLED),
        (Cause.PREEMPTED, Cause.CANCELLED),
        (Cause.KILLED, Cause.KILLED),
        (Cause.CANCELLED, Cause.KILLED),
    ):
        assert store.update(1, state=State.STOPPING, stopping=cause).stopping is stays


def test_limits_of_the_queue(store: Store) -> None:
    store.set_limits(Limits(max_queued=3, max_slots=4))
    store.add_jobs([new_job("a"), new_job("b", held=True)])
    with pytest.raises(QueueFull, match="^ann has 2 jobs in the queue and may have 3; 2 more are too many$"):
        store.add_jobs([new_job("c"), new_job("d")])
    with pytest.raises(UserError, match="may have 3; 4 more are too many$") as never:
        store.add_jobs([new_job(name) for name in "cdef"])
    assert type(never.value) is UserError  # there will be no room later either
    finish(store, 1)
    store.add_jobs([new_job("c"), new_job("d")])
    store.add_jobs([new_job("e", owner="ben")])
    with pytest.raises(UserError, match="^ben may use 4 slots; f needs 5$"):
        store.add_jobs([new_job("f", owner="ben", needs=Needs(5, 5))])
    with pytest.raises(UserError, match="^ben may use 4 slots; f needs at least 6$"):
        store.add_jobs([new_job("f", owner="ben", needs=Needs(8, 5, 2))])
    store.add_jobs([new_job("f", owner="ben", needs=Needs(8, 3, 2))])  # elastic: it starts with what it may have


def test_who_may_start(store: Store) -> None:
    store.add_jobs([new_job("a", time_limit=60.0), new_job("b", held=True), new_job("c", needs=Needs(4, 2, 2, 1))])
    store.add_jobs([new_job("d", owner="ben", priority=3, submitted=7.0, after=(1, 3)), new_job("e", after=(1,))])
    needs = Needs(1, 1)
    assert store.waiting() == [
        Waiting(1, "ann", 0, 1000.0, needs, 60.0),
        Waiting(3, "ann", 0, 1000.0, Needs(4, 2, 2, 1)),
    ]
    assert store.unmet_dependencies() == {4: {1: State.QUEUED, 3: State.QUEUED}, 5: {1: State.QUEUED}}
    finish(store, 1)
    finish(store, 3, State.FAILED)
    assert store.waiting() == [Waiting(5, "ann", 0, 1000.0, needs)]
    assert store.unmet_dependencies() == {4: {3: State.FAILED}}
    store.update(3, state=State.QUEUED)
    finish(store, 3)
    assert [job.id for job in store.waiting()] == [4, 5]
    assert store.waiting()[0] == Waiting(4, "ben", 3, 7.0, needs)
    assert store.unmet_dependencies() == {}
    assert store.counts() == {State.HELD: 1, State.QUEUED: 2, State.SUCCEEDED: 2}
    assert store.counts("ben") == {State.QUEUED: 1}


def test_what_belongs_to_a_state_leaves_with_it(store: Store) -> None:
    store.add_jobs([new_job()])
    job = store.update(1, reason="resources", estimated_start=5000.0)
    assert (job.reason, job.estimated_start) == ("resources", 5000.0)
    job = store.update(1, state=State.HELD)
    assert (job.reason, job.estimated_start) == ("", None)
    store.update(1, state=State.QUEUED)
    assert store.start(1, on("h1"), 2000.0)
    store.update(1, state=State.RUNNING)
    job = store.update(1, state=State.STOPPING, stopping=Cause.TIME_LIMIT)
    assert job.stopping is Cause.TIME_LIMIT
    job = store.end_attempt(1, 1, ended=3000.0, state=State.FAILED, code=75, reason="time limit")
    assert (job.stopping, job.ended, job.reason) == (None, 3000.0, "time limit")
    job = store.update(1, state=State.QUEUED, retries=0)
    assert (job.ended, job.reason) == (None, "")
    assert job == store.job(1)


def test_a_change_that_the_state_does_not_allow(store: Store) -> None:
    store.add_jobs([new_job()])
    store.update(1, state=State.CANCELLED, ended=2000.0)
    before = store.job(1), store.last_seq()
    with pytest.raises(UserError, match="^job 1 is CANCELLED: it cannot become HELD, only QUEUED$"):
        store.update(1, state=State.HELD, priority=7)
    assert (store.job(1), store.last_seq()) == before
    with pytest.raises(UserError, match="^job 2: no such job$"):
        store.update(2, priority=7)
    with pytest.raises(AssertionError):
        store.update(1, owner="ben")
    store.update(1, state=State.QUEUED)
    with pytest.raises(AssertionError, match="the time of a job's end"):
        store.update(1, state=State.CANCELLED)
    with pytest.raises(AssertionError, match="slots are given by start"):
        store.update(1, state=State.STARTING)


def test_of_cancel_and_start_one_wins(store: Store) -> None:
    ids = store.add_jobs([new_job(f"j{number}") for number in range(20)])
    store.put_hosts([Host("h1", 1000)])
    cancelled: list[int] = []

    def cancel() -> None:
        for job in ids:
            try:
                store.update(job, state=State.CANCELLED, ended=2000.0)
                cancelled.append(job)
            except UserError as error:
                assert str(error).startswith(f"job {job} is STARTING: it cannot become CANCELLED")

    thread = threading.Thread(target=cancel)
    thread.start()
    started = [job for job in reversed(ids) if store.start(job, on("h1"), 2000.0)]
    thread.join()
    assert sorted(started + cancelled) == ids
    assert {job.id for job in store.jobs(ACTIVE)} == set(started)
    assert {job.id for job in store.jobs(ENDED)} == set(cancelled)


def test_tags(store: Store) -> None:
    store.add_jobs([new_job(tags=("a", "b"))])
    assert store.set_tags(1, add=("c", "a"), remove=("b", "x")).tags == ("a", "c")
    assert names(store.jobs(tag="c")) == ["job"] and store.jobs(tag="b") == []
    with pytest.raises(UserError, match="^job 2: no such job$"):
        store.set_tags(2, add=("c",))


def test_only_waits_that_changed_are_written(store: Store) -> None:
    ids = store.add_jobs([new_job(f"j{number}") for number in range(50)])
    store.update(50, state=State.HELD)
    reasons, starts = dict.fromkeys(ids, "resources"), dict.fromkeys(ids[:10], 5000.0)

    def written(reasons: dict[int, str], starts: dict[int, float]) -> tuple[int, int]:
        with store.database.write() as connection:
            before = connection.total_changes
            changed = store.set_waits(reasons, starts)
            return changed, connection.total_changes - before

    assert written(reasons, starts) == (49, 50)  # and one event
    assert store.job(50).reason == ""  # type: ignore[union-attr]
    first, last = store.job(1), store.job(49)
    assert first and (first.reason, first.estimated_start) == ("resources", 5000.0)
    assert last and (last.reason, last.estimated_start) == ("resources", None)
    seq = store.last_seq()
    assert written(reasons, dict.fromkeys(ids[:10], 5059.0)) == (0, 0)
    assert written({}, {}) == (0, 0)
    assert store.last_seq() == seq
    assert written({**reasons, 7: "reserved for job 3"}, {**starts, 3: 5060.0}) == (2, 3)
    assert [(event.kind, event.id) for event in store.events_after(seq)] == [("waits", "")]
    assert store.job(3).estimated_start == 5060.0  # type: ignore[union-attr]
    assert written({1: "resources"}, {}) == (1, 2)
    assert store.job(1).estimated_start is None  # type: ignore[union-attr]


def test_a_batch_is_one_transaction(store: Store) -> None:
    calls: list[int] = []
    with store.listening(lambda: calls.append(store.last_seq())):
        with store.batch():
            for name in "abc":
                store.add_jobs([new_job(name)])
            assert calls == []
        assert len(calls) == 1
        with pytest.raises(ZeroDivisionError), store.batch():
            store.update(1, priority=7)
            1 / 0  # noqa: B018
    assert len(calls) == 1
    assert names(store.jobs()) == ["a", "b", "c"]
    assert {job.priority for job in store.jobs()} == {0}
