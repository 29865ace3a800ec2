"""Samplers: each item once per epoch for any number of replicas. Permutation: a random order without memory."""

import tracemalloc
from collections import Counter
from collections.abc import Callable
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_transformer.data.sampler import (
    ColumnSampler,
    Intervals,
    NeighborSampler,
    Permutation,
    Replica,
    StepPlan,
    StepSampler,
    share,
)

Sampler = StepSampler | ColumnSampler | NeighborSampler
Make = Callable[[Replica], Sampler]

replicas = st.integers(1, 7)


@st.composite
def makers(draw: st.DrawFn, num_items: int) -> Make:
    """One kind of sampler of so many items for whichever replica; a step grows with their number, or is fixed."""
    batch_size, rounds, fixed = draw(st.integers(1, 9)), draw(st.integers(1, 4)), draw(st.none() | st.integers(1, 40))
    kind = draw(st.sampled_from(Sampler.__args__))
    if kind is StepSampler:
        return lambda replica: StepSampler(num_items, fixed or batch_size * rounds * replica.size, batch_size, replica)
    if kind is ColumnSampler:
        return lambda replica: ColumnSampler(num_items, fixed or replica.size, rounds, replica)
    seed, most = draw(st.integers(0, 9)), draw(st.integers(1, 6))  # few intervals, so that the limit is reached
    return lambda replica: few_intervals(
        NeighborSampler(num_items, fixed or rounds * replica.size, seed, replica), most
    )


def few_intervals(sampler: NeighborSampler, most: int) -> NeighborSampler:
    sampler.MOST_INTERVALS = most
    return sampler


def all_replicas(make: Make, size: int, remaining: Intervals | None = None) -> list[list[StepPlan]]:
    """The steps of every replica."""
    return [list(make(Replica(rank, size)).epoch(remaining)) for rank in range(size)]


def items(steps: list[StepPlan]) -> list[int]:
    return [item for step in steps for part in step.accumulation for item in part]


def covered(intervals: Intervals) -> list[int]:
    return [item for start, stop in intervals for item in range(start, stop)]


@settings(deadline=None, max_examples=200)
@given(st.data(), st.integers(0, 200), replicas)
def test_every_unit_once_in_an_equal_number_of_steps(data: st.DataObject, num_items: int, size: int) -> None:
    make = data.draw(makers(num_items))
    every = all_replicas(make, size)
    assert sorted(chain.from_iterable(map(items, every))) == list(range(num_items))
    assert len({len(steps) for steps in every}) == 1
    assert {make(Replica(rank, size)).num_steps() for rank in range(size)} == {len(every[0])}


@settings(deadline=None, max_examples=200)
@given(st.data(), st.integers(1, 200), replicas)
def test_what_remains_is_what_no_replica_has_seen(data: st.DataObject, num_items: int, size: int) -> None:
    every = all_replicas(data.draw(makers(num_items)), size)
    seen: set[int] = set()
    for steps in zip(*every, strict=True):
        seen |= {item for step in steps for part in step.accumulation for item in part}
        assert all(step.remaining == steps[0].remaining for step in steps)
        assert covered(steps[0].remaining) == sorted(set(range(num_items)) - seen)
        assert all(start < stop for start, stop in steps[0].remaining)
    assert every[0][-1].remaining == []


@settings(deadline=None, max_examples=200)
@given(st.data(), st.integers(1, 150), st.lists(replicas, min_size=2, max_size=4))
def test_a_resumed_epoch_sees_each_remaining_unit_once(data: st.DataObject, num_items: int, sizes: list[int]) -> None:
    """Stops after some steps, and goes on with another number of replicas, several times over."""
    make = data.draw(makers(num_items))
    remaining: Intervals | None = None
    seen: Counter[int] = Counter()
    for number, size in enumerate(sizes):
        every = all_replicas(make, size, remaining)
        counts = {make(Replica(rank, size)).num_steps(remaining) for rank in range(size)}
        assert counts == {len(steps) for steps in every}
        last = number == len(sizes) - 1
        stop = len(every[0]) if last else data.draw(st.integers(0, len(every[0])))
        seen.update(item for steps in every for item in items(steps[:stop]))
        if stop:
            remaining = every[0][stop - 1].remaining
    assert seen == Counter(range(num_items))


@settings(deadline=None, max_examples=200)
@given(st.data(), st.integers(1, 200), st.integers(1, 40), st.lists(replicas, min_size=2, max_size=4))
def test_steps_of_a_fixed_size_are_the_same_samples_over_any_number_of_replicas(
    data: st.DataObject, num_items: int, step_size: int, sizes: list[int]
) -> None:
    """Also where that number changes on the way, and whatever a round may hold."""
    kind, rounds, remaining, found = data.draw(st.sampled_from(Sampler.__args__)), 1, None, []
    for number, size in enumerate(sizes):
        # Samples a round may change; what each stretch of columns gives to a step may not.
        if kind is StepSampler:
            rounds = data.draw(st.integers(1, 9))
        every = all_replicas(lambda replica: kind(num_items, step_size, rounds, replica), size, remaining)  # noqa: B023
        # Neighbours are taken in turn, so they come in another order.
        in_order = sorted if kind is NeighborSampler else list
        steps = [in_order(chain.from_iterable(items([step]) for step in part)) for part in zip(*every, strict=True)]
        stop = len(steps) if number == len(sizes) - 1 else data.draw(st.integers(0, len(steps)))
        found += steps[:stop]
        remaining = every[0][stop - 1].remaining if stop else remaining
    alone = all_replicas(lambda replica: kind(num_items, step_size, 1, replica), 1)
    assert found == [items([step]) for step in alone[0]]
    assert kind is ColumnSampler or all(len(step) == step_size for step in found[:-1])


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 200), st.integers(1, 60), st.integers(1, 9), replicas)
def test_a_step_of_windows_is_shared_evenly_and_taken_in_full_rounds(
    num_items: int, step_size: int, batch_size: int, size: int
) -> None:
    every = all_replicas(lambda replica: StepSampler(num_items, step_size, batch_size, replica), size)
    largest = min(batch_size, -(-min(num_items, step_size) // size))
    assert len(every[0][0].accumulation[0]) == largest  # so rank 0 can tell what a round needs
    for parts in zip(*every, strict=True):
        own = [items([step]) for step in parts]
        assert max(map(len, own)) - min(map(len, own)) <= 1
        for step, samples in zip(parts, own, strict=True):
            sizes = [len(part) for part in step.accumulation]
            assert len(sizes) == -(-len(samples) // batch_size)
            assert all(number == largest == batch_size for number in sizes[:-1])
            assert not sizes or 1 <= sizes[-1] <= largest


@pytest.mark.parametrize(("size", "rounds"), [(1, [3, 3, 2]), (2, [3, 1]), (3, [3]), (4, [2]), (5, [2]), (9, [1])])
def test_the_rounds_of_the_first_replica_when_a_step_has_eight_samples(size: int, rounds: list[int]) -> None:
    every = all_replicas(lambda replica: StepSampler(16, 8, 3, replica), size)
    assert [[len(part) for part in step.accumulation] for step in every[0]] == [rounds, rounds]


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 200), st.integers(1, 4), replicas)
def test_a_replicas_columns_are_one_stretch_of_the_text_in_order(num_items: int, rounds: int, size: int) -> None:
    every = all_replicas(lambda replica: ColumnSampler(num_items, size, rounds, replica), size)
    stretches = [items(steps) for steps in every]
    assert list(chain.from_iterable(stretches)) == list(range(num_items))
    assert max(map(len, stretches)) - min(map(len, stretches)) <= 1
    assert all(len(part) == 1 for steps in every for step in steps for part in step.accumulation)
    assert all(len(step.accumulation) <= rounds for steps in every for step in steps)


def test_a_replica_walks_through_its_share_of_the_stretches() -> None:
    every = all_replicas(lambda replica: ColumnSampler(12, 3, 2, replica), 2)
    assert [items([step]) for step in every[0]] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert [items([step]) for step in every[1]] == [[8, 9], [10, 11]]


@settings(deadline=None)
@given(st.integers(0, 1000), st.integers(1, 50))
def test_shares_are_contiguous_and_fair(total: int, size: int) -> None:
    parts = [share(range(7, 7 + total), Replica(rank, size)) for rank in range(size)]
    assert list(chain.from_iterable(parts)) == list(range(7, 7 + total))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert len(parts[0]) == max(map(len, parts))


def test_the_picture_of_the_first_line() -> None:
    steps = all_replicas(lambda replica: StepSampler(12, 6, 3, replica), 2)
    assert [step.accumulation for step in steps[0]] == [[range(3)], [range(6, 9)]]
    assert [step.accumulation for step in steps[1]] == [[range(3, 6)], [range(9, 12)]]
    columns = all_replicas(lambda replica: ColumnSampler(8, 2, 2, replica), 2)
    assert [items([step]) for step in columns[0]] == [[0, 1], [2, 3]]
    assert [items([step]) for step in columns[1]] == [[4, 5], [6, 7]]


@pytest.mark.parametrize("kind", ["windows", "columns"])
def test_a_long_epoch_is_a_few_numbers(kind: str) -> None:
    """Ten to the twelfth items: a list of them would never end."""
    replica = Replica(1, 3)
    long = 10**12
    sampler = StepSampler(long, 48, 8, replica) if kind == "windows" else ColumnSampler(long, 3, 2, replica)
    first = next(iter(sampler.epoch()))
    assert sum(map(len, first.accumulation)) == (16 if kind == "windows" else 2)
    assert len(first.remaining) <= 3


def everything(length: int, key: tuple[int, ...]) -> list[int]:
    return Permutation(length, key)[np.arange(length)].tolist()


keys = st.lists(st.integers(0, 2**63), min_size=1, max_size=3).map(tuple)


@settings(deadline=None, max_examples=150)
@given(st.integers(1, 3000), keys)
def test_it_is_a_bijection(length: int, key: tuple[int, ...]) -> None:
    assert sorted(everything(length, key)) == list(range(length))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 4095, 4096, 4097, 2**16, 2**16 + 1])
def test_it_is_a_bijection_around_powers_of_two(length: int) -> None:
    assert sorted(everything(length, (1, 2))) == list(range(length))


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 10**12 - 1), min_size=1, max_size=50))
def test_an_array_gives_what_its_elements_give(indices: list[int]) -> None:
    order = Permutation(10**12, (5,))
    together = order[np.array(indices, dtype=np.int64)]
    assert together.dtype == np.int64
    assert together.tolist() == [int(order[np.array([index], dtype=np.int64)][0]) for index in indices]
    assert all(0 <= value < 10**12 for value in together)
    assert len(set(together.tolist())) == len(set(indices))


def test_the_key_gives_the_order() -> None:
    assert everything(500, (1, 2)) == everything(500, (1, 2))
    orders = [tuple(everything(500, key)) for key in [(1, 2), (1, 3), (2, 2), (2, 1), (1,)]]
    assert len(set(orders)) == len(orders)


def test_orders_of_two_epochs_agree_no_more_often_than_by_chance() -> None:
    equal = sum(a == b for a, b in zip(everything(5000, (1, 0)), everything(5000, (1, 1)), strict=True))
    assert equal < 12  # Poisson with mean 1


@pytest.mark.parametrize("length", [16, 50, 64])
def test_every_value_is_as_often_in_every_place(length: int) -> None:
    """Chi-square of the table of (place, value) over many keys: its mean is its degrees of freedom."""
    repetitions = 1000
    table = np.zeros((length, length))
    for key in range(repetitions):
        table[np.arange(length), everything(length, (key,))] += 1
    expected = repetitions / length
    chi_square = ((table - expected) ** 2 / expected).sum()
    freedom = (length - 1) ** 2
    assert abs(chi_square - freedom) < 6 * (2 * freedom) ** 0.5


def test_neighbours_do_not_stay_neighbours() -> None:
    order = np.array(everything(10_000, (9,)))
    # The mean distance of two random places of [0, 1] is 1/3.
    assert np.abs(np.diff(order)).mean() / 10_000 == pytest.approx(1 / 3, abs=0.02)


def test_memory_does_not_grow_with_the_length() -> None:
    tracemalloc.start()
    try:
        order = Permutation(10**12, (1,))
        for start in range(0, 10**12, 10**11):
            order[np.arange(start, start + 1000)]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 500_000


def steps_of(sampler: NeighborSampler, epoch: int = 0) -> list[list[int]]:
    return [items([step]) for step in sampler.epoch(epoch=epoch)]


def test_a_step_takes_neighbours_and_the_replicas_take_them_in_turn() -> None:
    every = [list(NeighborSampler(24 * 50, 24, 1, Replica(rank, 4)).epoch()) for rank in range(4)]
    for parts in zip(*every, strict=True):
        own = [items([step]) for step in parts]
        first = own[0][0]
        assert [item - first for item in own[0]] == [0, 4, 8, 12, 16, 20]
        assert sorted(chain.from_iterable(own)) == list(range(first, first + 24))
        assert all(len(part) == 1 for step in parts for part in step.accumulation)


@pytest.mark.parametrize("num_steps", [100, 5000])
def test_steps_of_neighbours_come_in_random_order(num_steps: int) -> None:
    """Of seed and epoch. Any stretch of an epoch has steps from everywhere, however long the epoch is."""
    order = [step[0] // 3 for step in steps_of(NeighborSampler(3 * num_steps, 3, 1, Replica()))]
    assert sorted(order) == list(range(num_steps))
    if num_steps == 100:  # any of them may be the first
        starts = {
            steps_of(NeighborSampler(300, 3, seed, Replica()), epoch)[0][0] for seed in (1, 2) for epoch in range(99)
        }
        assert len(starts) > 70
        assert len(set(order[:50]) & set(range(50))) in range(15, 36)
    for number in range(0, num_steps, 100):
        tenths = Counter(place * 10 // num_steps for place in order[number : number + 100])
        assert len(tenths) == 10 and max(tenths.values()) < 35
    later = [step[0] // 3 for step in steps_of(NeighborSampler(3 * num_steps, 3, 1, Replica()), epoch=1)]
    assert abs(np.corrcoef(order, later)[0, 1]) < 0.3 and abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.3


def test_what_remains_of_neighbours_stays_short() -> None:
    sampler = NeighborSampler(10**9 + 7, 64, 5, Replica(3, 8))
    steps = sampler.epoch()
    assert max(len(next(steps).remaining) for _ in range(2000)) == NeighborSampler.MOST_INTERVALS
    assert sampler.num_steps() == -(-(10**9 + 7) // 64)


def test_a_step_is_filled_up_with_the_nearest_items() -> None:
    """Where another step size has left fewer than a step side by side."""
    (step,) = NeighborSampler(100, 6, 0, Replica()).epoch([(10, 12), (20, 22), (23, 25)])
    assert sorted(items([step])) == [10, 11, 20, 21, 23, 24]
    for seed in range(20):
        plan = next(iter(NeighborSampler(100, 4, seed, Replica()).epoch([(10, 12), (14, 16), (25, 27), (28, 30)])))
        assert sorted(items([plan])) in ([10, 11, 14, 15], [25, 26, 28, 29])
