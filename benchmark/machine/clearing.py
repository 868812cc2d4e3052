"""Decides how much of the cache is cleared between two iterations of a shard.

In training, the rest of the model evicts a shard's rows from the cache. Reading as much as the
cache holds does the same. With a huge cache that takes longer than most iterations, and often it is
not needed: interleaved shards evict the rows as well, or other tenants fill most of the cache. So
the first measurement alternates between thorough and short clearings. If costs agree, clearings are
short from then on, with a few thorough ones as a check. Otherwise all are thorough, and of the
first measurement only iterations after a thorough one count.
"""

import math
from collections.abc import Sequence

import numpy as np

_SHORT_SHARE = 0.4  # time of a short clearing, as a share of an iteration's
_CHECK_SHARE = 0.03  # share of all time for thorough clearings among short ones
_PROBE_EVERY = 8  # rounds with a thorough clearing before a short one checks for a change
_MANY = 4  # interleaved shards: fewer evict little from the cache
_AGREE = 0.015  # relative difference of costs that agree: less than between repeat measurements
_KEPT = 0.95  # weight of older results per measurement, because other tenants change


class Clearing:
    """Calibration of cache clearing on a device, for many interleaved shards and for few."""

    def __init__(self) -> None:
        self._learned = {False: _Learned(), True: _Learned()}
        self._thorough_until = 0.0  # seconds on the stopwatch's clock

    def short_suffices(self, num_interleaved: int) -> bool:
        """Returns whether costs after short clearings are accurate, as far as is known."""
        return self._learned[num_interleaved >= _MANY].agree

    def max_ms(self, number: int, num_interleaved: int, iteration_ms: float, now: float) -> float:
        """Returns the time limit of the clearing before this round.

        Args:
            number: Number of the round.
            num_interleaved: Number of interleaved shards.
            iteration_ms: Mean time of an iteration.
            now: Seconds on the stopwatch's clock.
        """
        learned = self._learned[num_interleaved >= _MANY]
        if not learned.is_known:
            short = number % 2 == 1
        elif learned.agree:
            short = now < self._thorough_until
        else:
            short = number % _PROBE_EVERY == _PROBE_EVERY - 1
        return _SHORT_SHARE * iteration_ms if short else math.inf

    def note_thorough(self, took_s: float, now: float) -> None:
        """Notes a thorough clearing: the next one waits until their share of time is low enough."""
        self._thorough_until = now + took_s / _CHECK_SHARE

    def learn(
        self, num_interleaved: int, pairs: Sequence[tuple[Sequence[float], Sequence[float]]]
    ) -> None:
        """Learns from the costs of each shard after short and after thorough clearings."""
        self._learned[num_interleaved >= _MANY].take(pairs)


class _Learned:
    """Tests whether costs after short clearings agree with those after thorough ones."""

    def __init__(self) -> None:
        self._sum = self._weight = 0.0  # weighted sum of log ratios, short over thorough
        self._squares = self._freedom = 0.0  # within either kind
        self.agree = True
        self.is_known = False

    def take(self, pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> None:
        logs = [(np.log(short), np.log(thorough)) for short, thorough in pairs]
        logs = [(short, thorough) for short, thorough in logs if len(short) and len(thorough)]
        if not logs:
            return
        self._sum, self._weight = _KEPT * self._sum, _KEPT * self._weight
        self._squares, self._freedom = _KEPT * self._squares, _KEPT * self._freedom
        for short, thorough in logs:
            weight = len(short) * len(thorough) / (len(short) + len(thorough))
            self._sum += weight * float(short.mean() - thorough.mean())
            self._weight += weight
            self._squares += float(len(short) * short.var() + len(thorough) * thorough.var())
            self._freedom += len(short) + len(thorough) - 2
        if self._freedom > 0:
            self.is_known = True
            difference = abs(self._sum / self._weight)
            error = math.sqrt(self._squares / self._freedom / self._weight)
            # Without significance in either direction the decision stays.
            if difference - 2 * error > _AGREE:
                self.agree = False
            elif difference + 2 * error < _AGREE:
                self.agree = True
