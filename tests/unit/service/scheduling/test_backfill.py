"""Reservations: when blocked jobs start, and what others may use before."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_transformer.service.scheduling.backfill import Event, Time, Timeline
from hvd_transformer.service.scheduling.placement import FreeSpace, Part, Shape

RANK = Shape(1, 0)
FOREVER = (math.inf, 0.0)


def timeline(free: list[int], *ends: tuple[float, int, int], unknown: tuple[int, int] | None = None) -> Timeline:
    """`ends`: time, host, slots of a running job; `unknown`: host and slots of one that may run for ever."""
    events = [Event((time, 0.0), False, [Part(host, slots, 0)]) for time, host, slots in ends]
    if unknown is not None:
        events.append(Event(FOREVER, False, [Part(*unknown, 0)]))
    return Timeline(100.0, FreeSpace(free, [0] * len(free)), events)


def reserve(
    times: Timeline, job: int, ranks: int, seconds: float | None = None, latest: float = math.inf
) -> float | None:
    opening = times.opening(RANK, ranks)
    assert opening is not None
    return times.reserve(job, opening, opening.spare.place(RANK, ranks), seconds, latest)


def test_a_job_is_promised_the_first_time_at_which_it_fits() -> None:
    times = timeline([1, 0], (200.0, 0, 3), (300.0, 1, 4))
    assert [times.opening(RANK, ranks).time[0] for ranks in (1, 2, 4, 5, 8)] == [100.0, 200.0, 200.0, 300.0, 300.0]  # type: ignore[union-attr]
    assert times.opening(RANK, 9) is None


def test_shorter_jobs_may_use_the_slots_before_it_starts() -> None:
    times = timeline([2, 0], (200.0, 1, 2))
    assert reserve(times, 1, 4) == 200.0
    assert times.spare(200.0).room(RANK) == 2
    assert times.spare(201.0).room(RANK) == times.spare(math.inf).room(RANK) == 0
    assert times.held_by(RANK, 1, 201.0) == 1
    assert times.held_by(RANK, 1, 200.0) is None  # it may start
    assert times.held_by(RANK, 3, 201.0) is None  # it does not fit anyway


def test_jobs_of_unknown_length_use_what_no_reservation_needs() -> None:
    times = timeline([2, 1], (200.0, 1, 3))
    assert reserve(times, 1, 4) == 200.0
    assert times.spare(math.inf).slots == [2, 0]
    times.start([Part(0, 2, 0)], (math.inf, 100.0))
    assert times.spare(math.inf).room(RANK) == 0
    assert times.free.slots == [0, 1]


def test_what_starts_is_no_longer_spare() -> None:
    times = timeline([4], (200.0, 0, 4))
    assert reserve(times, 1, 6) == 200.0
    assert times.spare(math.inf).room(RANK) == 2
    times.start([Part(0, 2, 0)], (math.inf, 100.0))
    assert times.spare(math.inf).room(RANK) == 0
    assert times.spare(200.0).room(RANK) == 2


def test_nothing_starts_in_the_slots_of_a_job_that_waits_for_an_unknown_end() -> None:
    times = timeline([3], unknown=(0, 1))
    assert reserve(times, 1, 4) is None
    assert times.spare(101.0).room(RANK) == 0
    assert times.held_by(RANK, 1, 101.0) == 1


def test_nothing_starts_in_the_slots_of_a_job_that_is_late() -> None:
    times = timeline([2], (200.0, 0, 2))
    assert reserve(times, 1, 4, latest=199.0) == 200.0
    assert times.spare(150.0).room(RANK) == 0


def test_known_ends_are_preferred_to_unknown_ones() -> None:
    times = timeline([0, 0], (900.0, 1, 4), unknown=(0, 4))
    assert reserve(times, 1, 4) == 900.0
    assert times.spare(math.inf).slots == [0, 0]
    assert times.opening(RANK, 4).time == FOREVER  # type: ignore[union-attr]


def test_a_second_reservation_respects_the_first() -> None:
    times = timeline([2, 0], (200.0, 0, 2), (300.0, 1, 4))
    assert reserve(times, 1, 4) == 200.0
    assert reserve(times, 2, 2) == 300.0
    assert times.spare(250.0).room(RANK) == 0
    assert times.spare(200.0).room(RANK) == 2


def test_a_reserved_job_of_known_length_gives_back() -> None:
    times = timeline([0], (200.0, 0, 4))
    assert reserve(times, 1, 4, seconds=50.0) == 200.0
    assert reserve(times, 2, 4, seconds=50.0) == 250.0
    assert reserve(times, 3, 4) == 300.0
    assert times.opening(RANK, 4).time == (math.inf, 300.0)  # type: ignore[union-attr]  # nobody knows how long that takes
    assert reserve(times, 4, 4) is None
    assert times.opening(RANK, 4) is None  # after one whose start is unknown


def test_a_job_that_ends_earlier_makes_room_earlier() -> None:
    end = Event((900.0, 0.0), False, [Part(0, 4, 0)])
    times = Timeline(100.0, FreeSpace([0], [0]), [end])
    times.give_back_earlier(end, (160.0, 0.0))
    assert reserve(times, 1, 4) == 160.0


parts = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=3)
jobs = st.lists(st.tuples(parts, st.sampled_from([150.0, 200.0, 300.0, math.inf])), max_size=8)
asks = st.lists(st.tuples(st.integers(1, 16), st.sampled_from([None, 60.0, 100.0])), min_size=1, max_size=5)


def brute_force(free: list[int], running: list[tuple[list[Part], Time]], ranks: int) -> float | None:
    """The first time at which so many slots are free."""
    for time in sorted({(100.0, 0.0), *(end for _, end in running)}):
        given = sum(part.slots for parts, end in running if end <= time for part in parts)
        if sum(free) + given >= ranks:
            return None if math.isinf(time[0]) else time[0]
    return -1.0


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 4), min_size=4, max_size=4), jobs, asks)
def test_whatever_may_start_delays_no_reservation(
    free: list[int], jobs: list[tuple[list[tuple[int, int]], float]], asks: list[tuple[int, float | None]]
) -> None:
    """The first reservation is where brute force has it, also after everything that may start has started."""
    running: list[tuple[list[Part], Time]] = [
        ([Part(host, slots, 0) for host, slots in dict(parts).items()], (end, 0.0)) for parts, end in jobs
    ]
    events = [Event(end, False, parts) for parts, end in running]
    times = Timeline(100.0, FreeSpace(free, [0] * 4), events)
    (ranks, seconds), *others = asks
    expected = brute_force(free, running, ranks)
    opening = times.opening(RANK, ranks)
    assert (opening is None) == (expected == -1.0)
    if opening is None:
        return
    assert times.reserve(1, opening, opening.spare.place(RANK, ranks), seconds, math.inf) == expected
    for other_ranks, other_seconds in others:
        end = math.inf if other_seconds is None else 100.0 + other_seconds
        spare = times.spare(end)
        if spare.room(RANK) >= other_ranks:
            started = spare.place(RANK, other_ranks)
            times.start(started, (end, 100.0))
            running.append((started, (end, 100.0)))
    assert min(times.free.slots) >= 0
    left = list(times.free.slots)
    after = brute_force(left, running, ranks)
    assert after == expected
