"""Deviation of measurements by direction, its components, and the effect of flushing the cache.

Each component is the variance of forward plus backward between measurements of the same shards
beyond that within: repeats beyond iterations, processes beyond repeats, and so on.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path

import numpy as np

from autoshard.benchmark import Measurement, MeasurementStore, MeasureSettings, TimingOptions
from autoshard.benchmark.backends.base import Stopwatch, TimedOperator
from autoshard.benchmark.backends.cpu import CpuBackend, CpuStopwatch
from autoshard.benchmark.machine.hardware import last_level_cache_bytes
from autoshard.benchmark.measurement import Directions
from autoshard.benchmark.operator.embedding_op import EmbeddingOp
from autoshard.benchmark.operator.reference import reference_operators
from autoshard.benchmark.operator.timing import time_interleaved
from autoshard.benchmark.statistics import standard_error
from autoshard.workload import Shard, load_tables, random_shards
from autoshard.workload.arrays import Floats
from bench.metric import Metric, mean_and_interval
from bench.workbench import SETTINGS, TABLES, cpu_pool, on_one_core, say

_SHARDS, _REPEATED = 16, 50
_REPEATS = 4
_FLUSH_TURNS = 4
_TARGETS = ("at most 4 %", "at most 2 %", "at most 2.5 %")  # forward, backward, both
_RESAMPLES = 1000
_SAME_WORK = TimingOptions(precision=0.0, max_iterations=24)


def noise_metrics(folder: Path) -> list[Metric]:
    """Measures the components, and the standard deviation of a single measurement."""
    tables = load_tables(TABLES)
    shards = random_shards(tables, _SHARDS, 20, seed=7)
    say(f"{_SHARDS} shards on one device: again, with other batches, in another process")
    with cpu_pool(folder / "one.db", 1) as pool:
        first = pool.measure(shards, SETTINGS)
        others = pool.measure(shards, MeasureSettings(1024, seed=1))
        pool.measure(shards, SETTINGS, repeats=2)
    with cpu_pool(folder / "again.db", 1) as pool:
        again = pool.measure(shards, SETTINGS)
    say(f"{_REPEATS} measurements of them on all devices at once")
    with cpu_pool(folder / "all.db") as pool:
        count = len(pool.devices())
        pool.measure(shards, SETTINGS, repeats=_REPEATS)
    one, every = (
        _repeats_so_far(folder / "one.db", shards),
        _repeats_so_far(folder / "all.db", shards),
    )
    timings = [m.timing for m in first if m.timing is not None]
    iterations = statistics.mean(standard_error(t.spread.both, t.iterations) ** 2 for t in timings)
    same_core = _variance(
        [(a, b) for repeats in one for a, b in combinations(repeats, 2) if a.device == b.device]
    )
    cores = together = None
    if count > 1:
        pairs = [pair for repeats in every for pair in combinations(repeats, 2)]
        within = _variance([(a, b) for a, b in pairs if a.device == b.device])
        cores = _variance([(a, b) for a, b in pairs if a.device != b.device]) - within
        together = within - same_core
    return [
        *_repeatability(folder),
        *_stated_errors([pair for repeats in every for pair in combinations(repeats, 2)]),
        _component("standard deviation between iterations", iterations),
        _component("standard deviation between repeat measurements", same_core - iterations),
        _component(
            "standard deviation between processes",
            _variance(zip(first, again, strict=True)) - same_core,
        ),
        _component(
            "standard deviation between index batches",
            _variance(zip(first, others, strict=True)) - same_core,
        ),
        _component("standard deviation between cores", cores),
        _component("standard deviation added by measuring on all devices at once", together),
    ]  # fmt: skip


def _component(name: str, variance: float | None) -> Metric:
    """Returns a standard deviation in percent; 0 for a negative difference of variances."""
    percent = None if variance is None else 100 * math.sqrt(max(0.0, variance))
    return Metric(name, "", percent, "%")


def _repeatability(folder: Path) -> list[Metric]:
    """Measures the standard deviation between two generations of processes, common factors
    included.
    """
    say(f"{_REPEATED} shards in two separate processes")
    shards = random_shards(load_tables(TABLES), _REPEATED, 20, seed=1)
    found: list[list[Measurement]] = []
    for name in ("first.db", "second.db"):
        with cpu_pool(folder / name) as pool:
            found.append(pool.measure(shards, SETTINGS))
    name = f"standard deviation of a single measurement ({_REPEATED} shards, two processes)"
    squares = _squares(zip(*found, strict=True)) / 2
    drawn = np.random.default_rng(0).integers(len(squares), size=(_RESAMPLES, len(squares)))
    low, high = 100 * np.sqrt(np.quantile(squares[drawn].mean(axis=1), (0.025, 0.975), axis=0))
    percent = 100 * np.sqrt(squares.mean(axis=0))
    return [
        Metric(f"{name}, {each}", target, float(value), "%", (float(least), float(most)))
        for each, target, value, least, most in zip(
            Directions._fields, _TARGETS, percent, low, high, strict=True
        )
    ]


def _stated_errors(pairs: Sequence[tuple[Measurement, Measurement]]) -> list[Metric]:
    """Compares differences of repeat measurements with their stated errors."""
    stated = [np.square(a.timing.error) + np.square(b.timing.error)
              for a, b in pairs if a.timing and b.timing]  # fmt: skip
    ratios = np.sqrt((_squares(pairs) / stated).mean(axis=0))
    return [
        Metric(f"differences of repeats over their stated errors, {each}", "0.8 to 1.2", float(r))
        for each, r in zip(Directions._fields, ratios, strict=True)
    ]


def flush_metrics() -> list[Metric]:
    """Compares costs with the partial cache flush of the pool and with a full flush."""
    say("partial against full cache flush")
    with on_one_core() as core:
        shards = random_shards(load_tables(TABLES), 8, 20, seed=7)
        subjects = [
            TimedOperator(op.forward, op.gradient)
            for op in (EmbeddingOp(shard, SETTINGS, CpuBackend()) for shard in shards)
        ]
        cache, references = last_level_cache_bytes(core), reference_operators(CpuBackend())
        watches = (CpuStopwatch([core], cache, references), _FullFlush([core], cache, references))
        time_interleaved(subjects, watches[0], [_SAME_WORK] * len(subjects))  # it adapts its flush
        return [
            _flush_ratio("eight shards interleaved", watches, [subjects]),
            _flush_ratio("one shard", watches, [[each] for each in subjects[:4]]),
        ]


def _flush_ratio(
    name: str, watches: Sequence[Stopwatch], groups: Sequence[Sequence[TimedOperator]]
) -> Metric:
    """Compares the costs of two stopwatches, in groups that take turns."""
    ratios = []
    for _ in range(_FLUSH_TURNS):
        for group in groups:
            options = [_SAME_WORK] * len(group)
            ours, full = (time_interleaved(group, watch, options) for watch in watches)
            ratios += [
                math.log(a.normalized_to(b.reference_level).total_ms / b.total_ms)
                for a, b in zip(ours, full, strict=True)
            ]
    mean, (low, high) = mean_and_interval(ratios)
    label = f"cost with partial cache flush over full flush, {name}"
    ends = (math.exp(low), math.exp(high))
    return Metric(label, "1 within the interval", math.exp(mean), interval=ends)


class _FullFlush(CpuStopwatch):
    """Clears the complete cache, however long it takes."""

    def clear_cache(self, max_ms: float) -> bool:
        return super().clear_cache(math.inf)


def _variance(pairs: Iterable[tuple[Measurement, Measurement]]) -> float:
    """Returns the variance of the logarithm of a measurement, from pairs of the same shard."""
    return float(_squares(pairs)[:, 2].mean()) / 2


def _squares(pairs: Iterable[tuple[Measurement, Measurement]]) -> Floats:
    """Returns squared differences of the logarithms of pairs of a shard, [pairs, directions]."""
    squares = []
    for one, other in pairs:
        if one.timing is not None and other.timing is not None:
            normalized = other.timing.normalized_to(one.timing.reference_level)
            squares.append(np.log(np.divide(one.timing.ms, normalized.ms)) ** 2)
    return np.array(squares)


def _repeats_so_far(store: Path, shards: Sequence[Shard]) -> list[list[Measurement]]:
    """Returns the repeat measurements of each shard with the first index batch."""
    with MeasurementStore(store) as kept:
        repeats = [visit for visit in kept.measurements() if visit.settings == SETTINGS]
    return [[v for v in repeats if v.shard.digest == shard.digest] for shard in shards]
