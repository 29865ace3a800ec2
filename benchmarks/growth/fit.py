"""T = a + b·nᵏ through measured points, with a and b at least 0, and how well k is known.

For each k on a grid, a and b are those of weighted least squares. The interval holds every k whose sum of squares is
near that of the best (profile likelihood, 95 %).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# A cost may grow with n to this power.
LIMIT = 1.15
LEAST_SIZES = 4  # one more than there are parameters
_GRID = np.arange(0.0, 4.005, 0.01)
# Of a size's measurements, what all repetitions have in common: caches, memory layout, the machine's state.
_COMMON_NOISE = 0.03
# Student's t, two-sided 95 %, by the points that are left after three parameters; with more hardly less.
_STUDENT = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45}


@dataclass(frozen=True)
class Point:
    """Repeated measurements at size `n`.

    `scale`: what their noise is proportional to, such as the whole of which they are a small part; None: themselves.
    """

    n: float
    values: Sequence[float]
    scale: float | None = None

    @property
    def median(self) -> float:
        return float(np.median(self.values))

    @property
    def noisy(self) -> float:
        """What the noise is proportional to."""
        return self.median if self.scale is None else self.scale


@dataclass(frozen=True)
class Growth:
    """The best a, b and k, and the lowest and highest k that the points allow."""

    a: float
    b: float
    k: float
    low: float
    high: float
    is_flat: bool  # b·nᵏ is not seen above the noise

    @property
    def too_fast(self) -> bool:
        """Whether even the lowest k is above the limit."""
        return self.low > LIMIT and not self.is_flat


def fit(points: Sequence[Point]) -> Growth:
    """Needs at least `LEAST_SIZES` points."""
    assert len(points) >= LEAST_SIZES
    sizes, values = np.array([point.n for point in points]), np.array([point.median for point in points])
    sigmas = _sigmas(points)
    a, b, squares = _least_squares(sizes / sizes.max(), values, sigmas)
    best = int(squares.argmin())
    # Points off every such curve by more than their noise say that the noise is larger.
    left = len(points) - 3
    excess = max(1.0, squares[best] / left)
    allowed = _GRID[squares <= squares[best] + _STUDENT[min(left, 6)] ** 2 * excess]
    growing = b[best] * (1 - (sizes.min() / sizes.max()) ** _GRID[best])  # from the smallest size to the largest
    is_flat = bool(allowed[0] == 0 or growing <= 3 * float(np.median(sigmas)) * excess**0.5)
    scaled = b[best] / sizes.max() ** _GRID[best]
    return Growth(float(a[best]), float(scaled), float(_GRID[best]), float(allowed[0]), float(allowed[-1]), is_flat)


def _sigmas(points: Sequence[Point]) -> Floats:
    """The noise of each median. What the repetitions show of it is taken to be the same share of every point's scale:
    a few repetitions say little of their own size, those of all sizes enough."""
    scales = np.array([abs(point.noisy) for point in points])
    scales = np.maximum(scales, 1e-3 * scales.max() or 1.0)
    off = [
        abs(value - point.median) / scale for point, scale in zip(points, scales, strict=True) for value in point.values
    ]
    number = min(len(point.values) for point in points)
    # 1.48: from the median of the deviations to a normal deviation; 1.25: of a median, not of a mean.
    repeated = 1.48 * 1.25 * float(np.median(off)) / (number - 1) ** 0.5 if number > 1 else 0.0
    return scales * float(np.hypot(_COMMON_NOISE, repeated))


def _least_squares(sizes: Floats, values: Floats, sigmas: Floats) -> tuple[Floats, Floats, Floats]:
    """a, b ≥ 0 and the weighted sum of squares of values - (a + b·sizesᵏ), for each k of the grid."""
    weights = sigmas**-2
    powers = sizes ** _GRID[:, None]  # [k, sizes]
    one, p, pp = weights.sum(), powers @ weights, powers**2 @ weights
    y, py = weights @ values, powers @ (weights * values)
    zero, constant = np.zeros_like(p), np.full_like(p, max(0.0, y / one))
    determinant = one * pp - p**2
    determinant[determinant < 1e-12 * one * pp] = np.nan  # k = 0: two constants
    both = (pp * y - p * py) / determinant, (one * py - p * y) / determinant
    a, b, squares = constant, zero, _squares(powers, values, weights, constant, zero)
    for new_a, new_b in (both, (zero, np.maximum(0.0, py / pp))):
        found = _squares(powers, values, weights, new_a, new_b)
        better = (new_a >= 0) & (new_b >= 0) & (found < squares)
        a, b, squares = np.where(better, new_a, a), np.where(better, new_b, b), np.where(better, found, squares)
    return a, b, squares


def _squares(powers: Floats, values: Floats, weights: Floats, a: Floats, b: Floats) -> Floats:
    off: Floats = values - a[:, None] - b[:, None] * powers
    found: Floats = off**2 @ weights
    return found
