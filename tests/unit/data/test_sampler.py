"""Each unit is seen once an epoch, by any number of replicas, also when that number changes on the way."""

from collections import Counter
from collections.abc import Callable
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_transformer.data.sampler import ColumnSampler, Intervals, Replica, Step, WindowSampler, share

Sampler = WindowSampler | ColumnSampler
Make = Callable[[Replica], Sampler]

replicas = st.integers(1, 7)


@st.composite
def makers(draw: st.DrawFn, num_units: int) -> Make:
    """One kind of sampler of so many units, with any batch size and number of rounds, for whichever replica."""
    batch_size, rounds = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    if draw(st.booleans()):
        return lambda replica: WindowSampler(num_units, batch_size, rounds, replica)
    return lambda replica: ColumnSampler(num_units, rounds, replica)


def all_replicas(make: Make, size: int, remaining: Intervals | None = None) -> list[list[Step]]:
    """The steps of every replica."""
    return [list(make(Replica(rank, size)).epoch(remaining)) for rank in range(size)]


def units(steps: list[Step]) -> list[int]:
    return [unit for step in steps for part in step.rounds for unit in part]


def covered(intervals: Intervals) -> list[int]:
    return [unit for start, stop in intervals for unit in range(start, stop)]


@settings(deadline=None, max_examples=200)
@given(st.data(), st.integers(0, 200), replicas)
def test_every_unit_once_in_an_equal_number_of_steps(data: st.DataObject, num_units: int, size: int) -> None:
    make = data.draw(makers(num_units))
    every = all_replicas(make, size)
    assert sorted(chain.from_iterable(map(units, every))) == list(range(num_units))
    assert len({len(steps) for steps in every}) == 1
    assert {make(Replica(rank, size)).num_steps() for rank in range(size)} == {len(every[0])}


@settings(deadline=None, max_examples=200)
@given(st.data(), st.integers(1, 200), replicas)
def test_what_remains_is_what_no_replica_has_seen(data: st.DataObject, num_units: int, size: int) -> None:
    every = all_replicas(data.draw(makers(num_units)), size)
    seen: set[int] = set()
    for steps in zip(*every, strict=True):
        seen |= {unit for step in steps for part in step.rounds for unit in part}
        assert all(step.remaining == steps[0].remaining for step in steps)
        assert covered(steps[0].remaining) == sorted(set(range(num_units)) - seen)
        assert all(start < stop for start, stop in steps[0].remaining)
    assert every[0][-1].remaining == []


@settings(deadline=None, max_examples=200)
@given(st.data(), st.integers(1, 150), st.lists(replicas, min_size=2, max_size=4))
def test_a_resumed_epoch_sees_each_remaining_unit_once(data: st.DataObject, num_units: int, sizes: list[int]) -> None:
    """Stops after some steps, and goes on with another number of replicas, several times over."""
    make = data.draw(makers(num_units))
    remaining: Intervals | None = None
    seen: Counter[int] = Counter()
    for number, size in enumerate(sizes):
        every = all_replicas(make, size, remaining)
        counts = {make(Replica(rank, size)).num_steps(remaining) for rank in range(size)}
        assert counts == {len(steps) for steps in every}
        last = number == len(sizes) - 1
        stop = len(every[0]) if last else data.draw(st.integers(0, len(every[0])))
        seen.update(unit for steps in every for unit in units(steps[:stop]))
        if stop:
            remaining = every[0][stop - 1].remaining
    assert seen == Counter(range(num_units))


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 200), st.sampled_from([(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1)]), st.integers(1, 3))
def test_a_step_of_windows_is_the_same_samples_over_any_number_of_replicas(
    num_units: int, split: tuple[int, int], rounds: int
) -> None:
    size, batch_size = split
    steps = all_replicas(lambda replica: WindowSampler(num_units, batch_size, rounds, replica), size)
    alone = all_replicas(lambda replica: WindowSampler(num_units, 12 * rounds, 1, replica), 1)
    together = [sorted(unit for step in part for unit in units([step])) for part in zip(*steps, strict=True)]
    assert together == [units([step]) for step in alone[0]]


def units_of(every: list[list[Step]], which: slice) -> list[list[int]]:
    """The units of some steps of every replica."""
    return [units(steps[which]) for steps in every]


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 200), st.integers(1, 9), st.integers(1, 4), replicas)
def test_rounds_of_windows_are_never_more_or_larger_than_asked(
    num_units: int, batch_size: int, rounds: int, size: int
) -> None:
    every = all_replicas(lambda replica: WindowSampler(num_units, batch_size, rounds, replica), size)
    for steps in every:
        for step in steps:
            assert len(step.rounds) <= rounds and all(len(part) <= batch_size for part in step.rounds)
        # All but the last step are full.
        assert all([len(part) for part in step.rounds] == [batch_size] * rounds for step in steps[:-1])
        # And the last one has no more rounds than its samples need.
        left = num_units - sum(map(len, units_of(every, slice(-1))))
        assert len(steps[-1].rounds) == -(-left // (batch_size * size))
    # In the last one no replica has two samples more than another in a round.
    for parts in zip(*(steps[-1].rounds for steps in every), strict=True):
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 200), st.integers(1, 4), replicas)
def test_a_replicas_columns_are_one_stretch_of_the_text_in_order(num_units: int, rounds: int, size: int) -> None:
    every = all_replicas(lambda replica: ColumnSampler(num_units, rounds, replica), size)
    stretches = [units(steps) for steps in every]
    assert list(chain.from_iterable(stretches)) == list(range(num_units))
    assert max(map(len, stretches)) - min(map(len, stretches)) <= 1
    assert all(len(part) == 1 for steps in every for step in steps for part in step.rounds)
    assert all(len(step.rounds) <= rounds for steps in every for step in steps)


@settings(deadline=None)
@given(st.integers(0, 1000), st.integers(1, 50))
def test_shares_are_contiguous_and_fair(total: int, size: int) -> None:
    parts = [share(total, Replica(rank, size)) for rank in range(size)]
    assert list(chain.from_iterable(parts)) == list(range(total))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_the_picture_of_the_first_line() -> None:
    steps = all_replicas(lambda replica: WindowSampler(12, 3, 1, replica), 2)
    assert [step.rounds for step in steps[0]] == [[range(3)], [range(6, 9)]]
    assert [step.rounds for step in steps[1]] == [[range(3, 6)], [range(9, 12)]]
    columns = all_replicas(lambda replica: ColumnSampler(8, 2, replica), 2)
    assert [units([step]) for step in columns[0]] == [[0, 1], [2, 3]]
    assert [units([step]) for step in columns[1]] == [[4, 5], [6, 7]]


@pytest.mark.parametrize("kind", ["windows", "columns"])
def test_a_long_epoch_is_a_few_numbers(kind: str) -> None:
    """Ten to the twelfth units: a list of them would never end."""
    replica = Replica(1, 3)
    long = 10**12
    sampler = WindowSampler(long, 8, 2, replica) if kind == "windows" else ColumnSampler(long, 2, replica)
    first = next(iter(sampler.epoch()))
    assert sum(map(len, first.rounds)) == (16 if kind == "windows" else 2)
    assert len(first.remaining) <= 3
