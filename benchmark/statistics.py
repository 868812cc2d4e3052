"""How well a median is known."""

from collections.abc import Sequence
from functools import lru_cache
from math import comb
from statistics import median

FEWEST_FOR_INTERVAL = 9  # from here on the extremes may be left out of a 95 % interval


def median_spread(values: Sequence[float]) -> float:
    """Relative half width of the 95 % interval of the median, from order statistics."""
    ordered = sorted(values)
    cut = _interval_cut(len(ordered))
    return (ordered[-1 - cut] - ordered[cut]) / 2 / median(ordered)


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


@lru_cache(maxsize=1024)
def _interval_cut(count: int) -> int:
    """How many of the lowest and of the highest values lie outside the 95 % interval."""
    outside, cut = 0.0, 0
    while True:
        outside += 2 * comb(count, cut) / 2**count
        if outside > 0.05 or cut >= count // 2:
            return cut
        cut += 1
