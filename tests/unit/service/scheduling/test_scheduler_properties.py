"""What holds of the decisions on any snapshot, and that no job starves in a cluster that lives for days."""

import math
import random
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulated_cluster import Knowledge, SimulatedCluster, Work, check_allocations
from hvd_transformer.service.jobs import Allocation, Host, Needs, Placement
from hvd_transformer.service.scheduling.scheduler import PUT_OFF_SECONDS, STOP_SECONDS, schedule
from hvd_transformer.service.scheduling.snapshot import Decisions, Promise, Running, Snapshot, Waiting

NOW = 10_000.0
HOUR = 3_600.0


@st.composite
def some_needs(draw: st.DrawFn, gpus: bool) -> Needs:
    tensor = draw(st.sampled_from([1, 1, 1, 2, 4]))
    groups = draw(st.integers(1, 4))
    least = draw(st.integers(1, groups))
    return Needs(groups * tensor, least * tensor, tensor, draw(st.integers(0, 2)) if gpus else 0)


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    """A few hosts, jobs that run there, and jobs that wait."""
    gpus = draw(st.booleans())
    hosts, running, number = [], [], 0
    for name in ("h1", "h2", "h3", "h4")[: draw(st.integers(1, 4))]:
        slots = left = draw(st.integers(1, 5))
        state = draw(st.sampled_from(["up"] * 6 + ["drained", "down"]))
        numbers = tuple(range(slots)) if gpus else ()
        hosts.append(Host(name, slots, numbers, drained=state == "drained", down="no answer" * (state == "down")))
        for ranks in draw(st.lists(st.integers(1, 3), max_size=3)):
            if ranks > left:
                break
            left -= ranks
            number += 1
            running.append(
                Running(
                    number,
                    draw(st.sampled_from("ab")),
                    draw(st.integers(0, 2)),
                    Needs(ranks + draw(st.sampled_from([0, 0, 2])), ranks, 1, int(gpus)),
                    (Placement(name, ranks, numbers[left : left + ranks]),),
                    NOW - draw(st.integers(0, 5000)),
                    draw(st.sampled_from([None, NOW - 5, NOW + 50, NOW + 500, NOW + 5000])),
                    draw(st.sampled_from([False] * 4 + [True])),
                )
            )
    waiting = [
        Waiting(
            id,
            draw(st.sampled_from("abc")),
            draw(st.integers(0, 2)),
            NOW - draw(st.integers(0, 9000)),
            draw(some_needs(gpus)),
            draw(st.sampled_from([None, 40.0, 400.0, 4000.0])),
        )
        for id in range(100, 100 + draw(st.integers(1, 6)))
    ]
    promised = {job.id: Promise(NOW - draw(st.sampled_from([0.0, 1e5]))) for job in waiting if draw(st.booleans())}
    return Snapshot(NOW, hosts, waiting, running, {"a": draw(st.sampled_from([0.0, 1e6]))}, (), promised)


def carried_out(snapshot: Snapshot, decisions: Decisions) -> list[Running]:
    """The jobs that run then."""
    grown = {grow.job: grow.allocation for grow in decisions.grows}
    jobs = {job.id: job for job in snapshot.waiting}
    running = [replace(job, allocation=grown.get(job.id, job.allocation)) for job in snapshot.running]
    for start in decisions.starts:
        job = jobs[start.job]
        end = None if job.seconds is None else NOW + job.seconds
        running.append(Running(job.id, job.owner, job.priority, job.needs, start.allocation, NOW, end))
    return running


def room(hosts: Iterable[Host], used: Iterable[Allocation], needs: Needs) -> int:
    """How many ranks fit, counted host by host."""
    placements = [placement for allocation in used for placement in allocation]
    rooms = []
    for host in hosts:
        mine = [placement for placement in placements if placement.host == host.name]
        ranks = host.slots - sum(placement.ranks for placement in mine)
        if needs.gpus_per_rank:
            taken = {number for placement in mine for number in placement.gpus}
            ranks = min(ranks, len(set(host.gpus) - taken) // needs.gpus_per_rank)
        rooms.append(max(0, ranks))
    return sum(ranks - ranks % needs.tensor for ranks in rooms)


def usable(snapshot: Snapshot) -> list[Host]:
    return [host for host in snapshot.hosts if not (host.down or host.drained)]


def groups_fit(snapshot: Snapshot, needs: Needs) -> bool:
    return room(snapshot.hosts, (), needs) >= needs.min_ranks


@settings(deadline=None, max_examples=150)
@given(snapshots())
def test_no_slot_and_no_gpu_is_given_twice(snapshot: Snapshot) -> None:
    running = carried_out(snapshot, schedule(snapshot))
    check_allocations(snapshot.hosts, [(job.needs, job.allocation) for job in running])


@settings(deadline=None, max_examples=100)
@given(snapshots())
def test_every_job_starts_with_what_it_needs_or_says_why_not(snapshot: Snapshot) -> None:
    decisions = schedule(snapshot)
    names = {host.name for host in usable(snapshot)}
    jobs = {job.id: job for job in snapshot.waiting}
    for start in decisions.starts:
        needs, ranks = jobs[start.job].needs, [placement.ranks for placement in start.allocation]
        assert {placement.host for placement in start.allocation} <= names
        assert not sum(ranks) % needs.tensor
        if groups_fit(snapshot, needs):
            assert not any(number % needs.tensor for number in ranks)
    started = [start.job for start in decisions.starts]
    assert sorted([*started, *decisions.reasons]) == sorted(jobs)
    assert all(decisions.reasons.values())
    assert set(decisions.estimated_starts) <= set(decisions.promised) <= set(decisions.reasons)


@settings(deadline=None, max_examples=100)
@given(snapshots())
def test_slots_stay_free_for_reservations_only(snapshot: Snapshot) -> None:
    decisions = schedule(snapshot)
    used = [job.allocation for job in carried_out(snapshot, decisions)]
    for job in snapshot.waiting:
        if job.id in decisions.reasons and groups_fit(snapshot, job.needs):
            fits = room(usable(snapshot), used, job.needs) >= job.needs.min_ranks
            assert not fits or decisions.reasons[job.id].startswith("reserved for job")


def earliest(snapshot: Snapshot, running: list[Running], needs: Needs) -> float:
    """When so many ranks fit, if nothing else starts. Infinite: not before a job of unknown length ends."""
    soon = NOW + STOP_SECONDS

    def end(job: Running) -> float:
        if job.stopping:
            return soon
        return math.inf if job.expected_end is None else job.expected_end if job.expected_end > NOW else soon

    for time in sorted({end(job) for job in running}):
        used = [job.allocation for job in running if end(job) > time]
        if room(usable(snapshot), used, needs) >= needs.min_ranks:
            return time
    return math.inf


@settings(deadline=None, max_examples=200)
@given(snapshots())
def test_nothing_delays_the_first_blocked_job(snapshot: Snapshot) -> None:
    """Its estimated start is where brute force has it, and still is when all decisions are carried out."""
    first = replace(snapshot.waiting[0], priority=9)
    running = [replace(job, priority=9) for job in snapshot.running]
    snapshot = replace(snapshot, waiting=[first, *snapshot.waiting[1:]], running=running)
    decisions = schedule(snapshot)
    if first.id not in decisions.promised or not groups_fit(snapshot, first.needs):
        return
    expected = earliest(snapshot, running, first.needs)
    assert decisions.estimated_starts.get(first.id, math.inf) == expected
    assert earliest(snapshot, carried_out(snapshot, decisions), first.needs) == expected


@settings(deadline=None, max_examples=100)
@given(snapshots())
def test_victims_have_lower_priority_and_make_room_for_the_whole_job(snapshot: Snapshot) -> None:
    decisions = schedule(snapshot)
    jobs = {job.id: job for job in snapshot.waiting}
    running = {job.id: job for job in snapshot.running}
    victims = {preempt.victim for preempt in decisions.preempts}
    assert len(victims) == len(decisions.preempts)
    for preempt in decisions.preempts:
        assert running[preempt.victim].priority < jobs[preempt.for_job].priority
        assert not running[preempt.victim].stopping
    soon = NOW + STOP_SECONDS
    left = [
        job
        for job in carried_out(snapshot, decisions)
        if not (job.id in victims or job.stopping or (job.expected_end is not None and job.expected_end <= soon))
    ]
    waiting = [job for job in snapshot.waiting if job.id in decisions.reasons]
    preempting = {preempt.for_job for preempt in decisions.preempts}
    later = schedule(replace(snapshot, now=soon, running=left, waiting=waiting, promised=decisions.promised))
    assert preempting <= {start.job for start in later.starts}
    # The same after a pass while they stop.
    stopping = [replace(job, stopping=job.stopping or job.id in victims) for job in carried_out(snapshot, decisions)]
    between = schedule(replace(snapshot, running=stopping, waiting=waiting, promised=decisions.promised))
    assert not preempting & {preempt.for_job for preempt in between.preempts}
    if not between.starts and not between.preempts and not between.grows:
        later = schedule(replace(snapshot, now=soon, running=left, waiting=waiting, promised=between.promised))
        assert preempting <= {start.job for start in later.starts}


@settings(deadline=None, max_examples=100)
@given(snapshots())
def test_no_victim_is_needless(snapshot: Snapshot) -> None:
    """With one waiting job: if any one victim ran on, the job would not start."""
    snapshot = replace(snapshot, waiting=[replace(snapshot.waiting[0], priority=2)], promised={})
    decisions = schedule(snapshot)
    victims = {preempt.victim for preempt in decisions.preempts}
    soon = NOW + STOP_SECONDS
    for kept in victims:
        left = [
            replace(job, priority=9)
            for job in snapshot.running
            if job.id == kept
            or not (job.id in victims or job.stopping or (job.expected_end is not None and job.expected_end <= soon))
        ]
        (needs,) = (job.needs for job in snapshot.waiting)
        later = schedule(replace(snapshot, now=soon, running=left))
        ranks = sum(placement.ranks for start in later.starts for placement in start.allocation)
        assert ranks < needs.num_ranks


@settings(deadline=None, max_examples=50)
@given(snapshots(), st.randoms(use_true_random=False))
def test_decisions_depend_on_what_is_so_and_not_on_the_order_of_lists(
    snapshot: Snapshot, chance: random.Random
) -> None:
    waiting, running = list(snapshot.waiting), list(snapshot.running)
    chance.shuffle(waiting)
    chance.shuffle(running)
    assert schedule(replace(snapshot, waiting=waiting, running=running)) == schedule(snapshot)


HOSTS = [Host(f"h{number}", 2, (0, 1)) for number in range(3)]
LONGEST = 2 * HOUR


def busy_day(hours: float, seed: int) -> list[Work]:
    """Three owners whose jobs always wait; job 0 of the first needs all hosts."""
    chance = random.Random(seed)
    works = [Work(0, "a", HOUR, HOUR, Needs(6, 6, gpus_per_rank=1))]
    for number in range(1, int(hours * 8)):
        ranks = chance.choice([1, 1, 1, 2, 3])
        seconds = chance.uniform(0.05, 1.0) * LONGEST
        needs, kind = Needs(ranks, ranks, gpus_per_rank=1), number % 20
        works.append(Work(number, chance.choice("abc"), number * 450.0, seconds, needs, kind=kind))
    return works


@pytest.mark.parametrize(
    ("knowledge", "bound"),
    [
        (Knowledge(limited=0.0, after=math.inf), 0.0),  # no length is ever known
        (Knowledge(limited=0.0), 0.0),
        (Knowledge(limited=1.0), 0.0),
        (Knowledge(limited=1.0, limit=0.0, after=math.inf), PUT_OFF_SECONDS),  # all jobs take longer than they said
        (Knowledge(recent=True), PUT_OFF_SECONDS),
        (Knowledge(recent=True, kinds=True), PUT_OFF_SECONDS),  # of which half take longer than the one before
    ],
    ids=["unknown", "live speed", "limits", "wrong", "recent", "kinds"],
)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_job_that_needs_all_hosts_never_starves(knowledge: Knowledge, bound: float, seed: int) -> None:
    """It waits for the jobs that run when its turn comes, at most, and for wrong estimates so long."""
    report = SimulatedCluster(HOSTS, busy_day(24, seed), knowledge, seed).run(24 * HOUR)
    first_start, _ = report.jobs[0]
    assert first_start is not None
    assert first_start <= 1 * HOUR + bound + 2 * LONGEST
