"""Elastic jobs that run on fewer ranks than they want."""

import pytest

from hvd_transformer.service.jobs import Allocation, Host, Needs, Placement
from hvd_transformer.service.scheduling.scheduler import schedule
from hvd_transformer.service.scheduling.snapshot import Grow, Running, Snapshot, Waiting

NOW = 1_000.0
ELASTIC = Needs(8, 2)


def running(id: int, allocation: Allocation, needs: Needs = ELASTIC, **others: object) -> Running:
    fields: dict[str, object] = {"owner": "a", "priority": 0, "began": 0.0}
    return Running(id=id, needs=needs, allocation=allocation, **{**fields, **others})  # type: ignore[arg-type]


def grows(hosts: list[Host], jobs: list[Running], waiting: tuple[Waiting, ...] = ()) -> list[Grow]:
    return list(schedule(Snapshot(NOW, hosts, waiting, jobs)).grows)


def test_a_job_grows_first_on_its_own_hosts() -> None:
    hosts = [Host("h1", 8), Host("h2", 4)]
    job = running(1, (Placement("h2", 2),))
    assert grows(hosts, [job]) == [Grow(1, (Placement("h2", 4), Placement("h1", 4)))]


def test_it_keeps_its_gpus_and_takes_free_ones() -> None:
    hosts = [Host("h1", 4, (0, 1, 2, 3))]
    jobs = [
        running(1, (Placement("h1", 2, (1, 3)),), Needs(4, 1, gpus_per_rank=1)),
        running(2, (Placement("h1", 1, (0,)),), Needs(1, 1, gpus_per_rank=1)),
    ]
    assert grows(hosts, jobs) == [Grow(1, (Placement("h1", 3, (1, 3, 2)),))]


def test_it_grows_by_whole_tensor_groups() -> None:
    hosts = [Host("h1", 7)]
    job = running(1, (Placement("h1", 2),), Needs(8, 2, tensor=2))
    assert grows(hosts, [job]) == [Grow(1, (Placement("h1", 6),))]
    assert grows([Host("h1", 3)], [job]) == []


def test_the_one_of_higher_priority_first() -> None:
    jobs = [running(1, (Placement("h1", 2),)), running(2, (Placement("h1", 2),), priority=1)]
    assert grows([Host("h1", 10)], jobs) == [Grow(2, (Placement("h1", 8),))]


@pytest.mark.parametrize("others", [{"stopping": True}, {"expected_end": NOW + 60.0}])
def test_not_shortly_before_its_end(others: dict[str, object]) -> None:
    assert grows([Host("h1", 8)], [running(1, (Placement("h1", 2),), **others)]) == []


def test_not_into_hosts_that_take_nothing_new() -> None:
    hosts = [Host("h1", 4, drained=True), Host("h2", 4, down="no answer")]
    assert grows(hosts, [running(1, (Placement("h1", 2),))]) == []


def test_not_into_slots_that_are_reserved() -> None:
    hosts = [Host("h1", 4), Host("h2", 4)]
    jobs = [
        running(1, (Placement("h1", 2),), expected_end=NOW + 5_000),
        running(2, (Placement("h2", 2),), Needs(2, 2), expected_end=NOW + 2_000),
    ]
    whole_host = Waiting(3, "b", 0, 0.0, Needs(4, 4, tensor=4))
    decisions = schedule(Snapshot(NOW, hosts, [whole_host], jobs))
    assert decisions.estimated_starts == {3: NOW + 2_000}
    assert decisions.grows == [Grow(1, (Placement("h1", 4),))]


def test_not_while_jobs_wait_that_have_no_reservation() -> None:
    hosts = [Host("h1", 8)]
    job = running(1, (Placement("h1", 4),), expected_end=NOW + 5_000)
    others = [Waiting(number, "b", 0, 0.0, Needs(5, 5)) for number in range(2, 20)]
    assert grows(hosts, [job], tuple(others)) == []


def test_what_can_never_start_keeps_nobody_from_growing() -> None:
    hosts = [Host("h1", 8), Host("h2", 8, down="no answer")]
    job = running(1, (Placement("h1", 4),))
    too_large = tuple(Waiting(number, "b", 0, 0.0, Needs(16, 16)) for number in range(2, 20))
    assert grows(hosts, [job], too_large) == [Grow(1, (Placement("h1", 8),))]
