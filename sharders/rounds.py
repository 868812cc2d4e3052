"""Finalists meet in rounds: all are measured, then the better half again, until one is left.

Measuring is noisy, so the best of many was lucky, too. Whoever is far behind after one visit need
not be measured again: what is saved makes those that are close better known.
"""

import time
from collections.abc import Callable, Sequence

# What finalists are found to cost, by their numbers, with at least so many visits of each shard.
MeasureFinalists = Callable[[Sequence[int], int], Sequence[float]]


def best_by_rounds(
    count: int,
    measure: MeasureFinalists,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """The number of the finalist that is left, or that is ahead when the time is over.

    Each round has half the finalists of the one before and visits them twice as often, so that all
    rounds take equally long. One that would take longer than what is left is not begun; the first
    always is.
    """
    deadline = clock() + seconds
    left, visits = list(range(count)), 1
    while len(left) > 1:
        began = clock()
        costs = dict(zip(left, measure(left, visits), strict=True))
        left.sort(key=costs.__getitem__)
        ended = clock()
        if ended + (ended - began) > deadline:
            break
        left = left[: (len(left) + 1) // 2]
        visits = 2 * visits + 1  # in all: what earlier rounds have measured counts
    return left[0]
