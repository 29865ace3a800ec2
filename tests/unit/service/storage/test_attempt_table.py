"""Starts of jobs: slots, GPUs and state in one transaction, which no other job can have meanwhile."""

import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from random import Random

import pytest
from new_jobs import new_job, on

from hvd_transformer.errors import UserError
from hvd_transformer.service.jobs import ACTIVE, Allocation, Attempt, Host, Needs, Placement, State
from hvd_transformer.service.storage.store import Store

KILLED = """
import sys
from pathlib import Path
from hvd_transformer.service.jobs import Placement, State
from hvd_transformer.service.storage.store import Store
store = Store(Path(sys.argv[1]))
for number in range(1, 1001):
    attempt = store.start(number, (Placement("h1", 1, (number,)),), 2000.0)
    print("start", number, flush=True)
    if number % 3 == 0:
        store.end_attempt(number, attempt.number, ended=2100.0, state=State.SUCCEEDED)
        print("end", number, flush=True)
"""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "service.db")
    store.put_hosts([Host("h1", 4, (0, 1, 2, 3)), Host("h2", 2)])
    yield store
    store.close()


def test_the_life_of_a_job(store: Store) -> None:
    store.add_jobs([new_job(needs=Needs(3, 3))])
    allocation = (Placement("h1", 2, (1, 3)), Placement("h2", 1))
    first = store.start(1, allocation, 2000.0)
    assert first == Attempt(1, 1, allocation, 2000.0)
    assert store.job(1).state is State.STARTING  # type: ignore[union-attr]
    assert store.attempts(1) == store.open_attempts() == [first]
    store.update(1, state=State.RUNNING)
    job = store.end_attempt(
        1,
        1,
        ended=2100.0,
        state=State.QUEUED,
        code=75,
        cause="h2 is gone",
        first_step=0,
        last_step=40,
        reason="tried again",
        retries=1,
    )
    assert (job.state, job.reason, job.retries, job.ended) == (State.QUEUED, "tried again", 1, None)
    assert store.open_attempts() == []
    second = store.start(1, on("h1", 3), 2200.0)
    assert second == Attempt(1, 2, on("h1", 3), 2200.0)
    job = store.end_attempt(1, 2, ended=2300.0, state=State.SUCCEEDED, code=0, first_step=40, last_step=100)
    assert (job.state, job.ended, job.retries) == (State.SUCCEEDED, 2300.0, 1)
    assert store.attempts(1) == [
        Attempt(1, 1, allocation, 2000.0, 2100.0, 0, 40, 75, "h2 is gone"),
        Attempt(1, 2, on("h1", 3), 2200.0, 2300.0, 40, 100, 0),
    ]


def test_an_attempt_ends_once(store: Store) -> None:
    store.add_jobs([new_job()])
    store.start(1, on("h1"), 2000.0)
    store.end_attempt(1, 1, ended=2100.0, state=State.QUEUED)
    store.start(1, on("h1"), 2200.0)
    before = store.job(1), store.attempts(1)
    for job, number, line in ((1, 1, "job 1: its attempt 1 does not run"), (1, 3, "job 1: its attempt 3 does not run")):
        with pytest.raises(UserError, match=f"^{line}$"):
            store.end_attempt(job, number, ended=2300.0, state=State.FAILED)
    with pytest.raises(UserError, match="^job 1 is STARTING: it cannot become HELD"):
        store.end_attempt(1, 2, ended=2300.0, state=State.HELD)
    with pytest.raises(UserError, match="^job 2: no such job$"):
        store.end_attempt(2, 1, ended=2300.0, state=State.FAILED)
    assert (store.job(1), store.attempts(1)) == before


@pytest.mark.parametrize(
    ("why", "allocation"),
    [
        ("slots that another job has", on("h1", 3)),
        ("slots that there are not, in two parts", (*on("h2", 1), *on("h2", 2))),
        ("a GPU that another job has", on("h1", 1, 0)),
        ("a GPU twice", (*on("h1", 1, 1), *on("h1", 1, 1))),
        ("a GPU that there is not", on("h1", 1, 4)),
        ("a GPU of a host without", on("h2", 1, 0)),
        ("an unknown host", on("h3", 1)),
        ("a host that is drained", on("drained", 1)),
        ("a host that is down", on("down", 1)),
        ("a good host and an unknown one", (*on("h2", 1), *on("h3", 1))),
    ],
)
def test_what_cannot_be_had_is_not_given(store: Store, why: str, allocation: Allocation) -> None:
    store.put_hosts([Host("drained", 4), Host("down", 4)])
    store.set_drained("drained", True)
    store.set_down("down", "ssh: connection refused")
    store.add_jobs([new_job("first"), new_job("second")])
    assert store.start(1, on("h1", 2, 0), 2000.0)
    assert store.start(2, allocation, 2000.0) is None, why
    assert store.job(2).state is State.QUEUED and store.attempts(2) == []  # type: ignore[union-attr]
    assert store.start(2, (*on("h1", 2, 1, 2), *on("h2", 2)), 2000.0)


def test_only_a_queued_job_starts(store: Store) -> None:
    store.add_jobs([new_job("a"), new_job("b", held=True), new_job("c")])
    store.update(3, state=State.CANCELLED, ended=1500.0)
    assert [bool(store.start(job, on("h1"), 2000.0)) for job in (1, 1, 2, 3)] == [True, False, False, False]
    assert len(store.open_attempts()) == 1
    with pytest.raises(UserError, match="^job 4: no such job$"):
        store.start(4, on("h1"), 2000.0)


def test_of_many_that_start_a_job_one_does(store: Store) -> None:
    store.add_jobs([new_job()])
    store.put_hosts([Host("h1", 100)])
    together, started = threading.Barrier(8), []

    def start() -> None:
        together.wait()
        started.append(store.start(1, on("h1"), 2000.0))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(attempt is not None for attempt in started) == 1
    assert len(store.attempts(1)) == 1


def test_an_elastic_job_grows_and_shrinks(store: Store) -> None:
    store.add_jobs([new_job("elastic", needs=Needs(4, 1)), new_job("other")])
    assert store.reallocate(1, on("h1")) is None
    store.start(1, on("h1", 1, 2), 2000.0)
    store.start(2, on("h2", 1), 2000.0)
    assert store.reallocate(1, (*on("h1", 3, 2, 3, 0), *on("h2", 2))) is None  # one slot of h2 is taken
    assert store.attempts(1)[0].allocation == on("h1", 1, 2)
    store.set_drained("h1", True)  # what it has there it may keep
    larger = (*on("h1", 3, 2, 3, 0), *on("h2", 1))
    assert store.reallocate(1, larger) == Attempt(1, 1, larger, 2000.0)
    assert store.attempts(1) == [Attempt(1, 1, larger, 2000.0)]
    store.set_drained("h1", False)
    assert store.start(2, on("h2", 1), 2000.0) is None
    assert store.reallocate(1, on("h2", 1))
    store.end_attempt(1, 1, ended=2100.0, state=State.SUCCEEDED)
    assert store.reallocate(1, on("h2", 1)) is None
    with pytest.raises(UserError, match="^job 3: no such job$"):
        store.reallocate(3, on("h2", 1))


def test_no_gpu_and_no_slot_is_ever_given_twice(store: Store) -> None:
    """Many random requests, of which the store must refuse what does not fit: a ledger beside it tells which."""
    random = Random(11)
    hosts = {"h1": Host("h1", 4, (0, 1, 2, 3)), "h2": Host("h2", 2), "h3": Host("h3", 3, (0, 5))}
    store.put_hosts(hosts.values())
    ids = store.add_jobs([new_job(f"j{number}") for number in range(12)])
    ledger: dict[int, Allocation] = {}

    def fits(job: int, allocation: Allocation) -> bool:
        parts = [part for other, had in ledger.items() if other != job for part in had] + list(allocation)
        ranks, gpus = Counter[str](), Counter[tuple[str, int]]()
        for part in parts:
            ranks[part.host] += part.ranks
            gpus.update((part.host, gpu) for gpu in part.gpus)
        return (
            all(number <= hosts[host].slots for host, number in ranks.items())
            and all(gpu in hosts[host].gpus for host, gpu in gpus)
            and all(number == 1 for number in gpus.values())
        )

    outcomes = Counter[tuple[str, bool]]()
    for _ in range(600):
        job = random.choice(ids)
        allocation = tuple(
            Placement(host, random.randrange(1, 4), tuple(random.sample(range(6), random.choice([0, 0, 1, 2]))))
            for host in random.sample(sorted(hosts), random.choice([1, 1, 2]))
        )
        if job in ledger and random.random() < 0.5:
            store.end_attempt(job, len(store.attempts(job)), ended=2100.0, state=State.QUEUED)
            del ledger[job]
        elif job in ledger:
            expected = fits(job, allocation)
            assert (store.reallocate(job, allocation) is not None) == expected
            outcomes["reallocate", expected] += 1
            if expected:
                ledger[job] = allocation
        else:
            expected = fits(job, allocation)
            assert (store.start(job, allocation, 2000.0) is not None) == expected
            outcomes["start", expected] += 1
            if expected:
                ledger[job] = allocation
        assert {attempt.job: attempt.allocation for attempt in store.open_attempts()} == ledger
    assert len(outcomes) == 4 and min(outcomes.values()) > 10


def test_after_a_kill_an_active_job_has_an_open_attempt_and_no_other_has(tmp_path: Path) -> None:
    """Killed at any moment, the service finds everything that it was told was done, and nothing half done."""
    path = tmp_path / "service.db"
    with closing(Store(path)) as store:
        store.put_hosts([Host("h1", 1000, tuple(range(1001)))])
        store.add_jobs([new_job(f"j{number}") for number in range(1000)])
    for lines in (5, 17, 40):
        with subprocess.Popen([sys.executable, "-c", KILLED, path], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout
            said = [next(process.stdout).split() for _ in range(lines)]
            process.send_signal(signal.SIGKILL)
            said += [line.split() for line in process.stdout if line.endswith("\n")]
        with closing(Store(path)) as store:
            active = {job.id for job in store.jobs(ACTIVE)}
            assert active == {attempt.job for attempt in store.open_attempts()}
            assert {int(job) for what, job in said if what == "start"} <= active | {
                job.id for job in store.jobs({State.SUCCEEDED})
            }
            assert {int(job) for what, job in said if what == "end"} <= {
                job.id for job in store.jobs({State.SUCCEEDED})
            }
            for job in active:
                store.end_attempt(job, len(store.attempts(job)), ended=2200.0, state=State.QUEUED)
            for job in store.jobs({State.SUCCEEDED}):
                with store.database.write() as connection:
                    connection.execute("UPDATE jobs SET state = 'QUEUED', ended = NULL WHERE id = ?", (job.id,))
