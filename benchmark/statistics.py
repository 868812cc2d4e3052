"""Statistics of medians and of repeat measurements."""

import math
from collections.abc import Sequence
from functools import lru_cache
from math import comb
from statistics import NormalDist, fmean, median, stdev

import numpy as np

MIN_FOR_INTERVAL = 9  # values from which on a 95 % interval may exclude the extremes
NORMAL_MEDIAN = NormalDist().inv_cdf(0.75)  # median of absolute normal values, in deviations
_UNCONTENDED_QUANTILE = 0.1
UNKNOWN = 1.0  # relative error of a cost with unknown error


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns the 95 % interval of the median from order statistics; too narrow for few values."""
    ordered = sorted(values)
    cut = _interval_cut(len(ordered))
    return ordered[cut], ordered[-1 - cut]


def median_spread(values: Sequence[float]) -> float:
    """Returns the relative half width of the 95 % interval of the median."""
    low, high = median_interval(values)
    return (high - low) / 2 / median(values)


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns the 95 % interval of the mean of normal values; infinite for a single one."""
    count, center = len(values), fmean(values)
    if count < 2:
        return -math.inf, math.inf
    from scipy.special import stdtrit  # slow to load, and only needed here

    reach = float(stdtrit(count - 1, 0.975)) * stdev(values) / math.sqrt(count)
    return center - reach, center + reach


def standard_error(spread: float, count: int) -> float:
    """Returns the standard error of a median of `count` values by its interval, if normal."""
    if count < 2:
        return UNKNOWN
    covered = 1 - 2 * sum(comb(count, k) for k in range(_interval_cut(count) + 1)) / 2**count
    return spread / NormalDist().inv_cdf((1 + covered) / 2)


def pooled_variance(groups: Sequence[Sequence[float]], prior: float, weight: float) -> float:
    """Returns the variance within groups of values, assumed equal for all groups.

    `prior` is the variance without data, with the weight of `weight` values.
    """
    squares, freedom = prior * weight, weight
    for group in groups:
        mean = sum(group) / len(group)
        squares += sum((value - mean) ** 2 for value in group)
        freedom += len(group) - 1
    return squares / freedom


def uncontended_level(times_ms: Sequence[float]) -> float:
    """Returns the time of repeated work without disturbance: a low quantile.

    The minimum would be luck; other values are only ever too high.
    """
    return float(np.quantile(times_ms, _UNCONTENDED_QUANTILE))


@lru_cache(maxsize=1024)
def _interval_cut(count: int) -> int:
    """Returns how many of the lowest and of the highest values are outside the 95 % interval."""
    outside, cut = 0.0, 0
    while True:
        outside += 2 * comb(count, cut) / 2**count
        if outside > 0.05:
            return max(0, cut - 1)
        cut += 1
