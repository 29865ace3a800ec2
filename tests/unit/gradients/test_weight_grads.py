"""Work that is left for later is done once, in the order in which it came."""

import pytest

from hvd_transformer.gradients.weight_grads import WeightGradStore


def test_without_collecting_work_is_done_at_once() -> None:
    done: list[int] = []
    WeightGradStore()(lambda: done.append(1))
    assert done == [1]


def test_each_backwards_work_waits_for_its_turn() -> None:
    done: list[int] = []
    later = WeightGradStore()
    for numbers in ((1, 2), (), (3,)):
        with later.collect():
            for number in numbers:
                later(lambda number=number: done.append(number))
    assert done == []
    later.run()
    assert done == [1, 2]
    later.run()
    assert done == [1, 2]
    later.run()
    assert done == [1, 2, 3]
    with pytest.raises(IndexError):
        later.run()


def test_a_backward_that_fails_leaves_nothing_and_the_next_work_is_done_at_once() -> None:
    done: list[int] = []
    later = WeightGradStore()
    with pytest.raises(ValueError, match="bad luck"), later.collect():
        later(lambda: done.append(1))
        raise ValueError("bad luck")
    later(lambda: done.append(2))
    assert done == [2]
    with later.collect():
        later(lambda: done.append(3))
    later.clear()
    with pytest.raises(IndexError):
        later.run()
