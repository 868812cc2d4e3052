"""How much of the cache is cleared between two iterations of a shard, as found out on the device.

In training the rest of the model puts a shard's rows out of the cache. Reading as much as the cache
holds does the same. Where the cache is huge that takes longer than most iterations, and often it
is not needed: other shards that take turns put the rows out as well, or other tenants have most of
the cache. So both are tried, and a short clearing is enough from when costs after it are known to
agree with those after a thorough one.
"""

import math
from collections.abc import Sequence

import numpy as np

_SHORT_SHARE = 0.1  # of a round's time: a short clearing takes so much
_PROBE_EVERY = 3  # rounds: one short clearing among thorough ones
_CHECK_SHARE = 0.05  # of all time: thorough clearings among short ones take so much
# With fewer by turns there is little that would do a clearing's work: then all are thorough.
_MANY = 4
_AGREE = 0.015  # costs that differ by less, less than visits do by themselves
_KEPT = 0.95  # weight of what was found before, from visit to visit: neighbours come and go


class Clearing:
    """What a device has learned of it."""

    def __init__(self) -> None:
        self._sum = self._weight = 0.0  # of log ratios, short over thorough
        self._squares = self._freedom = 0.0  # within either kind
        self._thorough_until = 0.0  # seconds on the stopwatch's clock
        self.short_will_do = False

    def most_ms(self, round_number: int, by_turns: int, round_ms: float, now: float) -> float:
        """What clearing may take before this round of so many shards, that takes so long."""
        if by_turns < _MANY:
            return math.inf
        if self.short_will_do:
            short = now < self._thorough_until
        else:
            short = round_number % _PROBE_EVERY == _PROBE_EVERY - 1
        return _SHORT_SHARE * round_ms if short else math.inf

    def was_thorough(self, took_s: float, now: float) -> None:
        """A thorough clearing is over: the next one must wait until its share of time is so low."""
        self._thorough_until = now + took_s / _CHECK_SHARE

    def learn(self, pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> None:
        """Costs of each shard of a visit, after short and after thorough clearings."""
        logs = [(np.log(short), np.log(thorough)) for short, thorough in pairs]
        logs = [(short, thorough) for short, thorough in logs if len(short) and len(thorough)]
        if not logs:
            return
        for total in ("_sum", "_weight", "_squares", "_freedom"):
            setattr(self, total, _KEPT * getattr(self, total))
        for short, thorough in logs:
            weight = len(short) * len(thorough) / (len(short) + len(thorough))
            self._sum += weight * float(short.mean() - thorough.mean())
            self._weight += weight
            self._squares += float(len(short) * short.var() + len(thorough) * thorough.var())
            self._freedom += len(short) + len(thorough) - 2
        if self._freedom > 0:
            error = math.sqrt(self._squares / self._freedom / self._weight)
            self.short_will_do = abs(self._sum / self._weight) + 2 * error < _AGREE
