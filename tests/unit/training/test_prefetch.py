import threading

import pytest

from hvd_transformer.data.sampler import StepPlan
from hvd_transformer.training.prefetch import Prefetch


def plans(number: int) -> list[StepPlan]:
    return [StepPlan([range(index, index + 1)], []) for index in range(number)]


def test_the_next_batches_are_made_in_another_thread_while_the_step_runs() -> None:
    made: list[tuple[int, int, bool]] = []
    second = threading.Event()

    def make(plan: StepPlan, epoch: int) -> int:
        made.append((plan.accumulation[0].start, epoch, threading.current_thread() is threading.main_thread()))
        if len(made) == 2:
            second.set()
        return plan.accumulation[0].start

    prefetch = Prefetch(make)
    first, following = plans(2)
    assert prefetch.take(first, 3) == 0  # nobody had begun with it
    prefetch.start(following, 3)
    assert second.wait(10)  # before anybody takes it
    assert prefetch.take(following, 3) == 1
    assert made == [(0, 3, True), (1, 3, False)]
    prefetch.close()


def test_another_step_than_the_expected_one_waits_for_the_thread_and_is_made_now() -> None:
    running = threading.Lock()

    def make(plan: StepPlan, epoch: int) -> int:
        assert running.acquire(blocking=False), "two threads make batches at the same time"
        released.wait(0.2)
        running.release()
        return plan.accumulation[0].start

    released = threading.Event()
    prefetch = Prefetch(make)
    _, expected, other = plans(3)
    prefetch.start(expected, 0)
    assert prefetch.take(other, 0) == 2
    prefetch.close()


def test_what_the_thread_raised_is_raised_by_the_step_that_needs_it() -> None:
    def make(plan: StepPlan, epoch: int) -> int:
        raise OSError("the shard is gone")

    prefetch = Prefetch(make)
    (plan,) = plans(1)
    prefetch.start(plan, 0)
    with pytest.raises(OSError, match="the shard is gone"):
        prefetch.take(plan, 0)
    prefetch.start(None, 0)
    prefetch.wait()
    prefetch.close()
