"""Predicts the remaining measuring time from the first answers, and measures within a budget.

Counting answers would mislead: shards differ a hundredfold in work, devices answer for several at a
time, and devices differ too. The time of a shard is therefore predicted from its tables and
lookups. A device's pace follows from the time of its shards and from its duty, the share of its
time inside operators. The first answers of a device do not count for its duty once there are more,
because it then starts and calibrates how it clears its cache.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from scipy import optimize

from autoshard.benchmark import BenchmarkPool, Measurement, MeasureSettings, TimingOptions
from autoshard.benchmark.pool.jobs import MAX_INTERLEAVED
from autoshard.experiments.console.budget import Budget
from autoshard.workload import Shard
from autoshard.workload.access.reuse import spectrum_of
from autoshard.workload.arrays import Floats

Device = tuple[str, str]  # its node and name

# Measured shards before the first prediction. Single shards deviate by two thirds from their
# prediction, so the total of this many deviates by 13 %.
FEWEST_ANSWERS = 32
# Answers of one batch come together. A pause longer than this share of the device's first answer
# time separates batches.
_PAUSE = 0.1
_PATIENCE = 4.0  # times the median first answer time; slower devices are not awaited
_TERMS = 4
_RIDGE = 1e-6  # regularisation, relative to the trace: few answers do not determine all terms
# With a budget, shards are requested in portions: at first this many per device, then at most this
# many times as many, and only what is predicted to fit into this share of the remaining time.
_FIRST_PORTION, _GROWTH, _FITTING = 4, 3, 0.7


class _Worker:
    """A device, its answers so far, and their times in seconds from the start.

    Args:
        first_s: Time of its first answer.
    """

    def __init__(self, first_s: float) -> None:
        self.first_s = self.latest_s = first_s
        self._work, self._spent_s = np.zeros(_TERMS), 0.0  # sums of terms, seconds in operators
        self._going = 0  # answers of this batch
        self._busy_s, self._since_s = 0.0, 0.0  # time in operators, and the time since it is summed
        self._first_duty: float | None = None  # share of time in operators, in its first batch
        self._later_duty: float | None = None  # and in later ones

    def take(self, terms: Floats, spent_s: float, now_s: float) -> None:
        """Adds an answer, with the seconds spent in its operator."""
        if now_s - self.latest_s > _PAUSE * self.first_s:
            self.end_batch()
        self._work = self._work + terms
        self._spent_s += spent_s
        self._busy_s += spent_s
        self._going += 1
        self.latest_s = now_s
        if self._going == MAX_INTERLEAVED:
            self.end_batch()

    def end_batch(self) -> None:
        """Ends the current batch of answers, and updates the duty."""
        if not self._going:
            return
        self._going = 0
        duty = self._busy_s / max(self.latest_s - self._since_s, 1e-9)
        if self._first_duty is None:
            self._first_duty = duty
            self._busy_s, self._since_s = 0.0, self.latest_s
        else:
            self._later_duty = duty

    @property
    def gain(self) -> float | None:
        """Duty of later batches over that of the first one; None before a second batch."""
        if self._later_duty is None or not self._first_duty:
            return None
        return self._later_duty / self._first_duty

    def pace(self, prices: Floats, usual_gain: float) -> float | None:
        """Returns its work per second, in predicted seconds of an average device.

        Returns None before its first batch is over.
        """
        if self._first_duty is None:
            return None
        duty = self._later_duty or usual_gain * self._first_duty
        return duty * float(self._work @ prices) / max(self._spent_s, 1e-9)


class Pace:
    """Predicts the remaining measuring time from the answers so far.

    Args:
        shards: Requested shards.
        batch_size: Samples of a batch.
        devices: Number of measuring devices.
        clock: Returns the current time, in seconds.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        batch_size: int,
        devices: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._terms = _terms(shards, batch_size)
        self._waiting = np.ones(len(shards), bool)
        self._left: Floats = self._terms.sum(axis=0)  # sums over waiting shards
        self.devices = devices
        self._clock = clock
        self._began = clock()
        self._answers = 0
        # Sums over measured shards that determine a least-squares fit.
        self._squares, self._moments = np.zeros((_TERMS, _TERMS)), np.zeros(_TERMS)
        self._workers: dict[Device, _Worker] = {}

    @property
    def passed_s(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._began

    def take(self, number: int, answer: Measurement) -> None:
        """Adds an answer for the shard of this number."""
        terms: Floats = self._terms[number]
        self._left = self._left - terms * self._waiting[number]
        self._waiting[number] = False
        if answer.reused or answer.timing is None:
            return
        self._answers += 1
        self._squares += np.outer(terms, terms)
        self._moments += terms * answer.timing.operator_seconds
        now_s, device = self.passed_s, (answer.node, answer.device)
        self._workers.setdefault(device, _Worker(now_s)).take(
            terms, answer.timing.operator_seconds, now_s
        )

    def left_s(self) -> float | None:
        """Returns the predicted remaining seconds; None while too little is known."""
        if not self._knows:
            return None
        prices, now_s = self._prices(), self.passed_s
        under_way = sum(
            min(pace * (now_s - worker.latest_s), self._at_once(prices))
            for worker, pace in self._paces(prices).items()
        )
        left = float(self._left @ prices) - under_way
        return max(0.0, left) / self._pace(prices)

    def fitting(self, max_shards: int, seconds: float) -> list[int]:
        """Returns the numbers of the next shards that can be measured within a number of seconds.

        Assumes that no others are under way. Before the first answer, returns `max_shards`.
        """
        waiting = np.flatnonzero(self._waiting)[:max_shards]
        if self._answers:
            for worker in self._workers.values():
                worker.end_batch()
            prices = self._prices()
            work = np.cumsum(self._terms[waiting] @ prices)
            waiting = waiting[work <= seconds * self._pace(prices)]
        return [int(number) for number in waiting]

    @property
    def _knows(self) -> bool:
        """Whether the answers suffice for a prediction."""
        under_way = sum(worker.gain is not None for worker in self._workers.values())
        if self._answers < FEWEST_ANSWERS or 2 * under_way < len(self._workers):
            return False
        silent = [math.inf] * (self.devices - len(self._workers))
        usual = statistics.median_low([*(w.first_s for w in self._workers.values()), *silent])
        return not silent or self.passed_s > _PATIENCE * usual

    def _prices(self) -> Floats:
        """Returns the non-negative price of each term, in seconds of an average device."""
        squares = self._squares + _RIDGE * np.trace(self._squares) * np.eye(_TERMS)
        factor = np.linalg.cholesky(squares)
        found, _ = optimize.nnls(factor.T, np.linalg.solve(factor, self._moments))
        return np.asarray(found)

    @property
    def _usual_gain(self) -> float:
        gains = [gain for worker in self._workers.values() if (gain := worker.gain) is not None]
        return statistics.median(gains) if gains else 1.0

    def _paces(self, prices: Floats) -> dict[_Worker, float]:
        """Returns the pace of each device with a whole batch.

        A device with one batch is assumed to gain as much as others did.
        """
        gain = self._usual_gain
        paces = {worker: worker.pace(prices, gain) for worker in self._workers.values()}
        return {worker: pace for worker, pace in paces.items() if pace is not None}

    def _pace(self, prices: Floats) -> float:
        """Returns the pace of all devices together.

        Devices without answers count as the others, but at most as fast as their silence allows.
        """
        paces = list(self._paces(prices).values())
        fastest = self._usual_gain * self._at_once(prices) / max(self.passed_s, 1e-9)
        silent = min(float(np.mean(paces)), fastest)
        return max(1e-9, sum(paces) + silent * max(0, self.devices - len(paces)))

    def _at_once(self, prices: Floats) -> float:
        """Returns the maximum work of a device in one batch."""
        return MAX_INTERLEAVED * float(self._terms.mean(axis=0) @ prices)


def stream_within(
    pool: BenchmarkPool,
    shards: Sequence[Shard],
    settings: MeasureSettings,
    pace: Pace,
    budget: Budget,
    timing: TimingOptions | None = None,
    retry_failed: bool = False,
) -> Iterator[tuple[int, Measurement]]:
    """Yields the answers of a pool's `stream` for as many of the first shards as the budget allows.

    Measurements under way at the time limit would be lost with a cluster that ends then. With a
    limit, only shards that are predicted to be done in time are therefore requested.
    """
    if not budget.is_limited:
        for number, answer in pool.stream(shards, settings, timing, retry_failed):
            pace.take(number, answer)
            yield number, answer
        return
    max_shards = _FIRST_PORTION * pace.devices
    while not budget.is_spent:
        portion = pace.fitting(max_shards, _FITTING * budget.left_s())
        if not portion:
            return
        max_shards = _GROWTH * len(portion)
        requested = [shards[number] for number in portion]
        for place, answer in pool.stream(requested, settings, timing, retry_failed):
            pace.take(portion[place], answer)
            yield portion[place], answer
            if budget.is_spent:
                return


def _terms(shards: Sequence[Shard], batch_size: int) -> Floats:
    """Returns the terms of each shard's measuring time, [shards, terms], relative to their means.

    Terms are a constant, the number of tables, the lookups times width, and the distinct rows times
    width.
    """
    terms = np.ones((len(shards), _TERMS))
    for number, shard in enumerate(shards):
        spectra = [(spectrum_of(p.table, batch_size), p.width) for p in shard.pieces]
        terms[number, 1:] = (
            len(shard),
            sum(spectrum.lookups * width for spectrum, width in spectra),
            sum(spectrum.distinct_rows * width for spectrum, width in spectra),
        )
    return terms / np.maximum(terms.mean(axis=0), 1e-9) if len(shards) else terms
