"""At most two points per pixel, which are its extremes."""

import math
import random

from hvd_transformer.service.runs.metrics.pixels import reduce


def test_each_pixel_has_its_smallest_and_its_largest_value_in_order() -> None:
    draw = random.Random(1)
    xs = sorted(draw.random() for _ in range(5000))
    ys = [draw.random() for _ in xs]
    points = reduce(xs, ys, 0.0, 1.0, 100, 5000)
    assert points.x == sorted(points.x)
    for pixel in range(100):
        own = {(x, y) for x, y in zip(xs, ys, strict=True) if pixel <= 100 * x < pixel + 1}
        shown = {(x, y) for x, y in zip(points.x, points.y, strict=True) if pixel <= 100 * x < pixel + 1}
        assert shown == {min(own, key=lambda point: point[1]), max(own, key=lambda point: point[1])}


def test_gaps_are_shown_where_there_is_nothing_else() -> None:
    points = reduce([0, 1, 2, 3, 3.1], [1, math.nan, 2, 3, math.nan], 0, 4, 4, 5)
    assert (points.x, points.y) == ([0, 1, 2, 3], [1, None, 2, 3])


def test_the_last_point_is_in_the_last_pixel() -> None:
    assert reduce([1, 2], [5, 6], 1, 2, 1, 2).y == [5, 6]
    assert reduce([1, 2, 3], [5, 6, 7], 1, 3, 1, 3).y == [5, 7]


def test_a_curve_without_an_extent() -> None:
    assert reduce([7, 7], [1, 2], 7, 7, 800, 2) == ([7, 7], [1, 2], 2)
    assert reduce([], [], 0, 1, 800, 0) == ([], [], 0)
