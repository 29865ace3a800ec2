"""The shuffled order visits everything once, looks like chance, and needs no memory."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_transformer.data.sampler import Permutation


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
    rounds = 1000
    table = np.zeros((length, length))
    for key in range(rounds):
        table[np.arange(length), everything(length, (key,))] += 1
    expected = rounds / length
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
