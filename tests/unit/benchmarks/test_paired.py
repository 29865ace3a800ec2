"""Paired measurement: intervals against closed forms, losses that must agree, the best of several peers."""

import math
from itertools import pairwise

import pytest

from benchmarks.bootstrap import median_interval
from benchmarks.paired import LossesDiffer, Options, Result, Target, rounded


def exact_interval(num_values: int, confidence: float = 0.95) -> tuple[int, int]:
    """The ranks (from 0) of the bootstrap interval of the median of an odd number of distinct values.

    The median of a resample is at most the k-th smallest value where more than half of its draws are: a binomial tail.
    """
    half = num_values // 2 + 1

    def at_most(rank: int) -> float:
        share = (rank + 1) / num_values
        draws = range(half, num_values + 1)
        return sum(math.comb(num_values, k) * share**k * (1 - share) ** (num_values - k) for k in draws)

    tail = (1 - confidence) / 2
    ranks = range(num_values)
    return (
        next(rank for rank in ranks if at_most(rank) >= tail),
        next(rank for rank in ranks if at_most(rank) >= 1 - tail),
    )


@pytest.mark.parametrize("num_values", [1, 3, 5, 7, 9, 21])
def test_the_interval_of_a_median_is_the_bootstraps(num_values: int) -> None:
    values = [1.5 ** ((5 * place) % num_values) for place in range(num_values)]  # in no order
    low, high = exact_interval(num_values)
    assert median_interval(values) == (sorted(values)[low], sorted(values)[high])


def test_equal_values_have_no_spread_and_less_confidence_a_narrower_interval() -> None:
    assert median_interval([2.0] * 8) == (2.0, 2.0)
    values = [float(number) for number in range(21)]
    widths = [high - low for low, high in (median_interval(values, one) for one in (0.5, 0.8, 0.95, 0.99))]
    assert all(narrow < wide for narrow, wide in pairwise(widths))


def result(losses: dict[str, list[float]], trains: dict[str, str | None] | None = None) -> Result:
    rates = {"ours": [2.0, 3.0, 4.0], "slow": [1.0, 1.0, 9.0], "fast": [2.0, 2.0, 2.0]}
    return Result(Options(), rates, losses, dict.fromkeys(rates, 0.0), trains or dict.fromkeys(losses, "the same"))


def test_the_base_is_the_best_of_the_peers_by_its_median() -> None:
    ratio = result({}).ratio(Target(["ours"], ["slow", "fast"], 1.5))
    assert (ratio.name, ratio.rounds, ratio.median) == ("ours / fast", [1.0, 1.5, 2.0], 1.5)
    assert ratio.verdict == "≥ 1.50 met"
    assert result({}).ratio(Target(["ours"], "slow", 3.1)).verdict == "≥ 3.10 MISSED"
    assert result({}).ratio(Target(["ours"], "slow", None)).verdict == ""


def test_losses_agree() -> None:
    result({"ours": [2.0, 1.0], "fast": [2.0001, 0.99995]}).check_losses()


@pytest.mark.parametrize("wrong", [[2.0, 1.0003], [2.0, math.nan], [2.0, math.inf]])
def test_losses_that_differ_are_named(wrong: list[float]) -> None:
    with pytest.raises(LossesDiffer, match=r"end of block 2 differ: ours 1\.000000, fast"):
        result({"ours": [2.0, 1.0], "fast": wrong}).check_losses()


def test_only_those_are_compared_that_train_the_same() -> None:
    losses = {"ours": [2.0], "fast": [2.0], "alone": [3.0], "other": [3.0], "compressed": [9.0]}
    trains = {"ours": "the same", "fast": "the same", "alone": "alone", "other": "alone", "compressed": None}
    result(losses, trains).check_losses()
    with pytest.raises(LossesDiffer, match="alone"):
        result({**losses, "other": [3.1]}, trains).check_losses()


def test_figures_are_kept_to_five_digits() -> None:
    figures = {"rates": [12345.678, 0.000123456789], "rounds": 21, "idle": (math.inf, None), "name": "ours"}
    expected = {"rates": [12346.0, 0.00012346], "rounds": 21, "idle": [math.inf, None], "name": "ours"}
    assert rounded(figures) == expected
