"""The ratio of two sharders' step times over several tasks, with its interval.

The ratio of a task is paired: both steps are of the same task. Tasks differ in size by several
times, so a ratio of means would be mostly that of the largest task, and vary with which tasks are
large. The ratio over tasks is therefore the geometric mean of theirs, in which each counts alike.

The log ratios of tasks differ by what sharders gain on each, and by the noise of measuring. A t
interval of their mean has both in it. If few tasks happen to agree more closely than they are
measured, the noise alone is the wider one, and counts: so it does with one task, which says nothing
of others. (A bootstrap over tasks is too narrow for few: of `scipy.stats.bootstrap`'s BCa intervals
at 95 %, 78 % contain the mean of four normal values, 86 % of eight and 91 % of twelve.)
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, stdev

import numpy as np
from scipy import special

from autoshard.workload.arrays import Floats

_TAIL = 0.025  # outside each end of a 95 % interval
_NORMAL = float(special.ndtri(1 - _TAIL))  # half of a 95 % interval, in standard errors
_LEAST = 1e-3  # of the mean step: costs are normal, so some samples of noisy ones are below zero


@dataclass(frozen=True)
class Ratio:
    """Geometric mean over tasks of the ratio of two sharders' step times."""

    # ratio of the mean steps of each task; None where one of the sharders has no plan
    of_tasks: tuple[float | None, ...]
    # standard error of the log of the mean due to the noise of measuring; None if steps are priced
    noise: float | None

    @staticmethod
    def of(ours_ms: Floats, theirs_ms: Floats) -> "Ratio | None":
        """Returns the ratio of steps [samples, tasks], NaN without a plan; None without tasks.

        A single sample is a priced step, without noise.
        """
        both = ~(np.isnan(ours_ms[0]) | np.isnan(theirs_ms[0]))
        if not both.any():
            return None
        ratios = ours_ms.mean(axis=0) / theirs_ms.mean(axis=0)
        noise = None
        if len(ours_ms) > 1:
            drawn = (_logs(ours_ms[:, both]) - _logs(theirs_ms[:, both])).mean(axis=1)
            # By quantiles, because the noise of few rounds of training has long tails.
            low, high = np.quantile(drawn, (_TAIL, 1 - _TAIL))
            noise = float(high - low) / 2 / _NORMAL
        found = zip(ratios.tolist(), both.tolist(), strict=True)
        return Ratio(tuple(ratio if known else None for ratio, known in found), noise)

    @cached_property
    def _logs_of_tasks(self) -> list[float]:
        return [math.log(ratio) for ratio in self.of_tasks if ratio is not None]

    @property
    def count(self) -> int:
        """Number of tasks for which both sharders have plans."""
        return len(self._logs_of_tasks)

    @property
    def value(self) -> float:
        """The geometric mean."""
        return math.exp(fmean(self._logs_of_tasks))

    @property
    def _error_of_tasks(self) -> float:
        """Standard error of the log by how tasks differ, in which noise is; infinite with one."""
        if self.count == 1:
            return math.inf
        return stdev(self._logs_of_tasks) / math.sqrt(self.count)

    @property
    def measurement_variance(self) -> float:
        """Variance of the log due to the noise of measuring."""
        return (self.noise or 0.0) ** 2

    @property
    def task_variance(self) -> float:
        """Variance of the log due to the choice of tasks, beyond that noise; infinite with one."""
        return max(0.0, self._error_of_tasks**2 - self.measurement_variance)

    @property
    def noise_width(self) -> float:
        """Half the width of the 95 % interval due to the noise of measuring alone."""
        return self.value * math.sinh(_NORMAL * (self.noise or 0.0))

    @property
    def half_width(self) -> float:
        """Half the width of the 95 % interval."""
        return (self.high - self.low) / 2

    @property
    def low(self) -> float:
        """Lower end of the 95 % interval; 0 for one task whose steps are priced."""
        return self.value * math.exp(-self._reach)

    @property
    def high(self) -> float:
        """Upper end of the 95 % interval; infinite for one task whose steps are priced."""
        return self.value * math.exp(self._reach)

    @property
    def _reach(self) -> float:
        """Half the width of the 95 % interval of the log."""
        quantiles = (error * float(special.stdtrit(f, 1 - _TAIL)) for error, f in self._errors())
        return max(quantiles, default=math.inf)

    @property
    def probability_below_one(self) -> float:
        """Probability that the ratio is below 1, so that the first sharder is faster."""
        log = fmean(self._logs_of_tasks)
        if not log:
            return 0.5
        scores = [-log / error if error else -log * math.inf for error, _ in self._errors()]
        freedoms = [freedom for _, freedom in self._errors()]
        found = map(float, special.stdtr(freedoms, scores))
        return min(found, key=lambda p: abs(p - 0.5), default=0.5)

    def _errors(self) -> Iterator[tuple[float, float]]:
        """Yields standard errors of the log with their degrees of freedom, for Student's t."""
        if self.count > 1:
            yield self._error_of_tasks, self.count - 1
        if self.noise is not None:
            yield self.noise, math.inf


def relative(ours_ms: Sequence[float | None], theirs_ms: Sequence[float | None]) -> Ratio | None:
    """Returns the ratio of step times without noise by task; None without common tasks."""
    # None becomes NaN.
    return Ratio.of(*(np.array([steps], dtype=float) for steps in (ours_ms, theirs_ms)))


def _logs(steps_ms: Floats) -> Floats:
    return np.asarray(np.log(np.maximum(steps_ms, _LEAST * steps_ms.mean(axis=0))))
