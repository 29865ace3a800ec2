"""Limits per user."""

from dataclasses import replace

from hvd_transformer.service.jobs import Engine, Needs, Placement
from hvd_transformer.service.scheduling.snapshot import Running, Waiting
from hvd_transformer.service.storage.settings import Limits
from hvd_transformer.service.user_limits import within_limits


def waiting(id: int, owner: str, ranks: int = 1, priority: int = 0) -> Waiting:
    return Waiting(id, owner, priority, float(id), Needs(ranks, ranks))


def running(id: int, owner: str, ranks: int) -> Running:
    return Running(id, owner, 0, Needs(ranks, ranks), (Placement("h1", ranks),), 0.0)


def test_without_limits_everything_may_start() -> None:
    jobs = [waiting(number, "ann", 10) for number in range(3)]
    assert within_limits(jobs, [], {None: Limits()}, {}) == (jobs, {})


def test_the_number_of_jobs_counts_those_that_are_let_in_by_priority() -> None:
    jobs = [waiting(1, "ann"), waiting(2, "ann", priority=5), waiting(3, "ben")]
    allowed, reasons = within_limits(jobs, [running(9, "ann", 1)], {None: Limits(max_running=2)}, {})
    assert [job.id for job in allowed] == [2, 3]
    assert reasons == {1: "limit of ann: 2 jobs run or start, 2 may"}


def test_a_smaller_job_passes_one_that_is_too_large_for_the_slots_left() -> None:
    jobs = [waiting(1, "ann", 4), waiting(2, "ann", 1)]
    allowed, reasons = within_limits(jobs, [running(9, "ann", 2)], {None: Limits(), "ann": Limits(max_slots=4)}, {})
    assert [job.id for job in allowed] == [2]
    assert reasons == {1: "limit of ann: 2 slots in use, 4 may be; this job needs 4"}


def test_an_elastic_job_may_start_with_fewer_ranks_in_whole_tensor_groups() -> None:
    limits = {None: Limits(max_slots=16)}
    elastic = Waiting(1, "ann", 0, 1.0, Needs(8, 4, 2))
    for used, ranks in ((0, 8), (8, 8), (9, 6), (12, 4)):
        (allowed,), reasons = within_limits([elastic], [running(9, "ann", used)], limits, {})
        assert (allowed, reasons) == (replace(elastic, needs=Needs(ranks, 4, 2)), {})
    allowed, reasons = within_limits([elastic], [running(9, "ann", 13)], limits, {})
    assert allowed == []
    assert reasons == {1: "limit of ann: 13 slots in use, 16 may be; this job needs at least 4"}


def test_the_ranks_that_an_elastic_job_may_start_with_count() -> None:
    jobs = [Waiting(1, "ann", 0, 1.0, Needs(32, 4)), waiting(2, "ann")]
    allowed, reasons = within_limits(jobs, [running(9, "ann", 10)], {None: Limits(max_slots=16)}, {})
    assert [job.needs for job in allowed] == [Needs(6, 4)]
    assert reasons == {2: "limit of ann: 16 slots in use, 16 may be; this job needs 1"}


def test_a_user_whose_runs_fill_the_disk_starts_nothing() -> None:
    jobs = [waiting(1, "ann"), waiting(2, "ben")]
    allowed, reasons = within_limits(jobs, [], {None: Limits(disk_bytes=2**30)}, {"ann": 2**30, "ben": 5})
    assert [job.id for job in allowed] == [2]
    assert "1.0 GiB of disk" in reasons[1]


def test_jobs_elsewhere_count_as_running_and_take_no_slots() -> None:
    jobs = [replace(waiting(1, "ann", 9), engine=Engine.SLURM), waiting(2, "ann"), waiting(3, "ann")]
    limits = {None: Limits(max_running=3, max_slots=2)}
    allowed, reasons = within_limits(jobs, [], limits, {}, {"ann": 1})
    assert [job.id for job in allowed] == [1, 2]
    assert reasons == {3: "limit of ann: 3 jobs run or start, 3 may"}


def test_until_the_disk_is_measured_its_limit_keeps_jobs_waiting() -> None:
    jobs = [waiting(1, "ann"), waiting(2, "ben")]
    allowed, reasons = within_limits(jobs, [], {None: Limits(), "ann": Limits(disk_bytes=5)}, None)
    assert [job.id for job in allowed] == [2]
    assert reasons == {1: "limit of ann: the runs are being measured"}


def test_a_job_that_no_host_can_run_now_counts_towards_no_limit() -> None:
    jobs = [waiting(1, "ann", 4), waiting(2, "ann", 2), waiting(3, "ann", 3)]
    limits = {None: Limits(max_running=1, max_slots=4)}
    allowed, reasons = within_limits(jobs, [], limits, {}, can_start=lambda job: job.id != 1)
    assert [job.id for job in allowed] == [1, 2]
    assert reasons == {3: "limit of ann: 1 jobs run or start, 1 may"}
