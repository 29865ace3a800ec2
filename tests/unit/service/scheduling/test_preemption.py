"""Which jobs are stopped: the fewest, the cheapest, and none in vain."""

import math

from hvd_transformer.service.jobs import Needs, Placement
from hvd_transformer.service.scheduling.backfill import Event, Time
from hvd_transformer.service.scheduling.placement import FreeSpace, Part, Shape
from hvd_transformer.service.scheduling.preemption import Candidate, choose_victims
from hvd_transformer.service.scheduling.snapshot import Running

SOON = (160.0, 0.0)
RANK = Shape(1, 0)


def candidate(id: int, host: int, slots: int, priority: int = 0, began: float = 0.0, end: float = 900.0) -> Candidate:
    job = Running(id, "a", priority, Needs(slots, slots), (Placement(f"h{host}", slots),), began)
    return Candidate(job, Event((end, 0.0), False, [Part(host, slots, 0)]))


def victims(free: list[int], candidates: list[Candidate], ranks: int, shape: Shape = RANK) -> set[int]:
    spaces = [(SOON, FreeSpace(free, [0] * len(free)))]
    return {victim.job.id for victim in choose_victims(spaces, candidates, shape, ranks)}


def test_the_lowest_priority_and_then_the_youngest() -> None:
    jobs = [candidate(1, 0, 1, began=10.0), candidate(2, 0, 1, began=20.0), candidate(3, 0, 1, priority=1, began=99.0)]
    assert victims([0], jobs, 1) == {2}
    assert victims([0], jobs, 2) == {1, 2}
    assert victims([0], jobs, 3) == {1, 2, 3}


def test_nobody_is_stopped_in_vain() -> None:
    assert victims([0], [candidate(1, 0, 1), candidate(2, 0, 1)], 3) == set()
    assert victims([1, 1], [candidate(1, 0, 1), candidate(2, 1, 1)], 4, Shape(4, 0)) == set()


def test_one_victim_rather_than_several_younger_ones() -> None:
    jobs = [candidate(1, 0, 4, began=1.0), *(candidate(number, 1, 1, began=9.0) for number in range(2, 6))]
    assert victims([0, 0], jobs, 4) == {1}


def test_several_rather_than_one_of_higher_priority() -> None:
    jobs = [candidate(1, 0, 4, priority=1), *(candidate(number, 1, 1) for number in range(2, 6))]
    assert victims([0, 0], jobs, 4) == {2, 3, 4, 5}


def test_few_large_victims_rather_than_many_small_ones() -> None:
    small = [candidate(number, 0, 1, began=9.0) for number in range(10, 16)]
    assert victims([0, 0], [*small, candidate(1, 1, 3), candidate(2, 1, 3)], 6) == {1, 2}


def test_those_that_others_make_needless_go_on() -> None:
    """A group of 4 needs one host: the youngest, on the other host, are not stopped."""
    jobs = [candidate(1, 0, 2, began=9.0), candidate(2, 1, 2, began=5.0), candidate(3, 1, 2, began=4.0)]
    assert victims([0, 0], jobs, 4, Shape(4, 0)) == {2, 3}


def test_slots_that_are_promised_later_are_no_room() -> None:
    """From 500 on, another job has the slots of host 0, which job 1 would give back by then anyway."""
    later: list[tuple[Time, FreeSpace]] = [(SOON, FreeSpace([0, 0], [0, 0])), ((500.0, 0.0), FreeSpace([0, 0], [0, 0]))]
    promised, free = candidate(1, 0, 2, began=9.0, end=400.0), candidate(2, 1, 2, end=math.inf)
    assert [victim.job.id for victim in choose_victims(later, [promised, free], RANK, 2)] == [2]
    assert choose_victims(later, [promised], RANK, 2) == []
