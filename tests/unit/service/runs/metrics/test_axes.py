"""Steps against seconds, samples and tokens, against sums over all lines."""

import math
import random

import pytest
from made_runs import training

from hvd_transformer.service.runs.metrics.axes import Axes


def _lines(count: int) -> list[dict[str, float]]:
    """Lines at irregular steps, with a speed that changes."""
    draw, step, rows = random.Random(1), 0, []
    for _ in range(count):
        step += draw.randint(1, 20)
        speed = {"milliseconds_per_step": draw.uniform(10, 20), "tokens_per_second": draw.uniform(100, 200)}
        rows.append({"step": step, "samples": 8 * step, **speed})
    return rows


def test_are_the_sums_over_the_lines() -> None:
    rows = _lines(160)
    axes = Axes()
    for start in range(0, 160, 7):
        axes.add(rows[start : start + 7])
    seconds = tokens = before = 0.0
    for number, row in enumerate(rows, start=1):
        own = (row["step"] - before) * row["milliseconds_per_step"] / 1000
        seconds, tokens, before = seconds + own, tokens + own * row["tokens_per_second"], row["step"]
        if number % 16 == 0:
            assert axes.of_steps("seconds", [before]) == pytest.approx([seconds])
            assert axes.of_steps("tokens", [before]) == pytest.approx([tokens])


def test_samples_are_exact_between_the_points_of_the_table() -> None:
    axes = Axes()
    axes.add(training(range(10, 1000, 10)))
    assert axes.of_steps("samples", [10, 333, 990]) == [80, 8 * 333, 7920]


def test_what_comes_after_the_last_line_belongs_to_it() -> None:
    axes = Axes()
    axes.add(training([10, 20]))
    axes.add([{"step": 25, "valid_loss": 1}])
    assert axes.of_steps("seconds", [20, 25]) == pytest.approx([2.0, 2.0])
    assert axes.step_of("seconds", 2.5, last=True) == math.inf


def test_places_and_steps_are_each_others_inverse() -> None:
    axes = Axes()
    axes.add(_lines(1000))
    steps = [17.0, 450.0, 4711.0]
    for axis in ("seconds", "samples", "tokens"):
        places = axes.of_steps(axis, steps)
        assert [axes.step_of(axis, place) for place in places] == pytest.approx(steps)


def test_lines_without_speed_or_samples_do_no_harm() -> None:
    axes = Axes()
    axes.add([{"step": 1, "samples": None}, {"step": 2, "milliseconds_per_step": -5, "samples": 3}, {"step": 2}])
    assert axes.of_steps("seconds", [0, 1, 2, 3]) == [0, 0, 0, 0]
    assert axes.of_steps("samples", [2]) == [3]
    assert axes.step_of("seconds", 0.0) == 0.0
