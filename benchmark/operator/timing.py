"""Times operators until their medians are known, several of them interleaved.

Iterations of a handful of shards are interleaved in rounds, for three reasons. Each shard's
iterations spread over more time, so a slow spell of the host does not affect one shard alone. Other
shards evict a shard's rows from the cache, so it is cleared once a round and not for long (see
`clearing`). And one run of the reference serves the iterations before and after it.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from autoshard.benchmark.backends.base import Iteration, Stopwatch, TimedOperator
from autoshard.benchmark.machine.process import collector_paused
from autoshard.benchmark.measurement import (
    Directions,
    ReferenceLevel,
    ShardFault,
    Timing,
    TimingOptions,
)
from autoshard.benchmark.operator.repeats import own_error
from autoshard.benchmark.statistics import MIN_FOR_INTERVAL, median_spread, uncontended_level
from autoshard.workload.arrays import Floats

_WARM_UP = 1  # rounds: in the first the system provides memory
# Time of the reference after an iteration, as a share of the latter; at least one run. Long
# iterations average over short disturbances, and so must the reference.
_REFERENCE_SHARE = 0.1


class _Run(NamedTuple):
    """An iteration, the reference around it, and how the cache was cleared before it."""

    iteration: Iteration
    beside: tuple[float, float]
    thorough: bool


@dataclass
class _Runs:
    """The iterations of one operator."""

    number: int
    subject: TimedOperator
    options: TimingOptions
    all: list[_Run] = field(default_factory=list)
    seconds: float = 0.0

    def counted(self, short_suffices: bool) -> list[_Run]:
        """Returns the iterations whose median is the cost."""
        return [run for run in self.all if run.thorough or short_suffices] or self.all

    def iterate(self, watch: Stopwatch) -> Iteration:
        """Runs one more iteration, without keeping it."""
        try:
            found = watch.iteration(self.subject)
        except Exception as error:  # whatever a kernel raises
            raise ShardFault.of(self.number, error) from error
        self.seconds += found.wall_ms / 1e3
        return found

    def is_known(self, level: ReferenceLevel | None, short_suffices: bool) -> bool:
        """Returns whether the median is known, or a cap is reached."""
        counted = self.counted(short_suffices)
        spread = math.inf
        if len(counted) >= MIN_FOR_INTERVAL:
            spread = median_spread(_normalized_ms(counted, level)[:, 2].tolist())
        return (
            spread <= self.options.precision
            or len(counted) >= self.options.max_iterations
            or (len(counted) > 1 and self.seconds > self.options.max_seconds)
        )

    def timing(self, level: ReferenceLevel | None, load: float, short_suffices: bool) -> Timing:
        counted = self.counted(short_suffices)
        ms = _normalized_ms(counted, level)
        forward_ms, backward_ms, _ = np.median(ms, axis=0).tolist()
        timing = Timing(
            forward_ms=forward_ms,
            backward_ms=backward_ms,
            spread=Directions(*map(median_spread, ms.T.tolist())),
            iterations=len(counted),
            disturbed=sum(run.iteration.disturbed for run in counted),
            foreign_load=load,
            operator_seconds=self.seconds,
            reference_level=level,
        )
        return replace(timing, error=own_error(timing))

    def by_clearing(self, level: ReferenceLevel | None) -> tuple[list[float], list[float]]:
        """Returns forward plus backward after short and after thorough clearings."""
        if len({run.thorough for run in self.all}) < 2:
            return [], []
        total_ms = _normalized_ms(self.all, level)[:, 2]
        thorough = np.array([run.thorough for run in self.all])
        return total_ms[~thorough].tolist(), total_ms[thorough].tolist()


def _normalized_ms(runs: Sequence[_Run], level: ReferenceLevel | None) -> Floats:
    """Returns forward, backward and both of each run at the reference level, shape [runs, 3]."""
    ms = np.array([(run.iteration.forward_ms, run.iteration.backward_ms) for run in runs])
    if level is not None:
        ms *= np.stack(level.over(*np.array([run.beside for run in runs]).T), axis=1)
    return np.column_stack((ms, ms.sum(axis=1)))


def level_of(runs: Sequence[Iteration]) -> ReferenceLevel | None:
    """Returns the uncontended level of runs of the reference; None without any."""
    if not runs:
        return None
    return ReferenceLevel(
        uncontended_level([run.forward_ms for run in runs]),
        uncontended_level([run.backward_ms for run in runs]),
    )


class _References:
    """Runs of the reference between iterations."""

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch
        self._all: list[Iteration] = []
        self.seconds = 0.0

    def run(self, beside_ms: float = 0.0) -> list[Iteration]:
        """Runs the reference once, or for a share of the iteration beside it."""
        runs: list[Iteration] = []
        left_ms = _REFERENCE_SHARE * beside_ms
        while not runs or left_ms > 0:
            found = self._watch.reference()
            if found is None:
                break
            runs.append(found)
            left_ms -= found.wall_ms
        self._all += runs
        self.seconds += sum(run.wall_ms for run in runs) / 1e3
        return runs

    def level(self) -> ReferenceLevel | None:
        """Returns the uncontended level of all runs so far; None without a reference."""
        return level_of(self._all)


def time_interleaved(
    subjects: Sequence[TimedOperator],
    watch: Stopwatch,
    options: Sequence[TimingOptions],
    deadline: float = math.inf,
    min_iterations: int = 1,
) -> list[Timing]:
    """Warms up, then interleaves iterations until the median of each operator is known.

    Costs are normalised to the reference level that was uncontended meanwhile.

    Args:
        subjects: The operators.
        watch: The device's stopwatch.
        options: Options of each operator.
        deadline: Time by `time.monotonic` after which no round begins.
        min_iterations: What each operator gets even where that takes longer.

    Raises:
        ShardFault: An operator failed.
    """
    pairs = zip(subjects, options, strict=True)
    runs = [_Runs(number, *each) for number, each in enumerate(pairs)]
    references = _References(watch)
    with collector_paused():
        for _ in range(_WARM_UP):
            for run in runs:
                run.iterate(watch)
        references.run()
        watch.foreign_load()
        rounds = _Rounds(watch, references, len(runs), deadline, min_iterations)
        rounds.go_on(runs)
        found = [run.by_clearing(references.level()) for run in runs]
        watch.clearing.learn(len(runs), found)
        rounds.go_on(runs)  # if short clearings turn out not to suffice, some have too few left
        load = watch.foreign_load()
    level = references.level()
    for run in runs:
        run.seconds += references.seconds / len(runs)
    short_suffices = watch.clearing.short_suffices(len(runs))
    return [run.timing(level, load, short_suffices) for run in runs]


class _Rounds:
    """Rounds with one iteration of each operator, and the reference between them."""

    def __init__(
        self,
        watch: Stopwatch,
        references: _References,
        num_interleaved: int,
        deadline: float,
        min_iterations: int,
    ) -> None:
        self._watch, self._references = watch, references
        self._num_interleaved = num_interleaved
        self._deadline, self._min_iterations = deadline, min_iterations
        self._number = 0
        self._iteration_ms = 0.0

    def go_on(self, runs: Sequence[_Runs]) -> None:
        """Runs rounds until all medians are known."""
        waiting = self._unknown(runs)
        while waiting and (self._too_few(waiting) or time.monotonic() < self._deadline):
            self._next(waiting)
            waiting = self._unknown(waiting)

    def _too_few(self, runs: Sequence[_Runs]) -> bool:
        short_suffices = self._short_suffices()
        return any(len(run.counted(short_suffices)) < self._min_iterations for run in runs)

    def _unknown(self, runs: Sequence[_Runs]) -> list[_Runs]:
        level, short_suffices = self._references.level(), self._short_suffices()
        return [run for run in runs if not run.is_known(level, short_suffices)]

    def _short_suffices(self) -> bool:
        return self._watch.clearing.short_suffices(self._num_interleaved)

    def _next(self, runs: Sequence[_Runs]) -> None:
        # The order rotates: the first one finds the cache emptier than the rest.
        first = self._number % len(runs)
        thorough = self._clear()
        before = self._references.run()
        took_ms = 0.0
        for run in [*runs[first:], *runs[:first]]:
            iteration = run.iterate(self._watch)
            after = self._references.run(iteration.wall_ms)
            took_ms += iteration.wall_ms
            beside = _mean_of([*before, *after])
            run.all.append(_Run(iteration, beside, thorough))
            before = after
        self._iteration_ms = took_ms / len(runs)
        self._number += 1

    def _clear(self) -> bool:
        watch, start = self._watch, self._watch.now()
        max_ms = watch.clearing.max_ms(
            self._number, self._num_interleaved, self._iteration_ms, start
        )
        thorough = watch.clear_cache(max_ms)
        if thorough:
            watch.clearing.note_thorough(watch.now() - start, watch.now())
        return thorough


def _mean_of(runs: Sequence[Iteration]) -> tuple[float, float]:
    if not runs:
        return math.nan, math.nan
    forward_ms = float(np.mean([run.forward_ms for run in runs]))
    return forward_ms, float(np.mean([run.backward_ms for run in runs]))
