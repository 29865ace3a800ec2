"""Deferred weight gradients are computed once, in the order in which backward left them."""

import pytest
import torch
from torch import Tensor

from hvd_transformer.gradients.weight_grads import WeightGradStore


class Sink:
    """Notes the first number of each product's input."""

    def __init__(self) -> None:
        self.done: list[int] = []

    def add_product(self, values: Tensor, grad: Tensor, counted: object) -> None:
        self.done.append(int(values[0, 0]))


def put(store: WeightGradStore, sink: Sink, number: int) -> None:
    store.put(sink, torch.full((1, 1), float(number)), torch.ones(1, 1))


def test_outside_of_deferring_products_are_computed_at_once() -> None:
    sink = Sink()
    put(WeightGradStore(), sink, 1)
    assert sink.done == [1]


def test_the_products_of_each_backward_wait_for_their_turn() -> None:
    store, sink = WeightGradStore(), Sink()
    for numbers in ((1, 2), (), (3,)):
        with store.deferring():
            for number in numbers:
                put(store, sink, number)
    assert sink.done == []
    store.run_oldest()
    assert sink.done == [1, 2]
    store.run_oldest()
    assert sink.done == [1, 2]
    store.run_oldest()
    assert sink.done == [1, 2, 3]
    with pytest.raises(IndexError):
        store.run_oldest()


def test_a_failed_backward_leaves_nothing_behind() -> None:
    store, sink = WeightGradStore(), Sink()
    with pytest.raises(ValueError, match="bad luck"), store.deferring():
        put(store, sink, 1)
        raise ValueError("bad luck")
    put(store, sink, 2)
    assert sink.done == [2]
    with store.deferring():
        put(store, sink, 3)
    store.clear()
    with pytest.raises(IndexError):
        store.run_oldest()
