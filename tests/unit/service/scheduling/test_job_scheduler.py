"""Which jobs start, wait and are stopped, and what users are told."""

import math
from dataclasses import replace

import pytest

from hvd_transformer.service.jobs import Allocation, Host, Needs, Placement
from hvd_transformer.service.scheduling.scheduler import (
    PUT_OFF_SECONDS,
    RESERVATIONS,
    STOP_SECONDS,
    can_ever_fit,
    schedule,
)
from hvd_transformer.service.scheduling.snapshot import Decisions, Preempt, Promise, Running, Snapshot, Start, Waiting

NOW = 1_000.0
HOSTS = [Host("h1", 4), Host("h2", 4)]


def waiting(
    id: int, ranks: int, owner: str = "a", priority: int = 0, submitted: float = 0.0, **others: object
) -> Waiting:
    needs = Needs(ranks, int(str(others.pop("least", ranks))), int(str(others.pop("tensor", 1))))
    return Waiting(id, owner, priority, submitted, needs, **others)  # type: ignore[arg-type]


def running(id: int, *allocation: tuple[str, int], end: float | None = None, **others: object) -> Running:
    placements = tuple(Placement(host, ranks) for host, ranks in allocation)
    ranks = sum(ranks for _, ranks in allocation)
    fields: dict[str, object] = {"owner": "z", "priority": 0, "began": 0.0, "needs": Needs(ranks, ranks), **others}
    return Running(id=id, allocation=placements, expected_end=end, **fields)  # type: ignore[arg-type]


def decide(
    waiting: list[Waiting], running: list[Running] | None = None, hosts: list[Host] = HOSTS, **others: object
) -> Decisions:
    return schedule(Snapshot(NOW, hosts, waiting, running or [], **others))  # type: ignore[arg-type]


def started(decisions: Decisions) -> dict[int, Allocation]:
    return {start.job: start.allocation for start in decisions.starts}


def promised_starts(decisions: Decisions) -> dict[int, float]:
    return {job: promise.start for job, promise in decisions.promised.items()}


def test_jobs_start_in_order_on_the_fewest_hosts() -> None:
    decisions = decide([waiting(1, 3), waiting(2, 4), waiting(3, 1)])
    assert decisions.starts == [
        Start(1, (Placement("h1", 3),)),
        Start(2, (Placement("h2", 4),)),
        Start(3, (Placement("h1", 1),)),
    ]
    assert not decisions.reasons


def test_two_jobs_on_one_host_have_their_own_gpus() -> None:
    needs = Needs(1, 1, gpus_per_rank=2)
    hosts = [Host("h1", 4, (4, 5, 6, 7))]
    jobs = [Waiting(number, "a", 0, float(number), needs) for number in range(3)]
    decisions = decide(jobs, hosts=hosts)
    assert started(decisions) == {0: (Placement("h1", 1, (4, 5)),), 1: (Placement("h1", 1, (6, 7)),)}
    assert decisions.reasons == {2: "resources: needs 1 slot with 2 GPUs, 0 are free"}


def test_higher_priority_first_whoever_has_used_less() -> None:
    jobs = [waiting(1, 8, "poor"), waiting(2, 8, "rich", priority=1), waiting(3, 8, "middle")]
    decisions = decide(jobs, usage={"rich": 1e6, "middle": 1e3})
    assert list(started(decisions)) == [2]
    assert list(decisions.promised) == [1, 3]


def test_hosts_that_take_nothing_new() -> None:
    hosts = [Host("h1", 4, drained=True), Host("h2", 4, down="host h2: no answer; check it"), Host("h3", 2)]
    decisions = decide([waiting(1, 2), waiting(2, 4), waiting(3, 10)], hosts=hosts)
    assert started(decisions) == {1: (Placement("h3", 2),)}
    assert decisions.reasons == dict.fromkeys((2, 3), "host down: h2 (no answer); host drained: h1")
    assert not decisions.promised  # nothing is held free for hosts that may never return


def test_many_hosts_down_are_counted() -> None:
    hosts = [Host(f"h{number}", 1, down="no answer") for number in range(9)]
    assert decide([waiting(1, 9)], hosts=hosts).reasons == {1: "hosts down: h0, h1, h2, h3, h4 and 4 more"}


def test_launches_outside_the_service_are_seen() -> None:
    decisions = decide([waiting(1, 4), waiting(2, 6)], taken=(Placement("h1", 3),))
    assert started(decisions) == {1: (Placement("h2", 4),)}
    assert decisions.reasons == {2: "resources: needs 6 slots, launches outside the service leave 5"}


def test_a_job_that_was_accepted_and_no_longer_fits() -> None:
    assert decide([waiting(1, 9)]).reasons == {1: "resources: needs 9 slots, all hosts together have 8"}


class TestReservations:
    def test_a_blocked_job_says_when_it_starts(self) -> None:
        decisions = decide([waiting(1, 8)], [running(9, ("h1", 4), end=NOW + 50), running(8, ("h2", 1), end=NOW + 90)])
        assert decisions.reasons == {1: "resources: needs 8 slots, 3 are free"}
        assert decisions.estimated_starts == {1: NOW + 90}
        assert promised_starts(decisions) == {1: NOW + 90}

    def test_only_jobs_that_do_not_delay_it_start(self) -> None:
        jobs = [waiting(1, 8), waiting(2, 1), waiting(3, 1, seconds=91.0), waiting(4, 1, seconds=90.0)]
        decisions = decide(jobs, [running(9, ("h1", 4), end=NOW + 90)])
        assert list(started(decisions)) == [4]
        assert decisions.reasons[2] == decisions.reasons[3] == "reserved for job 1"

    def test_jobs_of_unknown_length_start_where_no_reservation_is(self) -> None:
        decisions = decide(
            [waiting(1, 4, tensor=4), waiting(2, 1)], [running(9, ("h1", 1)), running(8, ("h2", 4), end=NOW + 90)]
        )
        assert list(started(decisions)) == [2]
        assert decisions.estimated_starts == {1: NOW + 90}

    def test_nothing_starts_before_a_job_that_needs_everything_and_waits_for_an_unknown_end(self) -> None:
        decisions = decide([waiting(1, 8), waiting(2, 1), waiting(3, 1, seconds=1.0)], [running(9, ("h1", 4))])
        assert not decisions.starts
        assert promised_starts(decisions) == {1: math.inf, 2: math.inf, 3: math.inf}
        assert not decisions.estimated_starts

    def test_a_job_past_its_estimated_end_is_about_to_end(self) -> None:
        decisions = decide([waiting(1, 8)], [running(9, ("h1", 4), end=NOW - 500)])
        assert decisions.estimated_starts == {1: NOW + STOP_SECONDS}

    def test_only_the_first_blocked_jobs_have_one(self) -> None:
        jobs = [waiting(number, 8, submitted=number) for number in range(RESERVATIONS + 5)]
        decisions = decide(jobs, [running(99, ("h1", 1), end=NOW + 9)])
        assert list(decisions.promised) == list(range(RESERVATIONS))
        assert set(decisions.reasons) == set(range(RESERVATIONS + 5))

    def test_a_promise_is_kept_when_another_owner_has_used_less(self) -> None:
        jobs = [waiting(1, 8, "rich"), waiting(2, 4, "poor")]
        free_half = [running(9, ("h1", 4), end=NOW + 90)]
        usage = {"rich": 1e6}
        assert list(started(decide(jobs, free_half, usage=usage))) == [2]
        decisions = decide(jobs, free_half, usage=usage, promised={1: Promise(NOW + 90)})
        assert not decisions.starts
        assert list(decisions.promised) == [1, 2]

    def test_a_promise_gives_no_precedence_over_higher_priority(self) -> None:
        jobs = [waiting(1, 4), waiting(2, 4, priority=1)]
        decisions = decide(jobs, [running(9, ("h1", 4), end=NOW + 90)], promised={1: Promise(NOW + 90)})
        assert list(started(decisions)) == [2]

    @pytest.mark.parametrize(("late", "starts"), [(PUT_OFF_SECONDS, [2]), (PUT_OFF_SECONDS + 1, [])])
    def test_nothing_more_puts_a_job_off_that_is_late(self, late: float, starts: list[int]) -> None:
        jobs = [waiting(1, 8), waiting(2, 4, seconds=60.0)]
        decisions = decide(jobs, [running(9, ("h1", 4), end=NOW + 90)], promised={1: Promise(NOW + 90 - late)})
        assert list(started(decisions)) == starts
        assert promised_starts(decisions)[1] == NOW + 90 - late

    def test_what_started_ahead_is_no_delay(self) -> None:
        """The job of higher priority has just taken the other half."""
        jobs = [waiting(1, 8), waiting(2, 4, priority=1, seconds=1e6)]
        decisions = decide(jobs, [running(9, ("h1", 4), end=NOW + 90)], promised={1: Promise(NOW + 90)})
        assert promised_starts(decisions) == {1: NOW + 1e6}

    def test_an_elastic_job_waits_for_its_smallest_size(self) -> None:
        decisions = decide(
            [waiting(1, 8, least=5)], [running(9, ("h1", 4), end=NOW + 9), running(8, ("h2", 1), end=NOW + 99)]
        )
        assert decisions.reasons == {1: "resources: needs at least 5 slots, 3 are free"}
        assert decisions.estimated_starts == {1: NOW + 9}


class TestUnknownLengths:
    """The median of recent jobs is 100 s."""

    @pytest.mark.parametrize(("end", "starts"), [(100.0, [2]), (99.0, [])])
    def test_they_count_as_the_median(self, end: float, starts: list[int]) -> None:
        jobs = [waiting(1, 4, tensor=4), waiting(2, 1)]
        full = [running(9, ("h1", 3), end=NOW + end), running(8, ("h2", 4), end=NOW + 5_000)]
        decisions = decide(jobs, full, median_seconds=100.0)
        assert list(started(decisions)) == starts
        assert decisions.estimated_starts[1] == NOW + end

    @pytest.mark.parametrize(("ranks", "starts"), [(4, [2, 3]), (5, [3])])
    def test_they_count_as_endless_behind_a_job_that_needs_most_slots(self, ranks: int, starts: list[int]) -> None:
        jobs = [waiting(1, ranks), waiting(2, 1), waiting(3, 1, seconds=900.0)]
        full = [running(9, ("h1", 4), end=NOW + 900), running(8, ("h2", 2), end=NOW + 5_000)]
        assert list(started(decide(jobs, full, median_seconds=100.0))) == starts

    def test_a_known_length_counts(self) -> None:
        jobs = [waiting(1, 4, tensor=4), waiting(2, 1, seconds=101.0)]
        full = [running(9, ("h1", 3), end=NOW + 100), running(8, ("h2", 4), end=NOW + 5_000)]
        assert not decide(jobs, full, median_seconds=100.0).starts

    def test_the_next_reservation_is_after_the_median(self) -> None:
        jobs = [waiting(1, 4, tensor=4), waiting(2, 4, tensor=4, submitted=1.0)]
        full = [running(9, ("h1", 4), end=NOW + 50), running(8, ("h2", 4), end=NOW + 900)]
        decisions = decide(jobs, full, median_seconds=100.0)
        assert decisions.estimated_starts == {1: NOW + 50, 2: NOW + 150}


class TestReasons:
    """Beyond the reservations. The cluster is full until an unknown time."""

    full = [running(99, ("h1", 4), ("h2", 4), priority=9)]

    def reasons(self, *others: Waiting) -> dict[int, str]:
        ahead = [waiting(number, 8, "first", priority=5, submitted=number) for number in range(RESERVATIONS)]
        return dict(decide([*ahead, *others], self.full, usage={"second": 5e9, "third": 9e9}).reasons)

    def test_priority(self) -> None:
        last = RESERVATIONS - 1
        assert self.reasons(waiting(50, 1), waiting(51, 1))[50] == f"priority: behind job {last}"

    def test_fair_share(self) -> None:
        others = [waiting(50, 1, "third", priority=5), waiting(51, 1, "second", priority=5)]
        reasons = self.reasons(*others)
        assert reasons[51] == f"fair share: behind job {RESERVATIONS - 1} of first"
        assert reasons[50] == "fair share: behind job 51 of second"

    def test_resources(self) -> None:
        assert (
            self.reasons(waiting(50, 2, "first", priority=5, submitted=90.0))[50]
            == "resources: needs 2 slots, 0 are free"
        )

    def test_groups_and_gpus(self) -> None:
        hosts = [Host("h1", 4, (0, 1, 2, 3)), Host("h2", 4, (0, 1, 2, 3))]
        job = Waiting(1, "a", 0, 0.0, Needs(8, 4, tensor=4, gpus_per_rank=1))
        used = Running(9, "z", 9, Needs(1, 1, 1, 1), (Placement("h1", 1, (0,)),), 0.0)
        other = replace(used, id=8, allocation=(Placement("h2", 1, (3,)),))
        assert decide([job], [used, other], hosts).reasons == {
            1: "resources: needs at least 4 slots with 1 GPU each in groups of 4 per host, 0 are free"
        }


class TestPreemption:
    def test_jobs_of_lower_priority_make_room_for_the_whole_job(self) -> None:
        jobs = [running(9, ("h1", 4), began=5.0), running(8, ("h2", 2), began=9.0), running(7, ("h2", 2), priority=2)]
        decisions = decide([waiting(1, 6, priority=1)], jobs)
        assert sorted(decisions.preempts, key=lambda preempt: preempt.victim) == [Preempt(8, 1), Preempt(9, 1)]
        assert decisions.estimated_starts == {1: NOW + STOP_SECONDS}

    def test_never_of_equal_or_higher_priority(self) -> None:
        jobs = [running(9, ("h1", 4), priority=1), running(8, ("h2", 4), priority=2)]
        assert not decide([waiting(1, 8, priority=1)], jobs).preempts

    def test_never_in_vain(self) -> None:
        jobs = [running(9, ("h1", 4)), running(8, ("h2", 1), priority=1)]
        assert not decide([waiting(1, 8, priority=1)], jobs).preempts
        hosts = [Host("h1", 4, drained=True), Host("h2", 4)]
        assert not decide([waiting(1, 4, priority=1)], jobs, hosts).preempts  # nothing starts on h1

    def test_not_while_others_stop_already(self) -> None:
        jobs = [running(9, ("h1", 4), stopping=True), running(8, ("h2", 4))]
        assert not decide([waiting(1, 4, priority=1)], jobs).preempts
        assert decide([waiting(1, 8, priority=1)], jobs).preempts == [Preempt(8, 1)]

    def test_not_for_a_moment(self) -> None:
        jobs = [running(9, ("h1", 4), end=NOW + STOP_SECONDS), running(8, ("h2", 4))]
        assert not decide([waiting(1, 4, priority=1)], jobs).preempts

    def test_two_jobs_do_not_count_on_the_same_victim(self) -> None:
        jobs = [running(9, ("h1", 4)), running(8, ("h2", 4), began=5.0)]
        decisions = decide([waiting(1, 4, priority=2), waiting(2, 4, priority=1)], jobs)
        assert decisions.preempts == [Preempt(8, 1), Preempt(9, 2)]
        stopping = [replace(job, stopping=True) for job in jobs]
        assert not decide([waiting(1, 4, priority=2), waiting(2, 4, priority=1)], stopping).preempts

    def test_an_elastic_job_ahead_takes_nothing_that_another_was_stopped_for(self) -> None:
        hosts = [Host("h1", 1), Host("h2", 4), Host("h3", 1)]
        jobs = [running(5, ("h1", 1)), running(6, ("h2", 1)), running(7, ("h2", 2)), running(8, ("h3", 1))]
        elastic, other = waiting(1, 6, priority=1, least=2, tensor=2), waiting(2, 2, priority=1, submitted=1.0)
        first = decide([elastic, other], jobs, hosts=hosts)
        assert {preempt.for_job for preempt in first.preempts} == {1, 2}
        victims = {preempt.victim for preempt in first.preempts}
        stopping = [replace(job, stopping=job.id in victims) for job in jobs]
        assert decide([elastic, other], stopping, hosts=hosts, promised=first.promised).promised == first.promised
        left = [job for job in jobs if job.id not in victims]
        later = started(decide([elastic, other], left, hosts=hosts, promised=first.promised))
        assert {job: sum(place.ranks for place in allocation) for job, allocation in later.items()} == {1: 2, 2: 2}

    def test_nothing_changes_while_victims_stop(self) -> None:
        """Job 1 does not grow by what job 2 waits for, nor does it move there."""
        hosts = [Host("h1", 2), Host("h2", 2)]
        jobs = [running(id, (host, 1)) for id, host in ((5, "h1"), (6, "h1"), (7, "h2"), (8, "h2"))]
        queue = [waiting(1, 6, priority=1, least=1), waiting(2, 2, priority=1, submitted=1.0)]
        first = decide(queue, jobs, hosts=hosts)
        assert {preempt.for_job for preempt in first.preempts} == {1, 2}
        victims = {preempt.victim for preempt in first.preempts}
        stopping = [replace(job, stopping=job.id in victims) for job in jobs]
        between = decide(queue, stopping, hosts=hosts, promised=first.promised)
        assert not between.preempts
        assert between.promised == first.promised

    def test_a_job_ahead_is_promised_no_place_that_awaits_another(self) -> None:
        """Job 2 waits for both slots of a host. Once job 7 has stopped for job 3, its host would be the first."""
        hosts = [Host("h1", 1), Host("h2", 1), Host("h3", 2), Host("h4", 2)]
        jobs = [running(id, (host, 1), began=NOW) for id, host in ((5, "h1"), (6, "h3"), (7, "h4"))]
        jobs.append(running(8, ("h2", 1), ("h3", 1), ("h4", 1), priority=1, began=NOW))
        queue = [waiting(1, 1, priority=1), waiting(2, 2, priority=1, tensor=2), waiting(3, 1, priority=1)]
        first = decide(queue, jobs, hosts=hosts)
        assert {preempt.for_job for preempt in first.preempts} == {1, 3}
        left = [job for job in jobs if job.id not in {preempt.victim for preempt in first.preempts}]
        assert list(started(decide(queue, left, hosts=hosts, promised=first.promised))) == [1, 3]

    def test_nothing_stops_behind_a_job_that_waits_for_one_of_unknown_length(self) -> None:
        """Job 2 needs all slots once job 1 has ended: nobody knows when, so nothing else starts until then."""
        hosts, jobs = [Host("h1", 3)], [running(8, ("h1", 1)), running(9, ("h1", 2))]
        queue = [waiting(1, 1, priority=1), waiting(2, 3, priority=1), waiting(3, 1, priority=1)]
        assert [preempt.for_job for preempt in decide(queue, jobs, hosts=hosts).preempts] == [1]

    def test_a_job_whose_place_is_gone_starts_elsewhere(self) -> None:
        promised = {1: Promise(NOW, (("h1", 2),))}
        assert started(decide([waiting(1, 2)], promised=promised)) == {1: (Placement("h1", 2),)}
        full = [running(9, ("h1", 3))]
        assert started(decide([waiting(1, 2)], full, promised=promised)) == {1: (Placement("h2", 2),)}
        down = [Host("h1", 4, down="no answer"), HOSTS[1]]
        assert started(decide([waiting(1, 2)], hosts=down, promised=promised)) == {1: (Placement("h2", 2),)}

    def test_an_elastic_job_is_promised_all_that_will_soon_be_free(self) -> None:
        jobs = [running(8, ("h1", 4), stopping=True), running(9, ("h2", 2))]
        promise = decide([waiting(1, 8, least=4, tensor=2)], jobs).promised[1]
        assert promise == Promise(NOW + STOP_SECONDS, (("h1", 4), ("h2", 2)))

    def test_what_a_victim_leaves_is_reserved(self) -> None:
        """A small job of low priority does not slip into the slots that are free meanwhile."""
        jobs = [running(9, ("h1", 4))]
        decisions = decide([waiting(1, 8, priority=1), waiting(2, 1), waiting(3, 1, seconds=STOP_SECONDS)], jobs)
        assert decisions.preempts == [Preempt(9, 1)]
        assert list(started(decisions)) == [3]

    def test_a_full_elastic_job_or_else_its_smallest_size(self) -> None:
        jobs = [running(9, ("h1", 4)), running(8, ("h2", 4))]
        assert len(decide([waiting(1, 8, priority=1, least=4)], jobs).preempts) == 2
        kept = [jobs[0], replace(jobs[1], priority=1)]
        assert decide([waiting(1, 8, priority=1, least=4)], kept).preempts == [Preempt(9, 1)]

    def test_an_elastic_job_that_can_start_smaller_stops_nobody(self) -> None:
        decisions = decide([waiting(1, 8, priority=1, least=2)], [running(9, ("h1", 4))])
        assert started(decisions) == {1: (Placement("h2", 4),)}
        assert not decisions.preempts


@pytest.mark.parametrize(
    ("needs", "why"),
    [
        (Needs(8, 8), None),
        (Needs(9, 9), "needs 9 slots, all hosts together have 8"),
        (Needs(9, 8), None),
        (Needs(8, 8, tensor=8), None),  # a group spans hosts
        (Needs(6, 6, tensor=3), None),
        (Needs(3, 3, gpus_per_rank=1), "needs 3 slots with 1 GPU each, all hosts together have 2"),
        (Needs(2, 2, gpus_per_rank=1), None),
        (Needs(2, 2, gpus_per_rank=2), "needs 2 slots with 2 GPUs each, all hosts together have 0"),
        (Needs(12, 9), "needs at least 9 slots, all hosts together have 8"),
    ],
)
def test_what_can_ever_fit(needs: Needs, why: str | None) -> None:
    hosts = [Host("h1", 4, (0,), drained=True), Host("h2", 4, (1,), down="no answer")]
    assert can_ever_fit(needs, hosts) == why


def test_without_hosts() -> None:
    assert can_ever_fit(Needs(1, 1), []) == "needs 1 slot, the service has no hosts"
    decisions = decide([waiting(1, 1)], hosts=[])
    assert decisions.reasons == {1: "resources: needs 1 slot, the service has no hosts"}


def test_an_elastic_job_whose_owner_may_have_fewer_slots_now_starts_with_fewer() -> None:
    """Than it was promised in the pass before."""
    promised = {1: Promise(NOW, (("h1", 4), ("h2", 2)))}
    assert started(decide([waiting(1, 6, least=2)], promised=promised)) == {1: (Placement("h1", 4), Placement("h2", 2))}
    assert started(decide([waiting(1, 3, least=2)], promised=promised)) == {1: (Placement("h1", 3),)}
