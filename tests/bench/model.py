"""Metrics of the cost model, from shipped measurements and from plans measured here."""

import statistics
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch

from autoshard.benchmark import BenchmarkPool, MeasureSettings
from autoshard.cost_model import (
    CostModel,
    EstimatedCosts,
    OtherHardware,
    Provenance,
    TableResiduals,
    load_model,
    read_costs,
    split,
)
from autoshard.cost_model.learning.calibration import MAX_CALIBRATION_SHARDS, calibrate
from autoshard.cost_model.learning.compute_training import train_compute
from autoshard.cost_model.learning.evaluation import (
    Score,
    evaluate,
    evaluations_per_second,
    placements_per_second,
)
from autoshard.cost_model.learning.training import TrainOptions
from autoshard.cost_model.models.checkpoint import PRETRAINED
from autoshard.cost_model.networks.compute import ComputeCostModel
from autoshard.cost_model.networks.dataset import CostDataset
from autoshard.cost_model.threads import one_thread
from autoshard.experiments.collecting.proposals import SEARCH, Proposer
from autoshard.workload import EmbeddingTable, Shard, UserError, load_tables, random_shards
from bench.metric import Metric
from bench.workbench import SETTINGS, cpu_pool, say

DATA = (PRETRAINED / "cpu.parquet", PRETRAINED / "cpu-features.parquet")
OTHER_DATA = PRETRAINED / "cpu-fp16.parquet"  # another machine, fp16 weights
# Not training data of the model; small, because plans of all of them are measured.
_CHECK_TASKS, _CHECK_TABLES = 20, "synthetic:400:1:small"
_WHOLE_SHARDS, _WHOLE_TABLES = 20_000, 20
_SCENARIOS, _FEW_TABLES = 16, 200
_CORRECTED_TABLES, _CORRECTED_SHARDS, _CORRECTED_NOISE = 1_000, 10_000, 0.02


@cache
def shipped_costs() -> CostDataset:
    """Returns the training data of the shipped model."""
    return read_costs(DATA)


def learning_metrics() -> list[Metric]:
    """Trains on the shipped measurements and tests on their test tables."""
    data = shipped_costs()
    parts = split(data)
    compute, curves = train_compute(parts["train"], parts["validation"], TrainOptions(), seed=0)
    found = evaluate(compute, parts["train"], parts["test"])
    many = found.sizes >= 8
    additive = np.median(np.abs(found.additive_ms[many] / found.measured_ms[many] - 1))
    own = np.median(np.abs(found.predicted_ms[many] / found.measured_ms[many] - 1))
    unusual = [
        number
        for number, shard in enumerate(parts["test"].shards)
        if any(piece.table.features > 1 or piece.table.weighted for piece in shard.pieces)
    ]
    featured = evaluate(compute, parts["train"], parts["test"].subset(unusual))
    score, proxies = found.score, found.baselines
    alone, less_starts = proxies["additive"], proxies["additive_less_starts"]
    values = [
        ("Kendall tau, tables unseen in training", "at least 0.96", score.kendall_tau),
        ("Kendall tau, sum of single-table costs", "", alone.kendall_tau),
        ("Kendall tau, dim x pooling factor", "", proxies["lookup"].kendall_tau),
        ("Kendall tau, sum of single-table costs less operator starts", "",
         less_starts.kendall_tau),
        ("median error of the cost model",
         "at most 1.5 times the difference of repeat measurements", score.median_error),
        ("median error, net of measurement noise", "", found.net_error),
        ("median error, measurement noise", "", found.noise),
        ("median difference of repeat measurements", "", found.noise_floor),
        ("median error, sum of single-table costs less operator starts", "",
         less_starts.median_error),
        ("median error, shards of 8 or more tables", "", float(own)),
        ("median error, sum of single-table costs, shards of 8 or more tables", "",
         float(additive)),
        ("coverage of 90 % intervals", "0.85 to 0.95", found.coverage_90),
        ("median error, tables with several features or weights", "",
         featured.score.median_error),
        ("Kendall tau, tables with several features or weights", "", featured.score.kendall_tau),
        ("coverage of 90 % intervals, tables with several features or weights", "0.85 to 0.95",
         featured.coverage_90),
    ]  # fmt: skip
    return [
        Metric("training time of the cost model", "at most 60 s", curves.seconds, "s"),
        *(Metric(*each) for each in values),
        *_speeds(CostModel(compute, Provenance.of(data)), parts["test"]),
        *_calibration(compute, data),
    ]


def calibrated_here(pool: BenchmarkPool) -> CostModel:
    """Returns the shipped model, calibrated with shards that the pool measures."""
    data = shipped_costs()
    train = split(data)["train"]
    few = [
        shard
        for shard, batch in zip(train.shards, train.batch_sizes, strict=True)
        if batch == data.most_common_batch
    ][:MAX_CALIBRATION_SHARDS]
    say(f"{len(few)} shards to calibrate with")
    settings = MeasureSettings(data.most_common_batch, data.operator)
    found = CostDataset.of(pool.measure(few, settings))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OtherHardware)  # which is why it is calibrated
        return calibrate(load_model("cpu"), found)


def prediction_metrics(folder: Path) -> list[Metric]:
    """Compares predicted and measured plans, with the shipped model calibrated to this machine."""
    data = shipped_costs()
    with cpu_pool(folder / "plans.db") as pool:
        oracle = EstimatedCosts(calibrated_here(pool), data.most_common_batch)
        found = Proposer(pool, data, 0, load_tables(_CHECK_TABLES)).check(oracle, _CHECK_TASKS)
    if found is None:
        raise UserError("no plan could be measured, so predictions cannot be checked")
    best = found["measured_max_ms"][SEARCH]
    return [
        Metric("predicted over measured, mean of devices", "0.97 to 1.03",
               1 / found["measured_over_promised"]),
        Metric("predicted over measured, slowest device", "at least 0.95",
               1 / found["max_measured_over_promised"]),
        *(
            Metric(f"slowest device, search over {name}", "below 1", best / ms)
            for name, ms in found["measured_max_ms"].items()
            if name != SEARCH
        ),
    ]  # fmt: skip


def _speeds(model: CostModel, data: CostDataset) -> list[Metric]:
    """Measures predictions per second: device plus table, and whole shards."""
    oracle = EstimatedCosts(model, data.most_common_batch)
    tables = data.tables()
    incremental = statistics.median(
        evaluations_per_second(oracle, [table.whole() for table in tables]) for _ in range(5)
    )
    rng = np.random.default_rng(0)
    shards = [
        Shard.of_tables([tables[n] for n in rng.choice(len(tables), _WHOLE_TABLES, replace=False)])
        for _ in range(_WHOLE_SHARDS)
    ]
    with one_thread():
        oracle.costs(shards[:100])
        started = time.perf_counter()
        oracle.costs(shards)
        whole = _WHOLE_SHARDS / (time.perf_counter() - started)
    return [
        Metric("predictions of device plus table per second, one core", "at least 1,000,000",
               incremental),
        Metric(f"predictions of device plus table in {_SCENARIOS} scenarios per second, one core",
               "at least 100,000", _in_scenarios_per_second(oracle, tables)),
        Metric(f"fitting corrections of {_CORRECTED_TABLES:,} tables to "
               f"{_CORRECTED_SHARDS:,} shards", "seconds", _correction_seconds(model), "s"),
        Metric(f"predictions of {_WHOLE_TABLES}-table shards per second, one core",
               "at least 20,000", whole),
    ]  # fmt: skip


def _in_scenarios_per_second(oracle: EstimatedCosts, tables: Sequence[EmbeddingTable]) -> float:
    """Measures predictions per second of device plus table in all scenarios."""
    few = tables[:_FEW_TABLES]
    scenarios = oracle.scenarios(few, _SCENARIOS)
    return placements_per_second(scenarios, scenarios.amounts([table.whole() for table in few]))


def _correction_seconds(model: CostModel) -> float:
    """Measures the time to fit table corrections, with simulated costs of shards."""
    tables = load_tables(f"wide:{_CORRECTED_TABLES}:8")
    shards = tuple(random_shards(tables, _CORRECTED_SHARDS, 20, seed=3))
    prices = EstimatedCosts(model, SETTINGS.batch_size).prices(shards)
    costs = torch.stack([prices.forward_ms, prices.backward_ms], 1).double().numpy()
    noise = np.random.default_rng(0).normal(0, _CORRECTED_NOISE, costs.shape)
    data = replace(
        shipped_costs(),
        shards=shards,
        batch_sizes=(SETTINGS.batch_size,) * len(shards),
        costs_ms=costs * np.exp(noise),
        errors=np.full(len(shards), _CORRECTED_NOISE),
        repeats_ms=((1.0,),) * len(shards),
    )
    with one_thread():
        started = time.perf_counter()
        TableResiduals(model.compute, SETTINGS.batch_size).learn(data)
        return time.perf_counter() - started


def _calibration(compute: ComputeCostModel, data: CostDataset) -> list[Metric]:
    """Measures the share of full training's gain on other weights that calibration reaches."""
    other = read_costs([OTHER_DATA])
    parts = split(other)
    few = parts["train"].subset(range(MAX_CALIBRATION_SHARDS))
    full, _ = train_compute(parts["train"], parts["validation"], TrainOptions(), seed=0)
    calibrated = calibrate(CostModel(compute, Provenance.of(data)), few).compute
    before, after, most = (
        Score.of(
            model.predict(parts["test"].shards, parts["test"].batch_sizes)
            .total_ms.double()
            .numpy(),
            parts["test"].totals_ms,
        ).median_error
        for model in (compute, calibrated, full)
    )
    closed = (before - after) / (before - most)
    return [
        Metric("median error on fp16 tables, as trained on fp32", "", before),
        Metric(
            f"median error on fp16 tables, calibrated with {MAX_CALIBRATION_SHARDS} shards",
            "",
            after,
        ),
        Metric("median error on fp16 tables, trained on all shards", "", most),
        Metric("share of the gap on fp16 tables that calibration closes", "at least 0.80", closed),
    ]
