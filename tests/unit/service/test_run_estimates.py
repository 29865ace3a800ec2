"""When jobs are likely to end, and which speeds are written down."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from hvd_transformer.service.jobs import Attempt, Host, Job, Needs, Placement, State
from hvd_transformer.service.run_estimates import RunEstimates
from hvd_transformer.service.runs.pace import Progress
from hvd_transformer.service.storage.store import NewJob, Store

NOW = 1000.0
ATTEMPT = Attempt(1, 1, (Placement("h1", 2),), NOW)
RUN = Path("/runs/1")


class Estimates:
    """A running job, and what is known of its run."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.progress: dict[Path, Progress] = {}
        self.estimates = RunEstimates(store, self.progress.get)
        new = NewJob("job", "ann", NOW, Needs(2, 2), str(RUN), "/", ())
        store.add_jobs([new, replace(new, output_dir="/runs/2")])  # the second waits
        store.start(1, ATTEMPT.allocation, NOW)
        self.job: Job = store.update(1, state=State.RUNNING)

    def look(self, deadline: float | None = None, now: float = NOW) -> float | None:
        found = self.estimates.look(self.job, ATTEMPT, deadline, now)
        assert found == self.estimates.end(1)
        return found

    def seconds(self) -> float | None:
        (other,) = self.store.waiting()
        return other.seconds


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Estimates]:
    with closing(Store(tmp_path / "service.db")) as store:
        store.put_hosts([Host("h1", 4)])
        yield Estimates(store)


def test_the_end_that_was_expected_until_the_speed_is_known(running: Estimates) -> None:
    assert running.look() is None
    running.estimates.began(ATTEMPT, 60.0)
    assert running.look() == NOW + 60
    assert running.look(now=NOW + 61) is None  # it was wrong
    running.progress[RUN] = Progress(0, 100, 200.0, 2.0)
    assert running.look(now=NOW + 10) == NOW + 210
    running.progress[RUN] = Progress(100, 100, 0.0, 2.0)
    assert running.look(now=NOW + 300) == NOW + 300
    running.estimates.ended(1)
    running.progress.clear()
    assert running.look() is None


def test_no_later_than_its_time_limit(running: Estimates) -> None:
    running.progress[RUN] = Progress(0, 100, 200.0, 2.0)
    assert running.look(deadline=NOW + 50) == NOW + 50
    assert running.look(deadline=NOW + 500) == NOW + 200


def test_others_of_its_kind_are_as_long(running: Estimates) -> None:
    running.look()
    assert running.seconds() is None
    running.progress[RUN] = Progress(0, 100, 200.0, 2.0)
    running.look()
    assert running.seconds() == 200.0


def test_only_what_changes_is_written(running: Estimates) -> None:
    running.progress[RUN] = Progress(0, 100, 200.0, 2.0)
    running.look()
    running.progress[RUN] = Progress(10, 100, 189.0, 2.1)
    running.look()
    assert running.seconds() == 200.0
    running.progress[RUN] = Progress(20, 100, 184.0, 2.3)
    running.look()
    assert running.seconds() == pytest.approx(230.0)
