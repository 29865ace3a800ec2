"""The fit of benchmarks.growth finds the exponent of known curves, and fails none that is straight."""

from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.growth.fit import Point, fit

SIZES = (4, 8, 16, 24, 32, 48, 64)
CURVES = {
    1: lambda n: 1 + 0.1 * n,
    2: lambda n: 1 + 0.01 * n**2,
    3: lambda n: 0.3 + 1e-3 * n**3,
}


def points(curve: Callable[[float], float], noise: float, seed: int = 0) -> list[Point]:
    """Three times at each size; a busy machine only ever makes it longer."""
    generator = np.random.default_rng(seed)
    return [Point(n, [curve(n) * (1 + noise * abs(generator.normal())) for _ in range(3)]) for n in SIZES]


@pytest.mark.parametrize("k", CURVES)
def test_a_curve_without_noise(k: int) -> None:
    found = fit(points(CURVES[k], noise=0))
    assert found.k == pytest.approx(k, abs=0.011)
    assert found.a == pytest.approx(CURVES[k](0), rel=0.1)
    assert found.a + found.b * 64**found.k == pytest.approx(CURVES[k](64), rel=0.01)
    assert found.low <= k <= found.high
    assert found.too_fast == (k > 1)


@pytest.mark.parametrize("noise", [0.02, 0.15])
@pytest.mark.parametrize("k", CURVES)
def test_curves_with_noise(k: int, noise: float) -> None:
    found = [fit(points(CURVES[k], noise, seed)) for seed in range(100)]
    assert sum(one.too_fast for one in found) == (100 if k > 1 else 0)
    assert sum(one.low <= k <= one.high for one in found) >= 90


@pytest.mark.parametrize("noise", [0, 0.02, 0.15])
def test_a_constant_does_not_grow(noise: float) -> None:
    found = [fit(points(lambda n: 2.0, noise, seed)) for seed in range(100)]
    assert sum(one.is_flat for one in found) >= 95
    assert not any(one.too_fast for one in found)


def test_what_shrinks_does_not_grow() -> None:
    assert fit(points(lambda n: 3 + 10 / n, noise=0.02)).is_flat


def test_a_growth_that_is_lost_in_the_noise_of_a_constant_passes() -> None:
    assert fit(points(lambda n: 10 + 1e-4 * n**2, noise=0.02)).is_flat


def test_a_difference_is_as_noisy_as_the_whole_it_comes_from() -> None:
    differences = [Point(n, [1e-6 * n**2]) for n in SIZES]
    assert fit(differences).too_fast
    assert fit([Point(one.n, one.values, scale=0.1) for one in differences]).is_flat
