"""At most two points per pixel, which are its extremes."""

import math
import random
from array import array
from collections.abc import Sequence

from hvd_transformer.service.runs.metrics.metrics_rows import Column
from hvd_transformer.service.runs.metrics.pixels import reduce
from hvd_transformer.service.runs.metrics.pyramid import Extremes


def _column(steps: Sequence[float], values: Sequence[float]) -> Column:
    return Column(array("d", steps), array("d", values))


def _every(steps: Sequence[float], values: Sequence[float]) -> Extremes:
    """Chunks of one point each."""
    return Extremes(_column(steps, values), _column(steps, values))


def test_each_pixel_has_its_smallest_and_its_largest_value_in_order() -> None:
    draw = random.Random(1)
    steps = sorted(draw.random() for _ in range(5000))
    values = [draw.random() for _ in steps]
    points = reduce(_every(steps, values), [pixel / 100 for pixel in range(1, 100)])
    assert points == sorted(points)
    for pixel in range(100):
        own = [(x, y) for x, y in zip(steps, values, strict=True) if pixel <= 100 * x < pixel + 1]
        shown = [(x, y) for x, y in points if pixel <= 100 * x < pixel + 1]
        assert set(shown) == {min(own, key=lambda point: point[1]), max(own, key=lambda point: point[1])}
        assert len(shown) <= 2


def test_the_smallest_and_the_largest_value_of_chunks_may_be_in_different_pixels() -> None:
    chunks = Extremes(_column([0, 6, 7], [1, 2, 3]), _column([4, 5, 9], [9, 8, 7]))
    assert reduce(chunks, [5]) == [(0, 1), (4, 9), (5, 8), (6, 2)]
    assert reduce(chunks, []) == [(0, 1), (4, 9)]
    assert reduce(chunks, [8]) == [(0, 1), (4, 9), (9, 7)]


def test_a_point_that_is_both_is_shown_once() -> None:
    assert reduce(_every([1, 2], [5, 5]), [2]) == [(1, 5), (2, 5)]


def test_two_values_of_one_step_are_both_shown() -> None:
    assert reduce(_every([7, 7], [2, 1]), [7, 7, 7]) == [(7, 1), (7, 2)]


def test_gaps_are_shown_where_there_is_nothing_else() -> None:
    points = reduce(_every([0, 1, 2, 3, 3.1], [1, math.nan, 2, 3, math.nan]), [1, 2, 3])
    assert [(x, None if math.isnan(y) else y) for x, y in points] == [(0, 1), (1, None), (2, 2), (3, 3)]


def test_there_may_be_nothing() -> None:
    assert reduce(_every([], []), [1, 2, 3]) == []
