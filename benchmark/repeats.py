"""What several visits of a shard say together, and what a cost is worth.

Iterations within a visit tell how well its median is known. Visits differ by more than that: by
the hour, by the core, by how memory was laid out. How much more follows from the shards that were
visited more than once, and counts for all of the same hardware.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from autoshard.benchmark.measurement import Measurement, Timing
from autoshard.benchmark.statistics import pooled_variance, standard_error

# Without repeated shards visits are taken to differ by a hundredth beyond what their iterations
# tell, as on the hosts that were seen; that counts as much as so many repeats.
_PRIOR_DEVIATION, _PRIOR_WEIGHT = 0.01, 4.0


def deviation_of_repeats(repeats: Sequence[Sequence[Timing]]) -> float:
    """By how much visits of a shard differ beyond what their iterations tell, relative."""
    logs = [[math.log(timing.total_ms) for timing in same] for same in repeats]
    within = [_within(timing) ** 2 for same in repeats for timing in same]
    expected = sum(within) / len(within) if within else 0.0
    found = pooled_variance(logs, _PRIOR_DEVIATION**2 + expected, _PRIOR_WEIGHT)
    return math.sqrt(max(0.0, found - expected))


def merged(repeats: Sequence[Measurement], deviation: float) -> Measurement:
    """One measurement with the mean of all visits, which are told at one level.

    `deviation`: by how much visits differ beyond what their iterations tell. Visits that disagree
    by more than that are worth less.
    """
    last = repeats[-1]
    timings = [visit.timing for visit in repeats if visit.timing is not None]
    if not timings:
        return last
    expected = deviation**2 + sum(_within(timing) ** 2 for timing in timings) / len(timings)
    logs = [math.log(timing.total_ms) for timing in timings]
    variance = pooled_variance([logs], expected, _PRIOR_WEIGHT)
    return replace(
        last,
        timing=Timing(
            forward_ms=_mean([timing.forward_ms for timing in timings]),
            backward_ms=_mean([timing.backward_ms for timing in timings]),
            spread=_mean([timing.spread for timing in timings]),
            iterations=sum(timing.iterations for timing in timings),
            disturbed=sum(timing.disturbed for timing in timings),
            foreign_load=_mean([timing.foreign_load for timing in timings]),
            operator_seconds=sum(timing.operator_seconds for timing in timings),
            reference_level=timings[-1].reference_level,
            repeats=len(timings),
            error=math.sqrt(variance / len(timings)),
        ),
    )


def _within(timing: Timing) -> float:
    """The standard error that a visit's iterations tell."""
    return standard_error(timing.spread, timing.iterations)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
