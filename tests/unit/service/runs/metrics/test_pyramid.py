"""Minima and maxima at every resolution, against looking at all points."""

import math
import random
from array import array
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_transformer.service.runs.metrics import pyramid as module
from hvd_transformer.service.runs.metrics.pyramid import Point, Pyramid


def _fill(pyramid: Pyramid, steps: list[float], values: list[float], parts: list[int]) -> None:
    """Add the points in parts of these sizes, repeated."""
    start = number = 0
    while start < len(steps):
        stop = start + parts[number % len(parts)]
        pyramid.add(array("d", steps[start:stop]), array("d", values[start:stop]))
        start, number = stop, number + 1


def _points(pyramid: Pyramid, first: float, last: float, width: int) -> list[Point]:
    """The points of a view: the smallest ones, then the largest ones."""
    return [point for column in pyramid.view(first, last, width) for point in zip(*column, strict=True)]


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 700), st.lists(st.integers(1, 50), min_size=1, max_size=5), st.integers(0, 10**6))
def test_is_the_same_however_the_points_come(count: int, parts: list[int], seed: int) -> None:
    draw = random.Random(seed)
    steps = sorted(float(draw.randint(0, count)) for _ in range(count))
    values = [math.nan if draw.random() < 0.2 else draw.random() for _ in range(count)]
    whole, in_parts = Pyramid(), Pyramid()
    _fill(whole, steps, values, [count])
    _fill(in_parts, steps, values, parts)
    for width in (1, 4, 1000):
        assert repr(_points(whole, -1, count + 1, width)) == repr(_points(in_parts, -1, count + 1, width))


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 3000), st.lists(st.integers(1, 400), min_size=1, max_size=5), st.integers(0, 10**6))
def test_a_coarser_one_has_the_same_extremes(count: int, parts: list[int], seed: int) -> None:
    """Also where it has become coarser several times, while points came."""
    draw = random.Random(seed)
    steps = [float(step) for step in range(count)]
    values = [draw.random() for _ in range(count)]
    pyramid, start = Pyramid(), 0
    with patch.multiple(module, _LEAST_RAW=50, _LEAST_CHUNKS=8):
        while start < count:
            size = draw.choice(parts)
            _fill(pyramid, steps[start : start + size], values[start : start + size], [size])
            start += size
            if draw.random() < 0.3:
                before = pyramid.memory
                pyramid.coarsen()
                assert pyramid.memory <= before
    for width in (1, 4, 1000):
        points = _points(pyramid, -1, count, width)
        assert all(values[int(step)] == value for step, value in points)
        assert {min(values), max(values)} <= {value for _, value in points}
    low, high = pyramid.view(-1, count, 1000)
    assert list(low.steps) == sorted(low.steps) and list(high.steps) == sorted(high.steps)
    assert pyramid.num_points(-1, count) == count


def test_it_becomes_as_coarse_as_a_chart() -> None:
    pyramid = Pyramid()
    _fill(pyramid, [float(step) for step in range(200_000)], [1.0] * 200_000, [7000])
    sizes = [pyramid.memory]
    for _ in range(9):
        pyramid.coarsen()
        sizes.append(pyramid.memory)
    assert sizes[1] < 0.3 * sizes[0]
    assert 10_000 < sizes[-1] == sizes[-2] < 50_000
    few = Pyramid()
    _fill(few, [float(step) for step in range(4096)], [1.0] * 4096, [7000])
    few.coarsen()
    assert few.between(0, 5000) is not None


def test_every_level_has_the_extremes_in_order() -> None:
    draw = random.Random(1)
    count = 20_000
    values = [draw.gauss(0, 1) for _ in range(count)]
    values[12_345], values[777] = 1e6, -1e6
    pyramid = Pyramid()
    _fill(pyramid, [float(step) for step in range(count)], values, [1000])
    sizes = set()
    for width in (1, 10, 100, 1000):
        points = _points(pyramid, 0, count, width)
        assert (12_345, 1e6) in points
        assert (777, -1e6) in points
        assert all(column.steps == array("d", sorted(column.steps)) for column in pyramid.view(0, count, width))
        assert all(values[int(step)] == value for step, value in points)
        assert len(points) <= max(2 * 8 * width, 2 * 4)
        sizes.add(len(points))
    assert len(sizes) == 4


def test_a_view_of_a_part_has_its_extremes() -> None:
    draw = random.Random(2)
    values = [draw.random() for _ in range(50_000)]
    pyramid = Pyramid()
    _fill(pyramid, [float(step) for step in range(50_000)], values, [700])
    points = _points(pyramid, 10_000, 29_999, 50)
    assert all(10_000 <= step <= 29_999 for step, _ in points)
    # Chunks at the edges may have theirs outside.
    inner = values[10_500:29_500]
    assert {min(inner), max(inner)} <= {value for _, value in points}


def test_costs_what_the_view_has_pixels_not_what_the_curve_has_points(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    for count in (20_000, 320_000):
        pyramid = Pyramid()
        ramp = array("d", range(count))
        pyramid.add(ramp, ramp)
        looked.append(len(_points(pyramid, 0, count, 100)))
    assert max(looked) <= 2 * 8 * 100
    assert min(looked) >= 2 * 100


def test_points_of_one_step_with_different_values_are_both_there() -> None:
    pyramid = Pyramid()
    pyramid.add(array("d", [5, 5]), array("d", [1, 2]))
    assert _points(pyramid, 0, 9, 1) == [(5, 1), (5, 2)]


def test_all_points_are_kept_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_RAW", 100)
    pyramid = Pyramid()
    _fill(pyramid, [float(step) for step in range(100)], [0.0] * 100, [30])
    found = pyramid.between(10, 20)
    assert found is not None
    assert list(found.steps) == list(range(10, 21))
    assert pyramid.num_points(10, 20) == 11
    pyramid.add(array("d", [100]), array("d", [0]))
    assert pyramid.between(10, 20) is None
    assert pyramid.num_points(-1, 1000) == pyramid.count == 101
