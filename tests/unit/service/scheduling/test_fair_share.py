"""The order of waiting jobs: priority, usage, submission."""

import pytest

from hvd_transformer.service.jobs import Needs
from hvd_transformer.service.scheduling.fair_share import AHEAD_SECONDS, HALF_LIFE, FairShare, decayed
from hvd_transformer.service.scheduling.snapshot import Waiting


def waiting(id: int, owner: str, submitted: float = 0.0, priority: int = 0) -> Waiting:
    return Waiting(id, owner, priority, submitted, Needs(1, 1))


def order(
    share: FairShare,
    jobs: list[Waiting],
    charge: int = 0,
    promised: tuple[int, ...] = (),
    soon: frozenset[int] = frozenset(),
) -> list[int]:
    """The ids in order, when every job gets so many slots."""
    result = []
    for job in share.order(jobs, promised, soon):
        result.append(job.id)
        share.charge(job.owner, charge)
    return result


def test_usage_halves_in_seven_days() -> None:
    assert decayed(800.0, 7 * 86_400) == 400.0
    assert decayed(800.0, 0.0) == 800.0
    assert decayed(decayed(800.0, 1e5), 2e5) == pytest.approx(decayed(800.0, 3e5))
    assert decayed(800.0, -5.0) == 800.0  # a clock that was set back
    assert decayed(1.0, 2 * HALF_LIFE) == 0.25


def test_priority_then_usage_then_submission() -> None:
    jobs = [
        waiting(1, "rich", 0.0),
        waiting(2, "poor", 9.0),
        waiting(3, "poor", 5.0),
        waiting(4, "rich", 8.0, priority=1),
        waiting(5, "new", 9.0),
        waiting(6, "new", 9.0, priority=-1),
    ]
    assert order(FairShare({"rich": 100.0, "poor": 10.0}), jobs) == [4, 5, 3, 2, 1, 6]


def test_equal_owners_in_the_order_of_submission() -> None:
    jobs = [waiting(1, "a", 3.0), waiting(2, "b", 1.0), waiting(3, "a", 2.0), waiting(4, "b", 2.0)]
    assert order(FairShare({}), jobs) == [2, 3, 4, 1]


def test_a_thousand_jobs_of_one_owner_take_turns_with_those_of_others() -> None:
    many = [waiting(number, "many", 0.0) for number in range(1000)]
    few = [waiting(1000 + number, "few", 5.0) for number in range(10)]
    first = order(FairShare({}), many + few, charge=1)[:20]
    assert sum(job >= 1000 for job in first) == 10


def test_larger_jobs_count_more() -> None:
    share = FairShare({})
    jobs = [waiting(1, "large"), waiting(2, "large"), *(waiting(number, "small") for number in range(3, 9))]
    result = []
    for job in share.order(jobs):
        result.append(job.id)
        share.charge(job.owner, 4 if job.owner == "large" else 1)
    assert result == [1, 3, 4, 5, 6, 2, 7, 8]


def test_what_remains_of_a_running_job_is_charged_at_most() -> None:
    share = FairShare({"ends soon": 0.0, "goes on": 0.0, "unknown": 0.0})
    share.charge("ends soon", 4, 10.0)
    share.charge("goes on", 4, 1e9)
    share.charge("unknown", 3)
    share.charge("late", 4, -50.0)  # past its estimated end
    jobs = [waiting(1, "goes on"), waiting(2, "unknown"), waiting(3, "ends soon"), waiting(4, "late")]
    assert order(share, jobs) == [4, 3, 2, 1]
    assert AHEAD_SECONDS > 10.0


def test_promised_jobs_stay_ahead_within_their_priority() -> None:
    jobs = [waiting(1, "a"), waiting(2, "b"), waiting(3, "a"), waiting(4, "a", priority=1), waiting(5, "a")]
    assert order(FairShare({"a": 50.0}), jobs, promised=(5, 99, 3)) == [4, 5, 3, 2, 1]


def test_jobs_that_are_about_to_start_are_ahead_of_all_that_wait_for_longer() -> None:
    jobs = [waiting(number, "a", priority=4 - number) for number in (1, 2, 3, 4)]
    assert order(FairShare({}), jobs, promised=(2, 3, 4), soon=frozenset({4, 3})) == [1, 3, 4, 2]
