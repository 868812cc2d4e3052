"""Timing operators until their medians are known, several by turns.

Iterations of up to a handful of shards are interleaved in rounds, for three reasons. Each shard's
iterations spread over more time, so that a spell in which the host is slow does not hit one shard
alone. What others use between two iterations of a shard puts its rows out of the cache, so that a
flush once a round is enough. And one reference beside each iteration serves as the one after this
and the one before the next.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from benchmark.garbage import collector_paused
from benchmark.measurement import Level, Timing, TimingOptions
from benchmark.quiet import quiet_level
from benchmark.statistics import FEWEST_FOR_INTERVAL, median_spread, standard_error
from benchmark.stopwatch import Iteration, Stopwatch, Subject

Floats = npt.NDArray[np.float64]

_WARM_UP = 1  # rounds: in the first the system hands out memory
# Of an iteration's mean time: the flush takes at most so long, once a round. With several shards
# by turns that is a few percent of the time, and more is not needed, for the others flush too.
_FLUSH_SHARE = 0.4
# Of an iteration's time: what the reference runs after it, at least once. A long iteration averages
# over the host's moments by itself, and so must what it is compared with.
_REFERENCE_SHARE = 0.1


class SubjectFault(Exception):  # noqa: N818 - the subject's, not ours
    """A subject failed. `number`: which; `reason`: in one line."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(number, reason)
        self.number = number
        self.reason = reason


@dataclass
class _Runs:
    """Iterations of one subject; `beside` the reference around each, forward and backward."""

    number: int
    subject: Subject
    options: TimingOptions
    done: list[Iteration] = field(default_factory=list)
    beside: list[tuple[float, float]] = field(default_factory=list)
    seconds: float = 0.0
    spread: float = math.inf

    def iterate(self, watch: Stopwatch) -> Iteration:
        """One more; whether it counts is for the caller to say."""
        try:
            found = watch.iteration(self.subject)
        except Exception as error:  # whatever a kernel raises is this subject's
            lines = str(error).splitlines() or [""]
            reason = f"{type(error).__name__}: {lines[0][:300]}"
            raise SubjectFault(self.number, reason) from error
        self.seconds += found.wall_ms / 1e3
        return found

    def told(self, level: Level | None) -> Floats:
        """Forward and backward of each, as on a machine where the reference takes so long."""
        read = np.array([(run.forward_ms, run.backward_ms) for run in self.done])
        if level is None:
            return read
        told: Floats = read / np.array(self.beside) * (level.forward_ms, level.backward_ms)
        return told

    def is_known(self, level: Level | None) -> bool:
        """True once the median is known, or a cap is reached."""
        if len(self.done) >= FEWEST_FOR_INTERVAL:
            self.spread = median_spread(self.told(level).sum(axis=1).tolist())
        return (
            self.spread <= self.options.precision
            or len(self.done) >= self.options.max_iterations
            or (len(self.done) > 1 and self.seconds > self.options.max_seconds)
        )

    def timing(self, level: Level | None, load: float) -> Timing:
        """What came of it."""
        forward_ms, backward_ms = np.median(self.told(level), axis=0).tolist()
        self.spread = median_spread(self.told(level).sum(axis=1).tolist())
        return Timing(
            forward_ms=forward_ms,
            backward_ms=backward_ms,
            spread=self.spread,
            iterations=len(self.done),
            disturbed=sum(run.disturbed for run in self.done),
            foreign_load=load,
            operator_seconds=self.seconds,
            quiet=level,
            error=standard_error(self.spread, len(self.done)),
        )


class _References:
    """The reference between iterations: what it took, in the whole and around each."""

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch
        self._all: list[Iteration] = []
        self.seconds = 0.0

    def run(self, beside_ms: float = 0.0) -> list[Iteration]:
        """Once, or for a share of the iteration that it runs beside."""
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

    def level(self) -> Level | None:
        """What it takes when all is quiet, by all runs so far; None without a reference."""
        if not self._all:
            return None
        return Level(
            quiet_level([run.forward_ms for run in self._all]),
            quiet_level([run.backward_ms for run in self._all]),
        )


def time_by_turns(
    subjects: Sequence[Subject], watch: Stopwatch, options: Sequence[TimingOptions]
) -> list[Timing]:
    """Warm up, then iterate by turns until each subject is known as its options say.

    Costs are told at the level of the reference that was quiet meanwhile. SubjectFault names one
    that failed.
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
        waiting, number = list(runs), 0
        while waiting:
            # Another one first each time: who comes first finds the cache emptier than the rest.
            first = number % len(waiting)
            _round([*waiting[first:], *waiting[:first]], watch, references)
            level = references.level()
            waiting = [run for run in waiting if not run.is_known(level)]
            number += 1
        load = watch.foreign_load()
    level = references.level()
    for run in runs:  # each keeps the device for its part of what all share
        run.seconds += references.seconds / len(runs)
    return [run.timing(level, load) for run in runs]


def time_operator(subject: Subject, watch: Stopwatch, options: TimingOptions) -> Timing:
    """One operator by itself."""
    (timing,) = time_by_turns([subject], watch, [options])
    return timing


def _round(runs: Sequence[_Runs], watch: Stopwatch, references: _References) -> None:
    """One iteration of each, with the reference between them."""
    taken = [run.done[-1].wall_ms for run in runs if run.done]
    watch.clear_cache(_FLUSH_SHARE * float(np.mean(taken)) if taken else 0.0)
    references.run()  # the first after a flush is not like the others
    before: list[Iteration] = []
    for run in runs:
        iteration = run.iterate(watch)
        after = references.run(iteration.wall_ms)
        around = [*before, *after]
        run.done.append(iteration)
        if around:
            run.beside.append(
                (
                    float(np.mean([each.forward_ms for each in around])),
                    float(np.mean([each.backward_ms for each in around])),
                )
            )
        before = after
