#!/usr/bin/env python
"""Measure random shards of embedding tables on all devices of the Ray cluster; keep the costs."""

import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autoshard.benchmark import BenchmarkPool, Measurement, MeasurementStore, MeasureSettings
from autoshard.benchmark.hardware import AskedKind, DeviceInfo
from autoshard.experiments import tracking
from autoshard.experiments.collecting.pacing import Pace, stream_within
from autoshard.experiments.console import cli
from autoshard.experiments.console.budget import Budget
from autoshard.experiments.console.outputs import check_file
from autoshard.experiments.console.progress import following
from autoshard.experiments.console.ray_cluster import ray_cluster
from autoshard.experiments.tracking.data_sources import short_name, store_source, tables_source
from autoshard.experiments.tracking.storage import Storage
from autoshard.workload import (
    EmbeddingTable,
    OperatorOptions,
    Shard,
    UserError,
    documents,
    load_tables,
    random_exchanges,
    random_shards,
)
from autoshard.workload.bounds import check_bounds
from autoshard.workload.operators import Optimizer, Weights
from autoshard.workload.sampling import MOST_TASK_DEVICES
from autoshard.workload.synthetic import PROFILES, default_profile

_KEEP_SECONDS = 60.0  # between two copies to --storage
# Of the seconds: for shards, where all-to-alls are asked for as well. These take about as long as a
# shard each, and a few dozen teach what they cost.
_SHARDS_SHARE = 0.8


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
    devices: AskedKind = "auto"
    """What to measure on; auto takes GPUs where the cluster has any."""
    storage: str | None = None
    """A shared path or object store (s3://...) that the store's content is fetched from and kept in
    (as Parquet) every minute."""
    seconds: float | None = None
    """Measure no longer than this, from the start of the command: the first of the shards, which
    are in random order; how many were left out is told. By default as long as it takes."""
    json: Path | None = None
    """Write a summary here."""
    mlflow_uri: str | None = None
    """Where to log; by default MLFLOW_TRACKING_URI, else sqlite:///mlflow.db."""


@dataclass(frozen=True)
class Summary:
    """What a run did.

    Args:
        requested: shards.
        measured: of these.
        reused: of these, from the store.
        failed: of these.
        left_out: of these, as --seconds were spent.
        seconds: that measuring took.
        promised_seconds: that it was told to take, at its start; None if too few were measured to
            tell.
        shards_per_second: measured ones.
        duty_cycle: share of the devices' time inside timed operators.
        devices: name, kind and node of each.
        median_spread: of the costs.
    """

    requested: int
    measured: int
    reused: int
    failed: int
    left_out: int
    seconds: float
    promised_seconds: float | None
    shards_per_second: float
    duty_cycle: float
    devices: list[dict[str, str]]
    median_spread: float


def main(config: CollectConfig) -> None:
    """Measure, print the summary, write it, log it."""
    budget = Budget(config.seconds)
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
    check_bounds(config, at_least={"seed": 0, "num_exchanges": 0})
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
        for_shards = budget.part(_SHARDS_SHARE) if config.num_exchanges else budget
        summary = collect(pool, shards, settings, for_shards, storage)
        report(summary, config)
        collect_exchanges(pool, tables, config.num_exchanges, batch_size, config.seed, budget)
        if config.json is not None:
            documents.write(config.json, asdict(summary))
        told = {n: v for n, v in asdict(summary).items() if isinstance(v, int | float)}
        run.metrics(told)
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
    budget: Budget | None = None,
    storage: Storage | None = None,
) -> Summary:
    """Measure the shards with a progress bar, as many as the budget allows.

    Tells how long it will take as soon as that is known. Ctrl-C keeps what was measured.
    """
    budget = budget or Budget()
    devices = pool.devices()
    cli.console.print(
        f"measuring {len(shards)} shards, batch {settings.batch_size:,}, on "
        + ", ".join(device.name for device in devices)
    )
    answers: list[Measurement] = []
    pace, promised = Pace(shards, settings.batch_size, len(devices)), None
    started = kept = time.monotonic()
    stream = stream_within(pool, shards, settings, pace, budget, retry_failed=True)
    try:
        with following(len(shards), "shards", lambda: budget.at_most(pace.left_s())) as step:
            for _, measurement in stream:
                answers.append(measurement)
                step()
                if promised is None and (left := pace.left_s()) is not None:
                    promised = _promised(pace.passed_s, left, budget)
                if storage is not None and time.monotonic() - kept > _KEEP_SECONDS:
                    storage.keep_store(pool.store)
                    kept = time.monotonic()
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"{len(answers)} of {len(shards)} shards are in {pool.store}; run again to go on"
        ) from None
    for notice in pool.notices():
        cli.console.print(f"note: {notice}", markup=False)
    seconds = time.monotonic() - started
    return summarise(answers, devices, seconds, len(shards), promised)


def _promised(passed_s: float, left_s: float, budget: Budget) -> float:
    """Seconds that measuring will take in all, which is told."""
    if left_s <= budget.left_s():
        cli.console.print(f"  this will take {passed_s + left_s:.0f} s, {left_s:.0f} more")
        return passed_s + left_s
    cli.console.print(
        f"  all would take {passed_s + left_s:.0f} s, more than {budget} leave for it: some will "
        "be left out",
        soft_wrap=True,
    )
    return passed_s + budget.left_s()


def collect_exchanges(
    pool: BenchmarkPool,
    tables: Sequence[EmbeddingTable],
    count: int,
    batch_size: int,
    seed: int,
    budget: Budget,
) -> None:
    """Measure `count` random all-to-alls, those that are not in the store yet, within the budget.

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
        for number, dims in enumerate(exchanges):
            if budget.is_spent:
                cli.console.print(
                    f"stopped by {budget}: {number} of {len(exchanges)} all-to-alls measured; run "
                    "again to go on"
                )
                return
            pool.exchange(dims, batch_size)
            step()


def summarise(
    answers: Sequence[Measurement],
    devices: Sequence[DeviceInfo],
    seconds: float,
    requested: int,
    promised_seconds: float | None = None,
) -> Summary:
    """The figures of a run over these devices."""
    fresh = [answer for answer in answers if not answer.reused]
    timings = [answer.timing for answer in fresh if answer.timing is not None]
    busy = sum(timing.operator_seconds for timing in timings)
    known = [answer.timing.spread for answer in answers if answer.timing is not None]
    return Summary(
        requested=requested,
        measured=len(timings),
        reused=sum(answer.reused and answer.ok for answer in answers),
        failed=sum(not answer.ok for answer in answers),
        left_out=requested - len(answers),
        seconds=round(seconds, 3),
        promised_seconds=None if promised_seconds is None else round(promised_seconds, 3),
        shards_per_second=round(len(fresh) / seconds, 3) if fresh else 0.0,
        duty_cycle=round(busy / (seconds * len(devices)), 4),
        devices=[{"name": d.name, "kind": d.kind, "node": d.node} for d in devices],
        median_spread=round(statistics.median(known), 5) if known else 0.0,
    )


def report(summary: Summary, config: CollectConfig) -> None:
    """The summary for people."""
    if summary.left_out:
        cli.console.print(
            f"stopped by --seconds {config.seconds:g}: {summary.requested - summary.left_out} of "
            f"{summary.requested} shards measured; run again to go on",
            soft_wrap=True,
        )
    lines: list[tuple[str, Any]] = [
        ("measured", f"{summary.measured} in {summary.seconds:.1f} s"),
        ("reused", f"{summary.reused} from {config.store}"),
        ("failed", summary.failed),
        ("duty cycle", f"{summary.duty_cycle:.2f} of {len(summary.devices)} devices' time"),
        ("median spread", f"{summary.median_spread:.1%}"),
    ]
    for name, value in lines:
        cli.console.print(f"  {name:<14} {value}")


if __name__ == "__main__":
    cli.run_command(main, CollectConfig)
