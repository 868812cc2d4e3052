"""How well a median is known, and what a cost is worth that several visits have found."""

from collections.abc import Sequence
from functools import lru_cache
from math import comb
from statistics import NormalDist, median

import numpy as np

MIN_FOR_INTERVAL = 9  # from here on the extremes may be left out of a 95 % interval
# Of the sizes of normal values, in deviations: medians do not feel the few that are far off.
NORMAL_MEDIAN = NormalDist().inv_cdf(0.75)
_QUIET_QUANTILE = 0.1
UNKNOWN = 1.0  # the error of a cost of which nothing is known: as large as itself


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the median, from order statistics; of few values it is narrower."""
    ordered = sorted(values)
    cut = _interval_cut(len(ordered))
    return ordered[cut], ordered[-1 - cut]


def median_spread(values: Sequence[float]) -> float:
    """Relative half width of the 95 % interval of the median."""
    low, high = median_interval(values)
    return (high - low) / 2 / median(values)


def standard_error(spread: float, count: int) -> float:
    """Of a median of `count` values whose interval is so wide, as far as a normal law holds."""
    if count < 2:
        return UNKNOWN
    covered = 1 - 2 * sum(comb(count, k) for k in range(_interval_cut(count) + 1)) / 2**count
    return spread / NormalDist().inv_cdf((1 + covered) / 2)


def pooled_variance(groups: Sequence[Sequence[float]], prior: float, weight: float) -> float:
    """The variance within groups of values, all groups taken to have the same.

    `prior` is what it is taken to be without data, and counts as much as `weight` values.
    """
    squares, freedom = prior * weight, weight
    for group in groups:
        mean = sum(group) / len(group)
        squares += sum((value - mean) ** 2 for value in group)
        freedom += len(group) - 1
    return squares / freedom


def uncontended_level(times_ms: Sequence[float]) -> float:
    """Returns what a repeated piece of work takes when nobody disturbs it: a low quantile, for some
    values are luck, and all others only ever too high.
    """
    return float(np.quantile(times_ms, _QUIET_QUANTILE))


@lru_cache(maxsize=1024)
def _interval_cut(count: int) -> int:
    """How many of the lowest and of the highest values lie outside the 95 % interval."""
    outside, cut = 0.0, 0
    while True:
        outside += 2 * comb(count, cut) / 2**count
        if outside > 0.05:
            return max(0, cut - 1)
        cut += 1
