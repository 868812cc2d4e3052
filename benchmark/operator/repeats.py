"""Combines repeat measurements of a shard, and estimates the error of costs.

Iterations of a measurement show how well its median is known. Repeat measurements differ by more:
by hour, core, memory layout and the shards that take turns. That additional deviation is estimated
from all shards with repeats, and holds for all shards of the same hardware. All of it differs
between the forward and the backward pass.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean as mean

from autoshard.benchmark.measurement import Directions, Measurement, ReferenceLevel, Timing
from autoshard.benchmark.statistics import pooled_variance, standard_error

# Deviation assumed without repeats, as on the hosts seen so far, and its weight in repeats.
_PRIOR_DEVIATION, _PRIOR_WEIGHT = Directions(0.02, 0.01, 0.01), 4.0
# Error of a cost over the contention that was normalised away (both as log): shards are slowed by
# more or by less than the reference.
_CONTENTION_ERROR = 0.25


def own_error(timing: Timing, level: ReferenceLevel | None = None) -> Directions:
    """Returns the relative standard error of one measurement, without differences of repeats.

    It follows from iterations, and from contention beyond `level`, which costs are normalised to.
    """
    moved = zip(timing.spread, timing.ms, timing.normalized_to(level).ms, strict=True)
    return Directions(
        *(
            math.hypot(
                standard_error(spread, timing.iterations),
                _CONTENTION_ERROR * math.log(after / before),
            )
            for spread, before, after in moved
        )
    )


def deviation_of_repeats(repeats: Sequence[Sequence[Timing]]) -> Directions:
    """Returns the relative deviation of repeat measurements beyond that of their own errors."""
    within = [timing.error for same in repeats for timing in same]
    found = []
    for direction, prior in enumerate(_PRIOR_DEVIATION):
        logs = [[math.log(timing.ms[direction]) for timing in same] for same in repeats]
        expected = mean(error[direction] ** 2 for error in within) if within else 0.0
        variance = pooled_variance(logs, prior**2 + expected, _PRIOR_WEIGHT)
        found.append(math.sqrt(max(0.0, variance - expected)))
    return Directions(*found)


def merged(repeats: Sequence[Measurement], deviation: Directions) -> Measurement:
    """Returns one measurement with the mean of repeats, which must be at one reference level.

    `deviation` is that of `deviation_of_repeats`. Repeats that disagree by more have a larger
    error.
    """
    last = repeats[-1]
    timings = [repeat.timing for repeat in repeats if repeat.timing is not None]
    if not timings:
        return last
    return replace(
        last,
        timing=Timing(
            forward_ms=mean(timing.forward_ms for timing in timings),
            backward_ms=mean(timing.backward_ms for timing in timings),
            spread=Directions(*map(mean, zip(*(t.spread for t in timings), strict=True))),
            iterations=sum(timing.iterations for timing in timings),
            disturbed=sum(timing.disturbed for timing in timings),
            foreign_load=mean(timing.foreign_load for timing in timings),
            operator_seconds=sum(timing.operator_seconds for timing in timings),
            reference_level=timings[-1].reference_level,
            repeats=len(timings),
            error=Directions(*(_error(timings, *each) for each in enumerate(deviation))),
        ),
    )


def _error(timings: Sequence[Timing], direction: int, deviation: float) -> float:
    """Returns the relative standard error of the mean of repeats in one direction."""
    expected = deviation**2 + mean(timing.error[direction] ** 2 for timing in timings)
    logs = [math.log(timing.ms[direction]) for timing in timings]
    return math.sqrt(pooled_variance([logs], expected, _PRIOR_WEIGHT) / len(timings))
