#!/usr/bin/env python
"""Measure random shards of embedding tables on all devices of the Ray cluster."""

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autoshard.benchmark import BenchmarkPool, MeasurementStore, MeasureSettings
from autoshard.benchmark.backends import RequestedKind
from autoshard.cost_model import EstimatedCosts, load_model
from autoshard.cost_model.pricing.proposals import CANDIDATES, most_uncertain
from autoshard.experiments.collecting.collection import Summary, collect, collect_exchanges
from autoshard.experiments.console import cli
from autoshard.experiments.console.budget import Budget
from autoshard.experiments.console.inputs import check_file
from autoshard.experiments.console.ray_cluster import ray_cluster
from autoshard.experiments.tracking import runs
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
from autoshard.workload.sampling import ShardLimit
from autoshard.workload.sources.synthetic import PROFILES, default_profile
from autoshard.workload.tables.operators import Optimizer, Weights

# Share of the seconds for shards if all-to-alls are measured as well. An all-to-all takes about as
# long as a shard, and a few dozen suffice to fit a link.
_SHARDS_SHARE = 0.8
_MIN_SHARDS_OF_PROBE = 100  # fewer take little longer than a probe of the machine


@dataclass(frozen=True)
class CollectConfig:
    """Measure random shards of embedding tables on every device of the Ray cluster.

    Shards that are in the store are not measured again: an interrupted run continues.
    """

    tables: str = "synthetic:200:1"
    """A CSV, JSON, Parquet or dlrm_datasets file, criteo, mlperf:dlrm-v2, wide:N or synthetic:N."""
    num_shards: int = 300
    """Number of different shards."""
    max_tables: int = 20
    """Maximum number of tables of a shard."""
    num_exchanges: int = 0
    """Number of all-to-alls to measure, of random plans for 2 to 8 devices. All-reduces inside a
    node and among all nodes come after them."""
    batch_size: tuple[int, ...] = ()
    """Samples of a batch. Several batch sizes share the shards and the seconds. Default: 1,024 on a
    CPU, 65,536 on a machine with a GPU."""
    max_gb: float | None = None
    """Maximum GB (of 10^9 bytes) of a shard's weights, and of the fp32 rows that a batch looks up.
    Default: no limit."""
    query_by_committee: Path | None = None
    """Folder of a cost model, or the name of a shipped one. Of 20 times as many random shards,
    those with the largest disagreement of its networks are measured."""
    augment: bool = False
    """Include column slices: split tables by columns at random, down to 4 (NeuroShard)."""
    seed: int = 0
    """Seed of the shards."""
    weights: Weights = "fp32"
    """Data type of the embedding weights."""
    optimizer: Optimizer = "rowwise_adagrad"
    """Optimizer fused into the backward pass."""
    store: Path = Path("costs.db")
    """SQLite file that keeps all measurements."""
    devices: RequestedKind = "auto"
    """Kind of devices; auto: GPUs if the cluster has any."""
    storage: str | None = None
    """Shared path or object store (s3://...) from which measurements are fetched, and to which they
    are copied every minute, as Parquet."""
    seconds: float | None = None
    """Time limit in seconds from the start of the command. The report says how many shards were
    left out. Default: none."""
    json: Path | None = None
    """File for the summary."""
    mlflow_uri: str | None = None
    """MLflow tracking URI. Default: MLFLOW_TRACKING_URI, else sqlite:///mlflow.db."""


def main(config: CollectConfig) -> None:
    """Measures the shards; prints, writes and logs the summary."""
    budget = Budget(config.seconds)
    batch_sizes = config.batch_size or (PROFILES[default_profile()].batch_size,)
    if len(set(batch_sizes)) < len(batch_sizes):
        raise UserError("--batch-size has a size twice: give each size once")
    operator = OperatorOptions(config.weights, config.optimizer)
    check_file(config.json, "--json")
    check_bounds(config, at_least={"seed": 0, "num_exchanges": 0}, more_than={"max_gb": 0})
    tables = load_tables(config.tables)
    shards = {
        batch: _shards(config, tables, batch, place, len(batch_sizes))
        for place, batch in enumerate(batch_sizes)
    }
    by_settings = {MeasureSettings(size, operator): drawn for size, drawn in shards.items()}
    requested = sum(map(len, shards.values()))
    if requested < config.num_shards:
        cli.note(f"{config.tables} has only {requested} different shards")
    storage = None if config.storage is None else Storage(config.storage)
    if storage is not None:
        known = storage.fetch_store(config.store)
        cli.say(f"{known} measurements came from {config.storage}")
    MeasurementStore(config.store).close()  # fails before the work if it cannot be used
    parameters = {**asdict(config), "batch_size": batch_sizes}
    name = f"collect {requested} shards of {short_name(config.tables)}"
    with (
        runs.tracked_run("collect_costs", name, parameters, config.mlflow_uri) as run,
        ray_cluster(),
        ExitStack() as stack,
    ):
        if storage is not None:  # also after Ctrl-C
            stack.callback(storage.keep_store, config.store)
        pool = BenchmarkPool(config.store, kind=config.devices)
        if requested >= _MIN_SHARDS_OF_PROBE:
            pool.probe()
        for_shards = budget.part(_SHARDS_SHARE) if config.num_exchanges else budget
        summary = collect(pool, by_settings, for_shards, storage)
        report(summary, config)
        for place, batch_size in enumerate(batch_sizes):
            exchanges = _share(config.num_exchanges, place, len(batch_sizes))
            collect_exchanges(pool, tables, exchanges, batch_size, config.seed, budget)
        if config.json is not None:
            documents.write(config.json, asdict(summary))
        run.metrics({n: v for n, v in asdict(summary).items() if isinstance(v, int | float)})
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
    """Returns the shards of batch size number `place` of `several`; each has others."""
    committee = None if config.query_by_committee is None else load_model(config.query_by_committee)
    limit = None if config.max_gb is None else ShardLimit(config.max_gb * 1e9, batch_size)
    count = _share(config.num_shards, place, several)
    drawn = random_shards(
        tables,
        count if committee is None else count * CANDIDATES,
        config.max_tables,
        config.seed * several + place,
        config.augment,
        limit,
    )
    if committee is None:
        return drawn
    return most_uncertain(EstimatedCosts(committee, batch_size), drawn, count)


def _share(count: int, place: int, several: int) -> int:
    """Returns the share of `count` that belongs to the batch size number `place` of `several`."""
    return count // several + (place < count % several)


def report(summary: Summary, config: CollectConfig) -> None:
    """Prints the summary."""
    if summary.left_out:
        cli.say(
            f"stopped by --seconds {config.seconds:g}: {summary.requested - summary.left_out} of "
            f"{summary.requested} shards measured; run again to continue"
        )
    lines: list[tuple[str, Any]] = [
        ("measured", f"{summary.measured} in {summary.seconds:.1f} s"),
        ("reused", f"{summary.reused} from {config.store}"),
        ("failed", summary.failed),
        ("duty cycle", f"{summary.duty_cycle:.2f} of {len(summary.devices)} devices' time"),
        ("median spread", f"{summary.median_spread:.1%}"),
    ]
    for name, value in lines:
        cli.say(f"  {name:<14} {value}")


if __name__ == "__main__":
    cli.run_command(main, CollectConfig)
