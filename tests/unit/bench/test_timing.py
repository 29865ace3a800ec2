"""Statistics of repeated calls, and that ranks agree on them."""

import statistics

import pytest
import torch
from thread_world import make_worlds, on_ranks

from hvd_transformer.bench.timing import (
    LEAST,
    MOST,
    mean_over_ranks,
    rank_jitter,
    relative_deviation,
    repeats,
    slowest,
    warm_up,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("seconds", "estimate", "count"), [(1, 0.01, 100), (1, 2, LEAST), (1, 1e-9, MOST), (1, 0, MOST), (10, 1.1, 9)]
)
def test_repeats_fit_into_the_time_within_limits(seconds: float, estimate: float, count: int) -> None:
    assert repeats(seconds, estimate) == count


def test_the_slowest_rank_of_each_repeat_counts_and_all_ranks_know_it() -> None:
    times = [[1.0, 5.0, 2.0], [3.0, 4.0, 1.0], [2.0, 4.5, 3.0]]
    worlds = make_worlds(3)
    assert on_ranks(worlds, lambda world: slowest(world, times[world.rank])) == [[3.0, 5.0, 3.0]] * 3
    assert on_ranks(worlds, lambda world: mean_over_ranks(world, world.rank)) == [1.0] * 3


def test_all_ranks_get_the_same_estimate_after_one_unmeasured_call() -> None:
    calls = [0, 0]

    def call(world):
        def action() -> None:
            calls[world.rank] += 1

        return warm_up(world, action, CPU)

    estimates = on_ranks(make_worlds(2), call)
    assert estimates[0] == estimates[1] > 0
    assert calls == [2, 2]


def test_relative_deviation() -> None:
    values = [1.0, 2.0, 4.0, 5.0]
    assert relative_deviation(values) == pytest.approx(statistics.pstdev(values) / 3)
    assert relative_deviation([2.0, 2.0]) == 0


@pytest.mark.parametrize("size", [2, 4])
def test_jitter_is_what_ranks_wait_for_each_other_not_the_pace_of_them_all(size: int) -> None:
    generator = torch.Generator().manual_seed(1)
    pace = 1 + torch.rand(2000, generator=generator, dtype=torch.float64)  # of the whole machine
    own = 1 + 0.05 * torch.randn(size, 2000, generator=generator, dtype=torch.float64)
    worlds = make_worlds(size)

    def jitter(steps: torch.Tensor) -> list[float]:
        return on_ranks(worlds, lambda world: rank_jitter(world, (pace * steps[world.rank]).tolist()))

    found = jitter(own)
    assert found == [found[0]] * size and found[0] == pytest.approx(
        0.05, rel=0.25
    )  # by medians: of two ranks a little less
    assert jitter(torch.ones_like(own)) == pytest.approx([0.0] * size)
    assert relative_deviation((pace * own[0]).tolist()) > 0.15
