"""Combines repeat measurements of a shard, and estimates the error of costs.

Iterations of a measurement show how well its median is known. Repeat measurements differ by more:
by hour, core and memory layout. That additional deviation is estimated from all shards with
repeats, and holds for all shards of the same hardware.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean as mean

from autoshard.benchmark.measurement import Measurement, Timing
from autoshard.benchmark.statistics import pooled_variance, standard_error

# Deviation assumed without repeats, as on the hosts seen so far, and its weight in repeats.
_PRIOR_DEVIATION, _PRIOR_WEIGHT = 0.01, 4.0


def deviation_of_repeats(repeats: Sequence[Sequence[Timing]]) -> float:
    """Returns the relative deviation of repeat measurements beyond that of their iterations."""
    logs = [[math.log(timing.total_ms) for timing in same] for same in repeats]
    within = [_within(timing) ** 2 for same in repeats for timing in same]
    expected = sum(within) / len(within) if within else 0.0
    found = pooled_variance(logs, _PRIOR_DEVIATION**2 + expected, _PRIOR_WEIGHT)
    return math.sqrt(max(0.0, found - expected))


def merged(repeats: Sequence[Measurement], deviation: float) -> Measurement:
    """Returns one measurement with the mean of repeats, which must be at one reference level.

    `deviation` is that of `deviation_of_repeats`. Repeats that disagree by more have a larger
    error.
    """
    last = repeats[-1]
    timings = [repeat.timing for repeat in repeats if repeat.timing is not None]
    if not timings:
        return last
    expected = deviation**2 + sum(_within(timing) ** 2 for timing in timings) / len(timings)
    logs = [math.log(timing.total_ms) for timing in timings]
    variance = pooled_variance([logs], expected, _PRIOR_WEIGHT)
    return replace(
        last,
        timing=Timing(
            forward_ms=mean(timing.forward_ms for timing in timings),
            backward_ms=mean(timing.backward_ms for timing in timings),
            spread=mean(timing.spread for timing in timings),
            iterations=sum(timing.iterations for timing in timings),
            disturbed=sum(timing.disturbed for timing in timings),
            foreign_load=mean(timing.foreign_load for timing in timings),
            operator_seconds=sum(timing.operator_seconds for timing in timings),
            reference_level=timings[-1].reference_level,
            repeats=len(timings),
            error=math.sqrt(variance / len(timings)),
        ),
    )


def _within(timing: Timing) -> float:
    return standard_error(timing.spread, timing.iterations)
