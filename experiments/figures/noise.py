#!/usr/bin/env python
"""Where the noise of a measurement comes from: the components of its variance, and what is done
against it.

Each component is what a difference between two measurements of the same shards has beyond the
differences within: visits beyond iterations, processes beyond visits, and so on.
"""

import math
import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from autoshard.benchmark import (
    BenchmarkPool,
    Measurement,
    MeasurementStore,
    MeasureSettings,
    TimingOptions,
)
from autoshard.benchmark.embedding_op import EmbeddingOp
from autoshard.benchmark.hardware import last_level_cache_bytes, physical_cores
from autoshard.benchmark.reference import reference_operators
from autoshard.benchmark.stopwatch import CpuStopwatch, Subject
from autoshard.benchmark.timing import time_by_turns
from autoshard.cost_model.training import one_thread
from autoshard.experiments.console import cli
from autoshard.experiments.console.ray_cluster import ray_cluster
from autoshard.experiments.figures.figure import Figure, print_figures
from autoshard.workload import Shard, load_tables, random_shards

_SETTINGS = MeasureSettings(1024)
_TABLES = "synthetic:200:1:small"
_SHARDS, _REPEATED = 16, 50
_VISITS = 4
_FLUSH_TURNS = 4
_SAME_WORK = TimingOptions(precision=0.0, max_iterations=24)


@dataclass(frozen=True)
class BenchNoiseConfig:
    """Measure the components of a measurement's variance; takes about five minutes."""


def noise_figures(folder: Path) -> list[Figure]:
    """The components, one after another, and the deviation of a single measurement."""
    tables = load_tables(_TABLES)
    shards = random_shards(tables, _SHARDS, 20, seed=7)
    _say(f"{_SHARDS} shards on one device: again, with other batches, in another process")
    with _pool(folder / "one.db", 1) as pool:
        first = pool.measure(shards, _SETTINGS)
        others = pool.measure(shards, MeasureSettings(1024, seed=1))
        pool.measure(shards, _SETTINGS, visits=2)
    with _pool(folder / "again.db", 1) as pool:
        again = pool.measure(shards, _SETTINGS)
    _say(f"{_VISITS} visits of them on all devices at once")
    with _pool(folder / "all.db") as pool:
        count = len(pool.devices())
        pool.measure(shards, _SETTINGS, visits=_VISITS)
    one, every = _visits(folder / "one.db", shards), _visits(folder / "all.db", shards)
    iterations = statistics.mean(m.timing.error**2 for m in first if m.timing is not None)
    same_core = _variance([(a, b) for some in one for a, b in _pairs(some) if a.device == b.device])
    figures = {
        "iterations": iterations,
        "visits": same_core - iterations,
        "processes": _variance(zip(first, again, strict=True)) - same_core,
        "index batches": _variance(zip(first, others, strict=True)) - same_core,
    }
    if count > 1:
        pairs = [pair for some in every for pair in _pairs(some)]
        within = _variance([(a, b) for a, b in pairs if a.device == b.device])
        figures["cores"] = _variance([(a, b) for a, b in pairs if a.device != b.device]) - within
        figures[f"{count} devices at once instead of one"] = within - same_core
    return [
        Figure(f"deviation between {name}", "", 100 * math.sqrt(max(0.0, variance)), "%")
        for name, variance in figures.items()
    ] + [repeatability(folder)]


def repeatability(folder: Path) -> Figure:
    """The deviation of a single measurement, from shards measured by two generations of processes.

    What all of them differ by in common counts, too.
    """
    _say(f"{_REPEATED} shards in two separate processes")
    shards = random_shards(load_tables(_TABLES), _REPEATED, 20, seed=1)
    found: list[list[Measurement]] = []
    for name in ("first.db", "second.db"):
        with _pool(folder / name) as pool:
            found.append(pool.measure(shards, _SETTINGS))
    return Figure(
        f"deviation of a single measurement ({_REPEATED} shards in two processes)",
        "at most 2 % (1 % on a quiet host)",
        100 * math.sqrt(_variance(zip(*found, strict=True))),
        "%",
    )


def start_figures(folder: Path) -> list[Figure]:
    """Seconds from the pool's start to its first shard."""
    _say("a pool's start")
    (shard,) = random_shards(load_tables(_TABLES), 1, 4, seed=2)
    started = time.monotonic()
    with _pool(folder / "start.db") as pool:
        pool.devices()
        ready = time.monotonic() - started
        pool.measure([shard], _SETTINGS)
        answered = time.monotonic() - started
    return [
        Figure("from a pool's start until shards are under way", "at most 5 s", ready, "s"),
        Figure("  until the first is measured", "", answered, "s"),
    ]


@one_thread()
def flush_figures() -> list[Figure]:
    """Costs with the flush that measuring affords, over those with a flush of all of the cache."""
    _say("the flush against one of all of the cache")
    core, before = physical_cores()[-1], os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    shards = random_shards(load_tables(_TABLES), 8, 20, seed=7)
    subjects = [
        Subject(op.forward, op.gradient)
        for op in (EmbeddingOp(shard, _SETTINGS, torch.device("cpu")) for shard in shards)
    ]
    cache, references = last_level_cache_bytes(core), reference_operators()
    watches = (CpuStopwatch(core, cache, references), _FullFlush(core, cache, references))
    figures = []
    time_by_turns(subjects, watches[0], [_SAME_WORK] * len(subjects))  # it learns what will do
    for name, groups in (("by turns", [subjects]), ("alone", [[each] for each in subjects[:4]])):
        ratios = []
        for _ in range(_FLUSH_TURNS):
            for group in groups:
                options = [_SAME_WORK] * len(group)
                ours, full = (time_by_turns(group, watch, options) for watch in watches)
                ratios += [
                    math.log(a.told_at(b.quiet).total_ms / b.total_ms)
                    for a, b in zip(ours, full, strict=True)
                ]
        error = statistics.stdev(ratios) / math.sqrt(len(ratios))
        figures += [
            Figure(f"costs over those with a full flush, {name}", "within the noise of 1",
                   math.exp(statistics.mean(ratios))),
            Figure("  standard error of that", "", error),
        ]  # fmt: skip
    os.sched_setaffinity(0, before)
    return figures


class _FullFlush(CpuStopwatch):
    """Clears all of the cache, whatever it takes."""

    def clear_cache(self, most_ms: float) -> bool:  # noqa: ARG002
        return super().clear_cache(math.inf)


def _variance(pairs: Iterable[tuple[Measurement, Measurement]]) -> float:
    """Of the logarithm of one measurement, from pairs of measurements of the same shard."""
    squares = []
    for one, other in pairs:
        if one.timing is not None and other.timing is not None:
            told = other.timing.told_at(one.timing.quiet)
            squares.append(math.log(one.timing.total_ms / told.total_ms) ** 2)
    return statistics.mean(squares) / 2


def _pairs(visits: Sequence[Measurement]) -> Iterator[tuple[Measurement, Measurement]]:
    for number, one in enumerate(visits):
        for other in visits[number + 1 :]:
            yield one, other


def _visits(store: Path, shards: Sequence[Shard]) -> list[list[Measurement]]:
    """The visits of each shard, of the first index batch."""
    with MeasurementStore(store) as kept:
        visits = [visit for visit in kept.measurements() if visit.settings == _SETTINGS]
    return [[v for v in visits if v.shard.digest == shard.digest] for shard in shards]


@contextmanager
def _pool(store: Path, most_devices: int | None = None) -> Iterator[BenchmarkPool]:
    pool = BenchmarkPool(store, kind="cpu", most_devices=most_devices)
    try:
        yield pool
    finally:
        pool.close()
        pool.shutdown()


def main(_: BenchNoiseConfig) -> None:
    """Take the figures and print them."""
    with tempfile.TemporaryDirectory() as folder, ray_cluster():
        place = Path(folder)
        print_figures([*start_figures(place), *noise_figures(place), *flush_figures()])


def _say(what: str) -> None:
    cli.console.print(f"measuring: {what}")


if __name__ == "__main__":
    cli.run_command(main, BenchNoiseConfig)
