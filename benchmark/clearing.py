"""How much of the cache is cleared between two iterations of a shard, as found out on the device.

In training the rest of the model puts a shard's rows out of the cache. Reading as much as the cache
holds does the same. Where the cache is huge that takes longer than most iterations, and often it
is not needed: other shards that take turns put the rows out as well, or other tenants have most of
the cache. So the first visit clears by turns thoroughly and for a short time only. If costs agree,
short clearings do, and a few thorough ones show whether that stays so; else all are thorough, and
of the first visit's iterations only those count that followed a thorough one.
"""

import math
from collections.abc import Sequence

import numpy as np

_SHORT_SHARE = 0.4  # of an iteration's time, once a round: a short clearing takes so much
_CHECK_SHARE = 0.03  # of all time: thorough clearings among short ones take so much
_PROBE_EVERY = 8  # rounds: one short clearing among thorough ones, to see whether that has changed
_MANY = 4  # by turns: with fewer there is little that would do a clearing's work
_AGREE = 0.015  # costs that differ by less, less than visits do by themselves
_KEPT = 0.95  # weight of what was found before, from visit to visit: neighbours come and go


class Clearing:
    """What a device has learned of it, for shards beside many others and for those that are not."""

    def __init__(self) -> None:
        self._learned = {False: _Learned(), True: _Learned()}
        self._thorough_until = 0.0  # seconds on the stopwatch's clock

    def short_suffices(self, by_turns: int) -> bool:
        """True if costs after short clearings are as good, as far as is known."""
        return self._learned[by_turns >= _MANY].agree

    def max_ms(self, number: int, by_turns: int, iteration_ms: float, now: float) -> float:
        """What clearing may take before this round of so many shards, that take so long each."""
        learned = self._learned[by_turns >= _MANY]
        if not learned.is_known:
            short = number % 2 == 1
        elif learned.agree:
            short = now < self._thorough_until
        else:
            short = number % _PROBE_EVERY == _PROBE_EVERY - 1
        return _SHORT_SHARE * iteration_ms if short else math.inf

    def note_thorough(self, took_s: float, now: float) -> None:
        """A thorough clearing is over: the next one must wait until its share of time is so low."""
        self._thorough_until = now + took_s / _CHECK_SHARE

    def learn(
        self, by_turns: int, pairs: Sequence[tuple[Sequence[float], Sequence[float]]]
    ) -> None:
        """Costs of each shard of a visit, after short and after thorough clearings."""
        self._learned[by_turns >= _MANY].take(pairs)


class _Learned:
    """Whether costs after short clearings agree with those after thorough ones."""

    def __init__(self) -> None:
        self._sum = self._weight = 0.0  # of log ratios, short over thorough
        self._squares = self._freedom = 0.0  # within either kind
        self.agree = True
        self.is_known = False

    def take(self, pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> None:
        """Learn from the shards of a visit."""
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
            # Neither is believed before it is known: between the two it stays as it was.
            if difference - 2 * error > _AGREE:
                self.agree = False
            elif difference + 2 * error < _AGREE:
                self.agree = True
