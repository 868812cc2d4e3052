#!/usr/bin/env python
"""Measure the figures that the README quotes, on this machine."""

import os
import platform
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from autoshard.benchmark import (
    BenchmarkPool,
    Measurement,
    MeasurementStore,
    MeasureSettings,
    Timing,
    TimingOptions,
)
from autoshard.benchmark.hardware import cpu_fingerprint, physical_cores
from autoshard.benchmark.yardstick import compare_with_fbgemm
from autoshard.cost_model.training import one_thread
from autoshard.experiments.collect_costs import Summary, summarise
from autoshard.experiments.console import cli
from autoshard.experiments.console.ray_cluster import ray_cluster
from autoshard.experiments.figures.figure import Figure, print_figures
from autoshard.experiments.figures.model import learning_figures, promise_figures
from autoshard.experiments.figures.noise import flush_figures, noise_figures, start_figures
from autoshard.experiments.figures.policy import (
    memory_figures,
    plan_figures,
    speed_figures,
    training_figures,
)
from autoshard.experiments.figures.pool import scale_figures
from autoshard.experiments.figures.sweep import sweep_figures
from autoshard.workload import EmbeddingTable, Shard, documents, load_tables, random_shards

_SETTINGS = MeasureSettings(1024)
_TABLES = "synthetic:200:1:small"


@dataclass(frozen=True)
class BenchConfig:
    """Measure the figures that the README quotes; takes about fifteen minutes."""

    json: Path | None = None
    """Write the figures here."""


def main(config: BenchConfig) -> None:
    """Take all figures and print them."""
    tables = load_tables(_TABLES)
    figures = [*yardstick(), read_speed(tables)]
    _say("training on what is shipped")
    figures += learning_figures()
    _say("the game and sharders")
    figures += [*speed_figures(), *memory_figures(), *flush_figures()]
    with tempfile.TemporaryDirectory() as folder, ray_cluster():
        place = Path(folder)
        figures += [
            *pool_figures(tables, place),
            *start_figures(place),
            *noise_figures(place),
            actor_memory(place),
            *scale_figures(place),
            *promise_figures(place),
            *plan_figures(place),
            *training_figures(place),
            *sweep_figures(place),
        ]
    today = datetime.now(tz=UTC).date().isoformat()
    print_figures(figures)
    if config.json is not None:
        machine = {"date": today, "host": platform.node(), "cpu": cpu_fingerprint()}
        documents.write(config.json, {**machine, "figures": [vars(f) for f in figures]})


def yardstick() -> list[Figure]:
    """Our timing over that of fbgemm's own benchmark, on one operator and batch."""
    _say("our timing against fbgemm_gpu.tbe.bench")
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {physical_cores()[-1]})
    with one_thread():
        ratios = compare_with_fbgemm(torch.device("cpu"), physical_cores()[-1])
    os.sched_setaffinity(0, cores)
    return [
        Figure("our timing / fbgemm's, a whole step", "0.95 to 1.05", ratios.step),
        Figure("our timing / fbgemm's, backward", "0.95 to 1.05", ratios.backward),
    ]


def read_speed(tables: Sequence[EmbeddingTable]) -> Figure:
    """Seconds to read 100,000 measurements, shards and all, from a store."""
    _say("reading 100,000 measurements")
    rng = random.Random(0)  # noqa: S311 - nothing is kept secret with it
    timing = Timing(1.0, 2.0, 0.01, 12, 0, 0.0, 0.05)
    known: dict[str, Shard] = {}
    while len(known) < 100_000:
        shard = Shard.of_tables(rng.sample(tables, rng.randint(2, 20)))
        known.setdefault(shard.digest, shard)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "costs.db"
        with MeasurementStore(path) as store:
            store.put(
                Measurement(shard, _SETTINGS, "hw", "v", "ok", "cpu0", "n", 1.0, timing)
                for shard in known.values()
            )
        started = time.perf_counter()
        with MeasurementStore(path) as store:
            count = len(store.measurements())
        seconds = time.perf_counter() - started
    return Figure("reading 100,000 measurements", "at most 1 s", seconds * 1e5 / count, "s")


def pool_figures(tables: Sequence[EmbeddingTable], folder: Path) -> list[Figure]:
    """Duty cycle over 200 shards on all devices, and what all devices gain over one.

    The gain is a ratio over the same shards with the same number of undisturbed iterations, taken
    by turns; and once more over all iterations, which leaves out how often they were repeated.
    """
    shards = random_shards(tables, 200, 20)
    _say("200 shards on all devices")
    every, _ = _collect(shards, folder / "all.db", TimingOptions())
    _say("60 of them on one device and on all, by turns")
    same_work = TimingOptions(precision=0.0, max_iterations=16)
    seconds: dict[int | None, float] = {1: 0.0, None: 0.0}
    iterations: dict[int | None, int] = {1: 0, None: 0}
    for turn in range(2):
        for most in seconds:
            store = folder / f"{turn}-{most}.db"
            summary, tried = _collect(shards[:60], store, same_work, most)
            seconds[most] += summary.seconds
            iterations[most] += tried
    count = len(every.devices)
    return [
        Figure("duty cycle over 200 shards", "at least 0.80", every.duty_cycle),
        Figure("shards a second, all devices", "", every.shards_per_second),
        Figure("median spread of a measurement", "at most 0.02", every.median_spread),
        Figure(
            f"{count} devices over one, shards a second",
            "2: at least 1.8",
            seconds[1] / seconds[None],
        ),
        Figure(
            f"{count} devices over one, iterations a second",
            "",
            iterations[None] / seconds[None] / (iterations[1] / seconds[1]),
        ),
    ]


def actor_memory(folder: Path) -> Figure:
    """Peak memory of an actor beyond the bytes of the largest shard that it measured."""
    _say("memory of an actor")
    pool = _pool(folder / "memory.db", most_devices=1)
    shards = [
        Shard.of_tables([EmbeddingTable(f"t{n}", rows, 64, 8.0) for n in range(16)])
        for rows in (1_000, 400_000, 50_000)
    ]
    pool.measure(shards, _SETTINGS, TimingOptions(max_iterations=9))
    (peak,) = pool.peak_bytes().values()
    operator = _SETTINGS.operator
    largest = max(
        operator.shard_bytes(shard) + operator.working_bytes(shard, _SETTINGS.batch_size)
        for shard in shards
    )
    pool.shutdown()
    return Figure(
        "actor's peak memory beyond its shard", "at most 1.07 GB", (peak - largest) / 1e9, "GB"
    )


def _collect(
    shards: Sequence[Shard], store: Path, timing: TimingOptions, most_devices: int | None = None
) -> tuple[Summary, int]:
    """The summary, and all iterations that were made, disturbed ones too."""
    pool = _pool(store, most_devices)
    devices = pool.devices()
    started = time.monotonic()
    answers = [answer for _, answer in pool.stream(shards, _SETTINGS, timing)]
    seconds = time.monotonic() - started
    pool.shutdown()
    timings = [answer.timing for answer in answers if answer.timing is not None]
    tried = sum(timing.iterations for timing in timings)
    return summarise(answers, devices, seconds, len(answers)), tried


def _pool(store: Path, most_devices: int | None = None) -> BenchmarkPool:
    return BenchmarkPool(store, kind="cpu", most_devices=most_devices)


def _say(what: str) -> None:
    cli.console.print(f"measuring: {what}")


if __name__ == "__main__":
    cli.run_command(main, BenchConfig)
