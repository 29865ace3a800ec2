"""How sure a median is: the bootstrap interval."""

from collections.abc import Sequence

import numpy as np

_RESAMPLES, _SEED = 10_000, 0


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """The percentile bootstrap interval of the median (Efron and Tibshirani 1993, section 13.3).

    The same values give the same interval. Each end is one of the medians that were drawn, none in between.
    """
    draws = np.random.default_rng(_SEED).choice(np.asarray(values), (_RESAMPLES, len(values)))
    tail = (1 - confidence) / 2
    low, high = np.quantile(np.median(draws, axis=1), [tail, 1 - tail], method="inverted_cdf")
    return float(low), float(high)
