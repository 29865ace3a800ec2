"""Slots and GPU numbers: fewest hosts, best fit, whole tensor groups, nothing twice."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_transformer.service.jobs import Host, Needs, Placement
from hvd_transformer.service.scheduling.placement import Cluster, FreeSpace, Part, Shape, all_free, best_size, shape_of

RANK = Shape(1, 0)


def placed(slots: list[int], shape: Shape, ranks: int, gpus: list[int] | None = None) -> dict[int, int]:
    parts = FreeSpace(slots, gpus or [0] * len(slots)).place(shape, ranks)
    return {part.host: part.slots for part in parts}


@pytest.mark.parametrize(
    ("slots", "ranks", "expected"),
    [
        ([8, 3, 5], 3, {1: 3}),  # the tightest host
        ([8, 4, 5], 4, {1: 4}),
        ([8, 8, 8, 4], 12, {0: 8, 3: 4}),
        ([6, 8, 6, 8], 10, {0: 6, 2: 4}),  # leaves the 8 together
        ([2, 2, 8], 4, {2: 4}),  # one host is fewer than two
        ([4, 4], 8, {0: 4, 1: 4}),
        ([0, 4, 0], 1, {1: 1}),
    ],
)
def test_fewest_hosts_and_the_best_fit_among_them(slots: list[int], ranks: int, expected: dict[int, int]) -> None:
    assert placed(slots, RANK, ranks) == expected


def test_whole_tensor_groups_on_each_host() -> None:
    assert placed([7, 7, 5], Shape(4, 0), 8) in ({0: 4, 2: 4}, {1: 4, 2: 4})
    assert FreeSpace([7, 7, 3], [0, 0, 0]).room(Shape(4, 0)) == 8


def test_gpus_limit_the_ranks_of_a_host() -> None:
    space = FreeSpace([8, 8], [4, 2])
    assert space.room(Shape(1, 2)) == 3
    assert space.place(Shape(1, 2), 3) == [Part(0, 2, 4), Part(1, 1, 2)]


def test_jobs_without_gpus_prefer_equal_hosts_without() -> None:
    assert placed([4, 4], RANK, 4, gpus=[4, 0]) == {1: 4}


def test_groups_span_hosts_only_where_the_job_fits_no_other_way() -> None:
    everything = all_free([Host("h1", 4), Host("h2", 4)])
    assert shape_of(Needs(8, 8, tensor=8), everything) == Shape(1, 0)
    assert shape_of(Needs(8, 8, tensor=4), everything) == Shape(4, 0)
    assert shape_of(Needs(4, 4, tensor=2, gpus_per_rank=1), all_free([Host("h1", 4, (0, 1, 2, 3))])) == Shape(2, 1)


@pytest.mark.parametrize(("room", "size"), [(9, 8), (8, 8), (7, 6), (5, 4), (4, 4), (3, 0), (0, 0)])
def test_elastic_jobs_take_whole_tensor_groups(room: int, size: int) -> None:
    assert best_size(Needs(8, 3, tensor=2), room) == size


def test_numbers_of_gpus_are_given_once() -> None:
    hosts = [Host("h1", 8, (0, 1, 2, 3)), Host("h2", 2, (7, 5))]
    cluster = Cluster(hosts, [Placement("h1", 1, (0, 2)), Placement("gone", 4), Placement("h2", 1)])
    assert (cluster.free.slots, cluster.free.gpus) == ([7, 1], [2, 2])
    assert cluster.take([Part(0, 1, 1), Part(1, 1, 2)]) == (Placement("h1", 1, (1,)), Placement("h2", 1, (5, 7)))
    assert cluster.take([Part(0, 1, 1)]) == (Placement("h1", 1, (3,)),)


def test_a_host_with_more_jobs_than_slots_has_no_room() -> None:
    """Its slots were reduced while jobs ran."""
    free = Cluster([Host("h1", 2), Host("h2", 2)], [Placement("h1", 4)]).free
    assert free.room(RANK) == 2
    free.add([Part(0, 4, 0)])
    assert free.room(RANK) == 4


sizes = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), min_size=1, max_size=7)
shapes = st.builds(Shape, st.sampled_from([1, 1, 2, 4]), st.integers(0, 2))


def room_on(slots: int, gpus: int, shape: Shape) -> int:
    return max(n for n in range(0, slots + 1, shape.group) if n * shape.gpus <= gpus)


@settings(deadline=None, max_examples=100)
@given(sizes, shapes, st.data())
def test_placement_against_trying_all_sets_of_hosts(
    sizes: list[tuple[int, int]], shape: Shape, data: st.DataObject
) -> None:
    space = FreeSpace([slots for slots, _ in sizes], [gpus for _, gpus in sizes])
    rooms = [room_on(slots, gpus, shape) for slots, gpus in sizes]
    assert space.room(shape) == sum(rooms)
    if not sum(rooms):
        return
    ranks = data.draw(st.integers(1, sum(rooms) // shape.group)) * shape.group
    parts = space.place(shape, ranks)
    assert sum(part.slots for part in parts) == ranks
    assert all(0 < part.slots <= rooms[part.host] and not part.slots % shape.group for part in parts)
    assert all(part.gpus == part.slots * shape.gpus for part in parts)
    assert len({part.host for part in parts}) == len(parts)
    fewest = next(n for n in range(1, 8) if any(sum(some) >= ranks for some in combinations(rooms, n)))
    assert len(parts) == fewest
    if fewest == 1:
        assert rooms[parts[0].host] == min(room for room in rooms if room >= ranks)


changes = st.lists(st.tuples(st.integers(0, 6), st.integers(-3, 8), st.integers(0, 8)), max_size=10)


@settings(deadline=None, max_examples=50)
@given(sizes, st.lists(shapes, max_size=4), changes)
def test_the_room_is_kept_up_to_date(
    sizes: list[tuple[int, int]], asked: list[Shape], changes: list[tuple[int, int, int]]
) -> None:
    space = FreeSpace([slots for slots, _ in sizes], [gpus for _, gpus in sizes])
    for shape in asked:
        space.room(shape)
    for host, slots, gpus in changes:
        space.set(host % len(sizes), slots, gpus)
    assert [space.room(shape) for shape in asked] == [space.copy().room(shape) for shape in asked]
