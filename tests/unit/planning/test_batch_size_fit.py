"""The search for a batch size, and whether one fits by the plan."""

import pytest
from small_plan import SMALL, V, small_plan

from hvd_transformer.config import load
from hvd_transformer.planning.batch_size_fit import fits_by_plan, largest_that_fits


@pytest.mark.parametrize("sizes", [[1], [3, 4], [1, 2, 3, 4, 6, 8, 12, 24], list(range(1, 100)), [1, 97], [5, 1000]])
def test_the_largest_that_fits_is_found_and_none_far_above_it_tried(sizes: list[int]) -> None:
    for limit in range(sizes[-1] + 2):
        tried: list[int] = []

        def fits(size: int, limit: int = limit, tried: list[int] = tried) -> bool:
            tried.append(size)
            return size <= limit

        found = largest_that_fits(sizes, fits)
        assert found == max((size for size in sizes if size <= limit), default=None)
        assert len(tried) == len(set(tried)) <= 2 * len(sizes).bit_length() + 1
        assert sum(size > 2 * limit for size in tried) <= 1


def test_a_size_fits_if_its_plan_does() -> None:
    words = ["training.global_batch_size=64", "optimizer.lr_scaling=none"]
    config = load(overrides=[*SMALL, *words, "training.batch_size=auto", "training.device=cuda"])
    plan = small_plan(*words, "training.batch_size=16", "training.device=cuda")
    needed = sum(plan.memory(plan.stages[0]))
    assert fits_by_plan(config, 16, V, 1, needed / 0.88)
    assert not fits_by_plan(config, 16, V, 1, needed / 0.92)


def test_on_a_cpu_the_copy_of_a_checkpoint_counts() -> None:
    words = ["training.global_batch_size=64", "optimizer.lr_scaling=none", "training.device=cpu"]
    plan = small_plan(*words, "training.batch_size=16", "parallel.pipeline=2", "parallel.partition=[3, 2]")
    needed = sum(sum(plan.memory(stage)) + stage.weights + stage.optimizer for stage in plan.stages)
    assert fits_by_plan(plan.config, 16, V, 1, needed / 0.85)
    assert not fits_by_plan(plan.config, 16, V, 1, needed / 0.95)
