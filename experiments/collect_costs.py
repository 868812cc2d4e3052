#!/usr/bin/env python
"""Measure random shards of embedding tables on all devices of the Ray cluster; keep the costs."""

import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from benchmark import BenchmarkPool, Measurement, MeasurementStore, MeasureSettings
from benchmark.hardware import DeviceInfo
from experiments import cli, tracking
from experiments.data_sources import short_name, store_source, tables_source
from experiments.joining import ray_cluster
from experiments.outputs import check_file
from experiments.progress import following
from experiments.storage import Storage
from workload import (
    EmbeddingTable,
    OperatorOptions,
    Shard,
    UserError,
    documents,
    load_tables,
    random_exchanges,
    random_shards,
)
from workload.operators import Optimizer, Weights
from workload.sampling import MOST_TASK_DEVICES
from workload.synthetic import PROFILES, default_profile

_KEEP_SECONDS = 60.0  # between two copies to --storage


@dataclass(frozen=True)
class CollectConfig:
    """Measure random shards of embedding tables on every device of the Ray cluster.

    What is in the store already is not measured again: run it again to go on where it stopped.
    """

    tables: str = "synthetic:200:1"
    """A CSV, JSON, Parquet or dlrm_datasets file, or synthetic:N[:SEED[:small|full]]."""
    num_shards: int = 300
    """Different shards to measure."""
    max_tables: int = 20
    """A shard holds 1 to this many tables."""
    num_exchanges: int = 0
    """All-to-alls to measure as well, of random plans for 2 to 8 devices."""
    batch_size: int | None = None
    """Samples of a batch; by default 1,024 on a CPU and 65,536 on a machine with a GPU."""
    augment: bool = False
    """Take column slices too: halve dims at random, down to 4 (NeuroShard)."""
    seed: int = 0
    """Chooses the shards."""
    weights: Weights = "fp32"
    """Type of the embedding weights."""
    optimizer: Optimizer = "rowwise_adagrad"
    """Optimizer fused into the backward pass."""
    store: Path = Path("costs.db")
    """SQLite file that keeps what is measured."""
    devices: Literal["auto", "cpu", "cuda"] = "auto"
    """What to measure on; auto takes GPUs where the cluster has any."""
    storage: str | None = None
    """A shared path or object store (s3://...) that the store's content is fetched from and kept in
    (as Parquet) every minute."""
    json: Path | None = None
    """Write a summary here."""
    mlflow_uri: str | None = None
    """Where to log; by default MLFLOW_TRACKING_URI, else sqlite:///mlflow.db."""


@dataclass(frozen=True)
class Summary:
    """What a run did. `duty_cycle` is the share of device wall time inside the operator."""

    requested: int
    measured: int
    reused: int
    failed: int
    seconds: float
    shards_per_second: float
    duty_cycle: float
    devices: list[dict[str, str]]
    median_spread: float


def main(config: CollectConfig) -> None:
    """Measure, print the summary, write it, log it."""
    tables = load_tables(config.tables)
    shards = random_shards(
        tables, config.num_shards, config.max_tables, config.seed, config.augment
    )
    if len(shards) < config.num_shards:
        cli.console.print(f"{config.tables} admits only {len(shards)} different shards")
    batch_size = config.batch_size
    if batch_size is None:
        batch_size = PROFILES[default_profile()].batch_size
    settings = MeasureSettings(batch_size, OperatorOptions(config.weights, config.optimizer))
    check_file(config.json, "--json")
    if min(config.seed, config.num_exchanges) < 0:
        raise UserError("--seed and --num-exchanges must be at least 0")
    storage = None if config.storage is None else Storage(config.storage)
    if storage is not None:
        known = storage.fetch_store(config.store)
        cli.console.print(f"{known} measurements came from {config.storage}", soft_wrap=True)
    MeasurementStore(config.store).close()  # a store that cannot be used is told before work starts
    parameters = {**asdict(config), "batch_size": batch_size}
    name = f"collect {len(shards)} shards of {short_name(config.tables)}"
    with (
        tracking.tracked_run("collect_costs", name, parameters, config.mlflow_uri) as run,
        ray_cluster(),
        ExitStack() as stack,
    ):
        if storage is not None:  # also after Ctrl-C
            stack.callback(storage.keep_store, config.store)
        pool = BenchmarkPool(config.store, kind=config.devices)
        summary = collect(pool, shards, settings, storage)
        report(summary, config.store)
        collect_exchanges(pool, tables, config.num_exchanges, batch_size, config.seed)
        if config.json is not None:
            documents.write(config.json, asdict(summary))
        run.metrics({name: value for name, value in asdict(summary).items() if name != "devices"})
        run.tags({"hardware": pool.devices()[0].hardware})
        pool.close()
        run.data(tables_source(config.tables, tables), store_source(config.store))
        with tempfile.TemporaryDirectory() as folder, MeasurementStore(config.store) as store:
            copy = Path(folder) / config.store.name
            store.copy_to(copy)
            run.artifact(copy)


def collect(
    pool: BenchmarkPool,
    shards: Sequence[Shard],
    settings: MeasureSettings,
    storage: Storage | None = None,
) -> Summary:
    """Measure the shards with a progress bar; Ctrl-C keeps what was measured."""
    devices = pool.devices()
    cli.console.print(
        f"measuring {len(shards)} shards, batch {settings.batch_size:,}, on "
        + ", ".join(device.name for device in devices)
    )
    answers: list[Measurement] = []
    started = kept = time.monotonic()
    try:
        with following(len(shards), "shards") as step:
            for _, measurement in pool.stream(shards, settings, retry_failed=True):
                answers.append(measurement)
                step()
                if storage is not None and time.monotonic() - kept > _KEEP_SECONDS:
                    storage.keep_store(pool.store)
                    kept = time.monotonic()
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"{len(answers)} of {len(shards)} shards are in {pool.store}; run again to go on"
        ) from None
    for notice in pool.notices():
        cli.console.print(f"note: {notice}", markup=False)
    return summarise(answers, devices, time.monotonic() - started)


def collect_exchanges(
    pool: BenchmarkPool,
    tables: Sequence[EmbeddingTable],
    count: int,
    batch_size: int,
    seed: int,
) -> None:
    """Measure `count` random all-to-alls, those that are not in the store yet.

    On GPUs each rank needs its own; on a CPU several may share a core.
    """
    if count == 0:
        return
    devices = pool.devices()
    most = MOST_TASK_DEVICES if devices[0].kind == "cpu" else len(devices)
    if most < 2:
        raise UserError("an all-to-all needs at least two devices, the cluster has one")
    exchanges = random_exchanges(tables, count, most, seed)
    with following(len(exchanges), "all-to-alls") as step:
        for dims in exchanges:
            pool.exchange(dims, batch_size)
            step()


def summarise(
    answers: Sequence[Measurement], devices: Sequence[DeviceInfo], seconds: float
) -> Summary:
    """The figures of a run over these devices."""
    fresh = [answer for answer in answers if not answer.reused]
    timings = [answer.timing for answer in fresh if answer.timing is not None]
    busy = sum(timing.operator_seconds for timing in timings)
    known = [answer.timing.spread for answer in answers if answer.timing is not None]
    return Summary(
        requested=len(answers),
        measured=len(timings),
        reused=sum(answer.reused and answer.ok for answer in answers),
        failed=sum(not answer.ok for answer in answers),
        seconds=round(seconds, 3),
        shards_per_second=round(len(fresh) / seconds, 3) if fresh else 0.0,
        duty_cycle=round(busy / (seconds * len(devices)), 4),
        devices=[{"name": d.name, "kind": d.kind, "node": d.node} for d in devices],
        median_spread=round(statistics.median(known), 5) if known else 0.0,
    )


def report(summary: Summary, store: Path) -> None:
    """The summary for people."""
    lines: list[tuple[str, Any]] = [
        ("measured", f"{summary.measured} in {summary.seconds:.1f} s"),
        ("reused", f"{summary.reused} from {store}"),
        ("failed", summary.failed),
        ("duty cycle", f"{summary.duty_cycle:.2f} of {len(summary.devices)} devices' time"),
        ("median spread", f"{summary.median_spread:.1%}"),
    ]
    for name, value in lines:
        cli.console.print(f"  {name:<14} {value}")


if __name__ == "__main__":
    cli.run_command(main, CollectConfig)
