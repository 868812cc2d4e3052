#!/usr/bin/env python
"""Measure random shards of embedding tables on all devices of the Ray cluster; keep the costs."""

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autoshard.benchmark import BenchmarkPool, MeasurementStore, MeasureSettings
from autoshard.benchmark.backends import AskedKind
from autoshard.cost_model import EstimatedCosts, load_model
from autoshard.cost_model.proposals import CANDIDATES, most_doubted
from autoshard.experiments import tracking
from autoshard.experiments.collecting.collection import Summary, collect, collect_exchanges
from autoshard.experiments.console import cli
from autoshard.experiments.console.budget import Budget
from autoshard.experiments.console.outputs import check_file
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
    random_shards,
)
from autoshard.workload.bounds import check_bounds
from autoshard.workload.operators import Optimizer, Weights
from autoshard.workload.sampling import Room
from autoshard.workload.synthetic import PROFILES, default_profile

# Of the seconds: for shards, where all-to-alls are asked for as well. These take about as long as a
# shard each, and a few dozen teach what they cost.
_SHARDS_SHARE = 0.8


@dataclass(frozen=True)
class CollectConfig:
    """Measure random shards of embedding tables on every device of the Ray cluster.

    What is in the store already is not measured again: run it again to go on where it stopped.
    """

    tables: str = "synthetic:200:1"
    """A CSV, JSON, Parquet or dlrm_datasets file, criteo, mlperf:dlrm-v2, wide:N or synthetic:N."""
    num_shards: int = 300
    """Different shards to measure."""
    max_tables: int = 20
    """A shard holds 1 to this many tables."""
    num_exchanges: int = 0
    """All-to-alls to measure as well, of random plans for 2 to 8 devices."""
    batch_size: tuple[int, ...] = ()
    """Samples of a batch; several take turns, with other shards for each. By default 1,024 on a CPU
    and 65,536 on a machine with a GPU."""
    max_gb: float | None = None
    """Fill shards only so far that their weights, and what a batch looks up, are at most so many GB
    each (in fp32)."""
    doubted_by: Path | None = None
    """Of 20 times as many random shards take those that this cost model's networks disagree on
    most, these first: its folder, or the name of one that is shipped."""
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


def main(config: CollectConfig) -> None:
    """Measure, print the summary, write it, log it."""
    budget = Budget(config.seconds)
    batch_sizes = config.batch_size or (PROFILES[default_profile()].batch_size,)
    if len(set(batch_sizes)) < len(batch_sizes):
        raise UserError("--batch-size names a size twice")
    operator = OperatorOptions(config.weights, config.optimizer)
    check_file(config.json, "--json")
    check_bounds(config, at_least={"seed": 0, "num_exchanges": 0}, more_than={"max_gb": 0})
    tables = load_tables(config.tables)
    shards = {
        batch: _shards(config, tables, batch, place, len(batch_sizes))
        for place, batch in enumerate(batch_sizes)
    }
    requested = sum(map(len, shards.values()))
    if requested < config.num_shards:
        cli.console.print(f"{config.tables} admits only {requested} different shards")
    storage = None if config.storage is None else Storage(config.storage)
    if storage is not None:
        known = storage.fetch_store(config.store)
        cli.console.print(f"{known} measurements came from {config.storage}", soft_wrap=True)
    MeasurementStore(config.store).close()  # a store that cannot be used is told before work starts
    parameters = {**asdict(config), "batch_size": batch_sizes}
    name = f"collect {requested} shards of {short_name(config.tables)}"
    with (
        tracking.tracked_run("collect_costs", name, parameters, config.mlflow_uri) as run,
        ray_cluster(),
        ExitStack() as stack,
    ):
        if storage is not None:  # also after Ctrl-C
            stack.callback(storage.keep_store, config.store)
        pool = BenchmarkPool(config.store, kind=config.devices)
        for_shards = budget.part(_SHARDS_SHARE) if config.num_exchanges else budget
        runs = []
        for number, (batch_size, some) in enumerate(shards.items()):
            settings = MeasureSettings(batch_size, operator)
            this = for_shards.part(1 / (len(shards) - number))
            runs.append(collect(pool, some, settings, this, storage))
        summary = Summary.together(runs)
        report(summary, config)
        for place, batch_size in enumerate(batch_sizes):
            exchanges = _share(config.num_exchanges, place, len(batch_sizes))
            collect_exchanges(pool, tables, exchanges, batch_size, config.seed, budget)
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


def _shards(
    config: CollectConfig,
    tables: Sequence[EmbeddingTable],
    batch_size: int,
    place: int,
    several: int,
) -> list[Shard]:
    """Those to be measured with the batch size at one of several places, others than elsewhere."""
    room = None if config.max_gb is None else Room(config.max_gb * 1e9, batch_size)
    count = _share(config.num_shards, place, several)
    drawn = random_shards(
        tables,
        count if config.doubted_by is None else count * CANDIDATES,
        config.max_tables,
        config.seed * several + place,
        config.augment,
        room,
    )
    if config.doubted_by is None:
        return drawn
    return most_doubted(EstimatedCosts(load_model(config.doubted_by), batch_size), drawn, count)


def _share(count: int, place: int, several: int) -> int:
    """Of so many things, those of one of several batch sizes."""
    return count // several + (place < count % several)


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
