"""Deferred weight gradients are computed once, in the order in which backward left them."""

from functools import partial

import pytest

from hvd_transformer.gradients.weight_grads import WeightGradStore


def test_outside_of_deferring_products_are_computed_at_once() -> None:
    done: list[int] = []
    WeightGradStore().put(partial(done.append, 1))
    assert done == [1]


def test_the_products_of_each_backward_wait_for_their_turn() -> None:
    store = WeightGradStore()
    done: list[int] = []
    for numbers in ((1, 2), (), (3,)):
        with store.deferring():
            for number in numbers:
                store.put(partial(done.append, number))
    assert done == []
    store.run_oldest()
    assert done == [1, 2]
    store.run_oldest()
    assert done == [1, 2]
    store.run_oldest()
    assert done == [1, 2, 3]
    with pytest.raises(IndexError):
        store.run_oldest()


def test_a_failed_backward_leaves_nothing_behind() -> None:
    store = WeightGradStore()
    done: list[int] = []
    with pytest.raises(ValueError, match="bad luck"), store.deferring():
        store.put(partial(done.append, 1))
        raise ValueError("bad luck")
    store.put(partial(done.append, 2))
    assert done == [2]
    with store.deferring():
        store.put(partial(done.append, 3))
    store.clear()
    with pytest.raises(IndexError):
        store.run_oldest()
