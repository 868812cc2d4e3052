"""The drift monitor: false alarms, windows until a change is seen, and what the callback takes.

Lookups are drawn from known laws. Batches differ more than their lookups alone would: all tables
of a batch have a factor in common, as if it were of more, or less, active users.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean

import numpy as np

from autoshard.cost_model import EstimatedCosts, load_model
from autoshard.sharders import DriftMonitor, DriftReport, SharderContext, load_policy, make_sharder
from autoshard.workload import Device, EmbeddingTable, Link, Objective, ShardingPlan, ShardingTask
from autoshard.workload.arrays import Floats, Ints
from autoshard.workload.profiling.table_counts import TableBatch
from bench.metric import Metric
from bench.workbench import say

BATCH_SIZE, _DEVICES, _TABLES, _HEAVY = 1024, 4, 12, 3
_TOGETHER = 0.03  # relative deviation that all tables of a batch have in common
_LINK = Link(1e10, 20e-6)
_REFERENCES, _WINDOWS = 4, 50  # windows without a change for each reference
_TRIALS, _MOST = 10, 10  # of each change, and windows until it is missed


@dataclass(frozen=True)
class Law:
    """How rows of a table are drawn: by popularity rank**-alpha, with Poisson lookups."""

    table: EmbeddingTable
    alpha: float
    seed: int

    @cached_property
    def _cumulated(self) -> Floats:
        shares = np.arange(1, self.table.rows + 1, dtype=float) ** -self.alpha
        return np.asarray(np.cumsum(shares / shares.sum()))

    @cached_property
    def _rows(self) -> Ints:
        return np.random.default_rng(self.seed).permutation(self.table.rows)

    def batch(self, rng: np.random.Generator, factor: float, shift: int) -> TableBatch:
        """Draws a batch; `shift` makes other rows hot."""
        lengths = rng.poisson(self.table.pooling_factor * factor, BATCH_SIZE)
        ranks = np.searchsorted(self._cumulated, rng.random(int(lengths.sum())))
        rows = self._rows[np.minimum(ranks, self.table.rows - 1)]
        return TableBatch((rows + shift) % self.table.rows, lengths)


Laws = Mapping[str, Law]


class Stream:
    """Batches of windows, by laws that may change; each window has hot rows of its own."""

    def __init__(self, laws: Laws, seed: int, window: int = 100) -> None:
        self._laws, self._rng, self.window = laws, np.random.default_rng(seed), window

    def report(self, monitor: DriftMonitor, laws: Laws | None = None) -> DriftReport | None:
        """Counts a window of batches; returns what the monitor says of it."""
        shift, found = int(self._rng.integers(2**20)), None
        for _ in range(self.window):
            factor = float(np.exp(_TOGETHER * self._rng.standard_normal()))
            chosen = laws or self._laws
            found = monitor.count(lambda n: chosen[n].batch(self._rng, factor, shift))  # noqa: B023
        return found


def laws_of(kind: str) -> Laws:
    """Returns tables with a Zipf law each, or with rows that are used alike."""
    rng, found = np.random.default_rng(5), {}
    for number in range(_TABLES):
        rows, dim = int(np.exp(rng.uniform(np.log(1e3), np.log(2e5)))), int(rng.choice((16, 64)))
        alpha = float(rng.uniform(0.8, 1.2)) if kind == "Zipf" else 0.0
        table = EmbeddingTable(f"t{number}", rows, dim, float(rng.uniform(0.5, 6)))
        found[table.name] = Law(table, alpha, number)
    return found


def heavier(laws: Laws, factor: float = 1.1) -> Laws:
    """Returns the laws with more lookups of the heaviest tables."""
    return _changed(laws, lambda law: replace(
        law, table=replace(law.table, pooling_factor=factor * law.table.pooling_factor)
    ))  # fmt: skip


def more_skewed(laws: Laws, factor: float = 1.1) -> Laws:
    """Returns the laws with a larger exponent of the heaviest tables."""
    return _changed(laws, lambda law: replace(law, alpha=factor * law.alpha))


def _changed(laws: Laws, change: Callable[[Law], Law]) -> Laws:
    def weight(name: str) -> float:
        return laws[name].table.pooling_factor * laws[name].table.dim

    heavy = sorted(laws, key=weight)[-_HEAVY:]
    return {name: change(law) if name in heavy else law for name, law in laws.items()}


def planned(laws: Laws) -> tuple[ShardingPlan, ShardingTask, EstimatedCosts]:
    """Returns a plan of tables with these laws."""
    objective = Objective("step", _LINK)
    tables = tuple(replace(law.table, zipf_alpha=law.alpha) for law in laws.values())
    task = ShardingTask(tables, Device.uniform(_DEVICES, 2**32), BATCH_SIZE, objective=objective)
    oracle = EstimatedCosts(load_model("cpu").for_objective(objective, _DEVICES), BATCH_SIZE)
    plan = make_sharder("autoshard", SharderContext(oracle, load_policy("cpu"))).shard(task)
    return plan, task, oracle


def monitor_of(laws: Laws, window: int = 100) -> DriftMonitor:
    """Returns a monitor whose first window will be the reference."""
    return DriftMonitor(*planned(laws), total_steps=10**6, window=window)


def drift_metrics() -> list[Metric]:
    """Alarms without a change, and windows until one is seen."""
    metrics = []
    for kind in ("Zipf", "uniform"):
        say(f"{kind} rows: windows without drift")
        laws = laws_of(kind)
        reports = list(_without_drift(laws))
        alarms = sum(report.change.is_drift for report in reports)
        surprising = fmean(report.change.p_value < 0.05 for report in reports)
        label = f"{kind} rows, {len(reports)} windows of 100 batches without drift"
        metrics += [
            Metric(f"{label}: false alarms", "at most 2", alarms),
            Metric(f"{label}: share with p below 0.05", "about 0.05 or less", surprising),
        ]
        changes = {"lookups of the 3 heaviest of 12 tables": heavier(laws)}
        if kind == "Zipf":
            changes["their Zipf exponents"] = more_skewed(laws)
        for what, changed in changes.items():
            say(f"{kind} rows: 10 % more {what}")
            seen = [_until_seen(laws, changed, seed) for seed in range(_TRIALS)]
            windows, ratios = zip(*seen, strict=True)
            label = f"{kind} rows, 10 % more of {what}"
            metrics += [
                Metric(f"{label}: windows until it is seen", "1", fmean(windows)),
                Metric(f"{label}: predicted step time over before", "", fmean(ratios)),
            ]
    return metrics


def _without_drift(laws: Laws) -> list[DriftReport]:
    found = []
    for seed in range(_REFERENCES):
        monitor, stream = monitor_of(laws), Stream(laws, seed)
        stream.report(monitor)
        for _ in range(_WINDOWS):
            report = stream.report(monitor)
            assert report is not None
            found.append(report)
    return found


def _until_seen(before: Laws, after: Laws, seed: int) -> tuple[int, float]:
    """Returns the windows until the change is seen, and the ratio of costs in the first."""
    monitor, stream = monitor_of(before), Stream(before, seed)
    stream.report(monitor)
    ratio = 1.0
    for number in range(1, _MOST + 1):
        report = stream.report(monitor, after)
        assert report is not None
        ratio = report.change.ratio if number == 1 else ratio
        if report.change.is_drift:
            return number, ratio
    return _MOST + 1, ratio
