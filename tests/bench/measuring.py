"""Metrics of measuring: timing against fbgemm's, utilization of the pool, memory, store."""

import random
import time
from collections.abc import Sequence
from pathlib import Path

from autoshard.benchmark import Measurement, MeasurementStore, Timing, TimingOptions
from autoshard.benchmark.backends.cpu import CpuBackend, CpuStopwatch
from autoshard.benchmark.measurement import Directions
from autoshard.experiments.collecting.collection import Summary, collect, summarise
from autoshard.experiments.console.budget import Budget
from autoshard.workload import EmbeddingTable, Shard, load_tables, random_shards
from bench.metric import Metric
from bench.workbench import SETTINGS, TABLES, cpu_pool, on_one_core, say
from bench.yardstick import compare_with_fbgemm

_SHARDS, _MAX_TABLES = 200, 20
_GAIN_SHARDS, _GAIN_TURNS = 30, 2
_READ = 100_000
_COLLECTED, _MANY, _BUDGET_SECONDS = 100, 1_600, 20.0  # shards; more than the budget allows
_SAME_WORK = TimingOptions(precision=0.0, max_iterations=16)


def yardstick_metrics() -> list[Metric]:
    """Compares our timing with fbgemm's own benchmark, on one operator and batch."""
    say("our timing against fbgemm_gpu.tbe.bench")
    with on_one_core() as core:
        ratios = compare_with_fbgemm(CpuBackend(), CpuStopwatch([core]))
    return [
        Metric("our timing over fbgemm's, whole step", "0.95 to 1.05", ratios.step),
        Metric("our timing over fbgemm's, backward", "0.95 to 1.05", ratios.backward),
    ]


def collecting_metrics(folder: Path) -> list[Metric]:
    """Measures predicted over actual time, and time taken over a budget."""
    tables = load_tables(TABLES)
    with cpu_pool(folder / "collected.db") as pool:
        shards = random_shards(tables, _COLLECTED, _MAX_TABLES, 11)
        every = collect(pool, {SETTINGS: shards})
        many = random_shards(tables, _MANY, _MAX_TABLES, 12)
        hurried = collect(pool, {SETTINGS: many}, Budget(_BUDGET_SECONDS))
    predicted = every.promised_seconds
    ratio = None if predicted is None else predicted / every.seconds
    taken = hurried.seconds / _BUDGET_SECONDS
    return [
        Metric(f"predicted over actual time to collect {_COLLECTED} shards", "0.67 to 1.33", ratio),
        Metric(f"time taken over budget, --seconds {_BUDGET_SECONDS:g}", "0.7 to 1.1", taken),
    ]


def measuring_metrics(folder: Path) -> list[Metric]:
    """Measures the pool from its start to reading its measurements."""
    tables = load_tables(TABLES)
    return [
        *_start_metrics(tables, folder),
        *_work_metrics(tables, folder),
        _gain(tables, folder),
        _actor_memory(folder),
        _read_speed(tables, folder),
    ]


def _start_metrics(tables: Sequence[EmbeddingTable], folder: Path) -> list[Metric]:
    """Measures the time from the pool's start to its first shard."""
    say("a pool's start")
    (shard,) = random_shards(tables, 1, 4, seed=2)
    started = time.monotonic()
    with cpu_pool(folder / "start.db") as pool:
        pool.devices()
        ready = time.monotonic() - started
        pool.measure([shard], SETTINGS)
        answered = time.monotonic() - started
    return [
        Metric("start-up time of the pool", "at most 5 s", ready, "s"),
        Metric("time from the pool's start to its first measurement", "", answered, "s"),
    ]


def _work_metrics(tables: Sequence[EmbeddingTable], folder: Path) -> list[Metric]:
    """Measures utilization with shards as collect_costs.py draws them."""
    say(f"{_SHARDS} shards on all devices")
    shards = random_shards(tables, _SHARDS, _MAX_TABLES)
    every = _collected(shards, folder / "all.db", TimingOptions())
    return [
        Metric(f"duty cycle over {_SHARDS} shards", "at least 0.80", every.duty_cycle),
        Metric("shards measured per second, all devices", "", every.shards_per_second),
        Metric("median relative half width of a cost's 95 % interval", "at most 0.02",
               every.median_spread),
    ]  # fmt: skip


def _gain(tables: Sequence[EmbeddingTable], folder: Path) -> Metric:
    """Compares all devices with one, in turns, with the same shards and number of iterations."""
    say(f"{_GAIN_SHARDS} shards on one device and on all, by turns")
    shards = random_shards(tables, _GAIN_SHARDS, _MAX_TABLES)
    seconds: dict[int | None, float] = {1: 0.0, None: 0.0}
    for turn in range(_GAIN_TURNS):
        for most in seconds:
            summary = _collected(shards, folder / f"{turn}-{most}.db", _SAME_WORK, most)
            seconds[most] += summary.seconds
    gain = seconds[1] / seconds[None]
    return Metric("shards per second, all devices over one", "at least 1.8 with two", gain)


def _actor_memory(folder: Path) -> Metric:
    """Measures the peak memory of an actor beyond the bytes of its largest shard."""
    say("memory of an actor")
    shards = [
        Shard.of_tables([EmbeddingTable(f"t{n}", rows, 64, 8.0) for n in range(16)])
        for rows in (1_000, 400_000, 50_000)
    ]
    with cpu_pool(folder / "memory.db", max_devices=1) as pool:
        pool.measure(shards, SETTINGS, TimingOptions(max_iterations=9))
        (peak,) = pool.peak_bytes().values()
    largest = max(map(SETTINGS.needed_bytes, shards))
    beyond_gb = (peak - largest) / 1e9
    return Metric("peak memory of an actor beyond its shard", "at most 1.07 GB", beyond_gb, "GB")


def _read_speed(tables: Sequence[EmbeddingTable], folder: Path) -> Metric:
    """Measures the time to read 100,000 measurements with their shards from a store."""
    say(f"reading {_READ:,} measurements")
    rng = random.Random(0)
    timing = Timing(1.0, 2.0, Directions.of(0.01), 12, 0, 0.0, 0.05)
    known: dict[str, Shard] = {}
    while len(known) < _READ:
        shard = Shard.of_tables(rng.sample(tables, rng.randint(2, 20)))
        known.setdefault(shard.digest, shard)
    path = folder / "read.db"
    with MeasurementStore(path) as store:
        store.put(
            Measurement(shard, SETTINGS, "hw", "v", "ok", "cpu0", "n", 1.0, timing)
            for shard in known.values()
        )
    started = time.perf_counter()
    with MeasurementStore(path) as store:
        count = len(store.measurements())
    seconds = time.perf_counter() - started
    name = f"time to read {_READ:,} measurements"
    return Metric(name, "at most 1 s", seconds * _READ / count, "s")


def _collected(
    shards: Sequence[Shard], store: Path, timing: TimingOptions, max_devices: int | None = None
) -> Summary:
    """Measures the shards on a new pool."""
    with cpu_pool(store, max_devices) as pool:
        devices = pool.devices()
        started = time.monotonic()
        answers = [answer for _, answer in pool.stream(shards, SETTINGS, timing)]
        seconds = time.monotonic() - started
    return summarise(answers, devices, seconds, len(answers))
