"""The cost model's figures: from measurements that are shipped, and from plans measured here."""

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
    TableFactors,
    load_model,
    read_costs,
    split,
)
from autoshard.cost_model.calibration import FEW, calibrate
from autoshard.cost_model.checkpoint import PRETRAINED
from autoshard.cost_model.compute import ComputeCostModel
from autoshard.cost_model.compute_training import train_compute
from autoshard.cost_model.dataset import CostDataset
from autoshard.cost_model.evaluation import (
    Score,
    evaluate,
    evaluations_per_second,
    placements_per_second,
)
from autoshard.cost_model.training import TrainOptions, one_thread
from autoshard.experiments.collecting.proposals import SEARCH, Proposer
from autoshard.workload import EmbeddingTable, Shard, UserError, load_tables, random_shards
from bench.figure import Figure
from bench.workbench import SETTINGS, cpu_pool, say

DATA = (PRETRAINED / "cpu.parquet", PRETRAINED / "cpu-features.parquet")
OTHER_DATA = PRETRAINED / "cpu-fp16.parquet"  # another machine, with other weights
# Other than the model learned from; and small, for plans of all of these are measured.
_CHECK_TASKS, _CHECK_TABLES = 20, "synthetic:400:1:small"
_WHOLE_SHARDS, _WHOLE_TABLES = 20_000, 20
_SCENARIOS, _SOME_TABLES = 16, 200
_HEART_TABLES, _HEART_SHARDS, _HEART_NOISE = 1_000, 10_000, 0.02


@cache
def shipped_costs() -> CostDataset:
    """The measurements that the shipped model has learned from."""
    return read_costs(DATA)


def learning_figures() -> list[Figure]:
    """Train on the shipped measurements; test on their test tables."""
    data = shipped_costs()
    parts = split(data)
    compute, curves = train_compute(parts["train"], parts["validation"], TrainOptions(), seed=0)
    found = evaluate(compute, parts["train"], parts["test"])
    many = found.sizes >= 8
    additive = np.median(np.abs(found.additive_ms[many] / found.measured_ms[many] - 1))
    own = np.median(np.abs(found.predicted_ms[many] / found.measured_ms[many] - 1))
    unusual = parts["test"].subset(
        [n for n, s in enumerate(parts["test"].shards) if _is_unusual(s)]
    )
    featured = evaluate(compute, parts["train"], unusual)
    return [
        Figure("training the cost model", "at most 60 s", curves.seconds, "s"),
        Figure("Kendall tau, tables unseen in training", "at least 0.96", found.score.kendall_tau),
        Figure(
            "Kendall tau of the sum of tables alone",
            "",
            found.baselines["additive"].kendall_tau,
        ),
        Figure("Kendall tau of dim x pooling", "", found.baselines["lookup"].kendall_tau),
        Figure(
            "Kendall tau of the sum of tables alone less their starts",
            "",
            found.baselines["additive_less_starts"].kendall_tau,
        ),
        Figure(
            "median error of the cost model",
            "at most 1.5 times the difference of a shard measured twice",
            found.score.median_error,
        ),
        Figure("median error, the model's own part", "", found.net_error),
        Figure("median error, the part of noise", "", found.noise),
        Figure("median difference of a shard measured twice", "", found.noise_floor),
        Figure(
            "median error of the sum of tables alone less their starts",
            "",
            found.baselines["additive_less_starts"].median_error,
        ),
        Figure("median error, shards of 8 and more tables", "", float(own)),
        Figure(
            "median error of the sum of tables alone, shards of 8 and more tables",
            "",
            float(additive),
        ),
        Figure("share of shards within their 90 % interval", "0.85 to 0.95", found.coverage_90),
        Figure("median error, tables with features and weights", "", featured.score.median_error),
        Figure("Kendall tau, tables with features and weights", "", featured.score.kendall_tau),
        Figure(
            "share of shards with features and weights within their 90 % interval",
            "0.85 to 0.95",
            featured.coverage_90,
        ),
        *_speeds(CostModel(compute, Provenance.of(data)), parts["test"]),
        *_calibration(compute, data),
    ]


def _is_unusual(shard: Shard) -> bool:
    """Whether it holds a table of several features, or one with weights of lookups."""
    return any(piece.table.features > 1 or piece.table.weighted for piece in shard.slices)


def calibrated_here(pool: BenchmarkPool) -> CostModel:
    """The shipped model, calibrated with shards that the pool measures."""
    data = shipped_costs()
    train = split(data)["train"]
    few = [
        shard
        for shard, batch in zip(train.shards, train.batch_sizes, strict=True)
        if batch == data.most_common_batch
    ][:FEW]
    say(f"{len(few)} shards to calibrate with")
    settings = MeasureSettings(data.most_common_batch, data.operator)
    found = CostDataset.of(pool.measure(few, settings))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OtherHardware)  # which is why it is calibrated
        return calibrate(load_model("cpu"), found)


def promise_figures(folder: Path) -> list[Figure]:
    """What plans promise and what they measure, by the shipped model calibrated to this machine."""
    data = shipped_costs()
    with cpu_pool(folder / "plans.db") as pool:
        oracle = EstimatedCosts(calibrated_here(pool), data.most_common_batch)
        told = Proposer(pool, data, 0, load_tables(_CHECK_TABLES)).check(oracle, _CHECK_TASKS)
    if told is None:
        raise UserError("no plan could be measured: its promises cannot be checked")
    best = told["measured_max_ms"][SEARCH]
    return [
        Figure("measured over promised, mean of devices", "0.97 to 1.03",
               told["measured_over_promised"]),
        Figure("measured over promised, slowest device", "at most 1.05",
               told["max_measured_over_promised"]),
        *(
            Figure(f"slowest device, search over {name}", "below 1", best / ms)
            for name, ms in told["measured_max_ms"].items()
            if name != SEARCH
        ),
    ]  # fmt: skip


def _speeds(model: CostModel, data: CostDataset) -> list[Figure]:
    """How often a second a device plus a table is priced, and a whole shard."""
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
        Figure("device plus table, priced a second on a core", "at least 1,000,000", incremental),
        Figure(
            f"device plus table in {_SCENARIOS} scenarios, priced a second on a core",
            "at least 100,000",
            _in_scenarios_per_second(oracle, tables),
        ),
        Figure(
            f"{_HEART_TABLES:,} tables learned by heart from {_HEART_SHARDS:,} shards",
            "seconds",
            _by_heart_seconds(model),
            "s",
        ),
        Figure(f"shards of {_WHOLE_TABLES} tables, a second on a core", "at least 20,000", whole),
    ]


def _in_scenarios_per_second(oracle: EstimatedCosts, tables: Sequence[EmbeddingTable]) -> float:
    """How many times a second "this device plus that table" is priced in all scenarios."""
    some = tables[:_SOME_TABLES]
    scenarios = oracle.scenarios(some, _SCENARIOS)
    return placements_per_second(scenarios, scenarios.amounts([table.whole() for table in some]))


def _by_heart_seconds(model: CostModel) -> float:
    """To learn the factors of many tables, from shards whose costs are made up: that of learning
    does not depend on them.
    """
    tables = load_tables(f"wide:{_HEART_TABLES}:8")
    shards = tuple(random_shards(tables, _HEART_SHARDS, 20, seed=3))
    prices = EstimatedCosts(model, SETTINGS.batch_size).prices(shards)
    costs = torch.stack([prices.forward_ms, prices.backward_ms], 1).double().numpy()
    noise = np.random.default_rng(0).normal(0, _HEART_NOISE, costs.shape)
    data = replace(
        shipped_costs(),
        shards=shards,
        batch_sizes=(SETTINGS.batch_size,) * len(shards),
        costs_ms=costs * np.exp(noise),
        errors=np.full(len(shards), _HEART_NOISE),
        repeats_ms=((1.0,),) * len(shards),
    )
    with one_thread():
        started = time.perf_counter()
        TableFactors(model.compute, SETTINGS.batch_size).learn(data)
        return time.perf_counter() - started


def _calibration(compute: ComputeCostModel, data: CostDataset) -> list[Figure]:
    """How much of what full training on another profile would gain 50 of its shards gain."""
    other = read_costs([OTHER_DATA])
    parts = split(other)
    few = parts["train"].subset(range(FEW))
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
    return [
        Figure("median error on fp16 tables, as trained on fp32", "", before),
        Figure(f"median error on fp16 tables, calibrated with {FEW} shards", "", after),
        Figure("median error on fp16 tables, trained on all shards", "", most),
        Figure(
            "share of the gap on fp16 tables that calibration closes",
            "at least 0.80",
            (before - after) / (before - most),
        ),
    ]
