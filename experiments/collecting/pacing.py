"""How long measuring will take, told from the first answers; and as much as a budget allows.

Counting answers would mislead: shards differ a hundredfold in work, devices answer for several at a
time, and devices differ too. So what a shard takes is predicted from its tables and lookups, and a
device's pace follows from what its shards took and from the share of its time that it spent in
them. What it answers first does not count for that share once there is more: then it starts, and
finds out how to clear its cache.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
from scipy import optimize

from autoshard.benchmark import BenchmarkPool, Measurement, MeasureSettings, TimingOptions
from autoshard.benchmark.jobs import MAX_INTERLEAVED
from autoshard.experiments.console.budget import Budget
from autoshard.workload import Shard
from autoshard.workload.reuse import spectrum_of

Floats = npt.NDArray[np.float64]
Device = tuple[str, str]  # its node and name

# Measured ones. Shards scatter by two thirds around what is predicted of them, so that so many tell
# the whole with a deviation of 13 %.
FEWEST_ANSWERS = 32
# Answers of one go come together: after a pause of so much of what its first took comes another.
_PAUSE = 0.1
_PATIENCE = 4.0  # times what it took half of the devices to answer: others are not awaited longer
_TERMS = 4
_RIDGE = 1e-6  # of the squares of terms: few answers leave some of them open
# With a budget shards are asked for in portions: first so many a device, each time at most so many
# times as many, and what is predicted to take so much of the time that is left.
_FIRST_PORTION, _GROWTH, _FITTING = 4, 3, 0.7


class _Worker:
    """A device: what it has answered for, and until when. Seconds are from the start.

    Args:
        first_s: when it answered first.
    """

    def __init__(self, first_s: float) -> None:
        self.first_s = self.latest_s = first_s
        self._work, self._spent_s = np.zeros(_TERMS), 0.0  # sums of terms, seconds in operators
        self._going = 0  # answers of this go
        self._busy_s, self._since_s = 0.0, 0.0  # in operators, and since when
        self._first_duty: float | None = None  # share of the time in operators when it began, and
        self._later_duty: float | None = None  # in whole goes after that

    def take(self, terms: Floats, spent_s: float, now_s: float) -> None:
        """A shard was answered for, that took so many seconds in its operator."""
        if now_s - self.latest_s > _PAUSE * self.first_s:
            self.end_go()
        self._work = self._work + terms
        self._spent_s += spent_s
        self._busy_s += spent_s
        self._going += 1
        self.latest_s = now_s
        if self._going == MAX_INTERLEAVED:
            self.end_go()

    def end_go(self) -> None:
        """Nothing more comes of this go."""
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
        """By what factor it came to work faster after what it began with; None if it only began."""
        if self._later_duty is None or not self._first_duty:
            return None
        return self._later_duty / self._first_duty

    def pace(self, prices: Floats, usual_gain: float) -> float | None:
        """The work that it does a second, in seconds as they are predicted of all devices; None
        before its first go is over.
        """
        if self._first_duty is None:
            return None
        duty = self._later_duty or usual_gain * self._first_duty
        return duty * float(self._work @ prices) / max(self._spent_s, 1e-9)


class Pace:
    """Hears of each answer, and tells how long the rest takes.

    Args:
        shards: that are asked for, from now on.
        batch_size: of all of them.
        devices: that measure.
        clock: seconds.
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
        self._left: Floats = self._terms.sum(axis=0)  # of the shards that wait
        self.devices = devices
        self._clock = clock
        self._began = clock()
        self._answers = 0
        # Sums over what was measured, of squares and of terms by seconds: all that a fit needs.
        self._squares, self._moments = np.zeros((_TERMS, _TERMS)), np.zeros(_TERMS)
        self._workers: dict[Device, _Worker] = {}

    @property
    def passed_s(self) -> float:
        """Seconds since it began."""
        return self._clock() - self._began

    def take(self, number: int, answer: Measurement) -> None:
        """A shard was answered for."""
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
        """Seconds until all are answered for; None as long as too little is known."""
        if not self._knows:
            return None
        prices, now_s = self._prices(), self.passed_s
        under_way = sum(
            min(pace * (now_s - worker.latest_s), self._at_once(prices))
            for worker, pace in self._paces(prices).items()
        )
        left = float(self._left @ prices) - under_way
        return max(0.0, left) / self._pace(prices)

    def fitting(self, most: int, seconds: float) -> list[int]:
        """The numbers of the next shards that can be answered for in so many seconds, if no others
        are under way: at most so many, and as many while nothing is known.
        """
        waiting = np.flatnonzero(self._waiting)[:most]
        if self._answers:
            for worker in self._workers.values():
                worker.end_go()
            prices = self._prices()
            work = np.cumsum(self._terms[waiting] @ prices)
            waiting = waiting[work <= seconds * self._pace(prices)]
        return [int(number) for number in waiting]

    @property
    def _knows(self) -> bool:
        """True if devices have shown how fast they are."""
        under_way = sum(worker.gain is not None for worker in self._workers.values())
        if self._answers < FEWEST_ANSWERS or 2 * under_way < len(self._workers):
            return False
        silent = [math.inf] * (self.devices - len(self._workers))
        usual = statistics.median_low([*(w.first_s for w in self._workers.values()), *silent])
        return not silent or self.passed_s > _PATIENCE * usual

    def _prices(self) -> Floats:
        """What the terms of a shard cost, in seconds of a device: none is below nothing."""
        squares = self._squares + _RIDGE * np.trace(self._squares) * np.eye(_TERMS)
        factor = np.linalg.cholesky(squares)
        found, _ = optimize.nnls(factor.T, np.linalg.solve(factor, self._moments))
        return np.asarray(found)

    @property
    def _usual_gain(self) -> float:
        gains = [gain for worker in self._workers.values() if (gain := worker.gain) is not None]
        return statistics.median(gains) if gains else 1.0

    def _paces(self, prices: Floats) -> dict[_Worker, float]:
        """Of each device that has done a whole go. One that has only begun is taken to become
        faster as much as others did.
        """
        gain = self._usual_gain
        paces = {worker: worker.pace(prices, gain) for worker in self._workers.values()}
        return {worker: pace for worker, pace in paces.items() if pace is not None}

    def _pace(self, prices: Floats) -> float:
        """Of all devices together.

        One that has not answered yet is taken to be as the others, unless these would long have.
        """
        paces = list(self._paces(prices).values())
        most = self._usual_gain * self._at_once(prices) / max(self.passed_s, 1e-9)
        silent = min(float(np.mean(paces)), most)
        return max(1e-9, sum(paces) + silent * max(0, self.devices - len(paces)))

    def _at_once(self, prices: Floats) -> float:
        """The most work that a device takes at a time."""
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
    """Answers as a pool's `stream` gives them, of as many of the first shards as the budget allows.

    What is under way when the time is over would be lost with a cluster that ends then: so with a
    limit the pool is only asked for what will be done in time, as well as that is known by then.
    """
    if not budget.is_limited:
        for number, answer in pool.stream(shards, settings, timing, retry_failed):
            pace.take(number, answer)
            yield number, answer
        return
    most = _FIRST_PORTION * pace.devices
    while not budget.is_spent:
        portion = pace.fitting(most, _FITTING * budget.left_s())
        if not portion:
            return
        most = _GROWTH * len(portion)
        asked = [shards[number] for number in portion]
        for place, answer in pool.stream(asked, settings, timing, retry_failed):
            pace.take(portion[place], answer)
            yield portion[place], answer
            if budget.is_spent:
                return


def _terms(shards: Sequence[Shard], batch_size: int) -> Floats:
    """What the time to measure a shard is made of, each in units of its mean: the shard itself, its
    tables, what it looks up, and the different rows of that.
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
