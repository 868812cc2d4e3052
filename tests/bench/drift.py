"""The drift monitor: false alarms, windows until a change is seen, and what the callback takes.

Lookups are drawn from known laws. Batches differ more than their lookups alone would: all tables
of a batch have a factor in common, as if it were of more, or less, active users.
"""

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from statistics import fmean, median

import numpy as np

from autoshard.cost_model import EstimatedCosts, load_model
from autoshard.sharders import DriftMonitor, DriftReport, SharderContext, load_policy, make_sharder
from autoshard.workload import Device, EmbeddingTable, Link, Objective, ShardingPlan, ShardingTask
from autoshard.workload.arrays import Ints
from autoshard.workload.profiling.table_counts import TableBatch
from autoshard.workload.profiling.window import GROUPS
from bench.metric import Metric
from bench.workbench import on_one_core, say

BATCH_SIZE, _DEVICES, _TABLES, _HEAVY = 1024, 4, 12, 3
_TOGETHER = 0.03  # relative deviation that all tables of a batch have in common
_DRAWN = 2**20  # lookups of a table
_LINK = Link(1e10, 20e-6)
_REFERENCES, _WINDOWS = 4, 50  # windows without a change for each reference
_EVERY, _WINDOW = 100, 100  # the monitor's defaults
_OFTEN = 2  # one batch in so many is counted where that is timed
_PAIRS = 100
_TRIALS, _MOST = 10, 10  # of each change, and windows until it is missed


@dataclass(frozen=True)
class Law:
    """How rows of a table are drawn: by popularity rank**-alpha, with Poisson lookups."""

    table: EmbeddingTable
    alpha: float
    seed: int

    @cached_property
    def _drawn(self) -> Ints:
        """Many independent lookups; batches are stretches of them from a random place on."""
        rng, rows = np.random.default_rng(self.seed), self.table.rows
        shares = np.cumsum(np.arange(1, rows + 1, dtype=float) ** -self.alpha)
        ranks = np.searchsorted(shares, shares[-1] * rng.random(_DRAWN)).clip(max=rows - 1)
        return np.asarray(rng.permutation(rows).astype(np.int32)[ranks])

    def batch(self, rng: np.random.Generator, factor: float, shift: int) -> TableBatch:
        """Draws a batch; `shift` makes other rows hot."""
        count = int(rng.poisson(self.table.pooling_factor * factor * BATCH_SIZE))
        start = int(rng.integers(_DRAWN - count))
        rows = self._drawn[start : start + count] + shift % self.table.rows
        rows = np.where(rows < self.table.rows, rows, rows - self.table.rows)
        samples = rng.integers(0, BATCH_SIZE, count)
        return TableBatch(rows, np.bincount(samples, minlength=BATCH_SIZE))


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
        say(f"{kind} rows: pairs of windows")
        surprising = fmean(_pairs(laws))
        label = f"{kind} rows, {len(reports)} windows of 100 batches without drift"
        metrics += [
            Metric(f"{label}: false alarms", "at most 2", alarms),
            Metric(
                f"{kind} rows, {_PAIRS} pairs of windows of {GROUPS} batches without drift: share "
                "with p below 0.05",
                "at most 0.05",
                surprising,
            ),
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


def _pairs(laws: Laws) -> list[bool]:
    """Returns for pairs of windows, of which one is the reference, whether p is below 0.05.

    Other than windows after one reference, pairs are independent of each other.
    """
    known, found = planned(laws), []
    for seed in range(_PAIRS):
        monitor = DriftMonitor(*known, total_steps=10**6, window=GROUPS)
        stream = Stream(laws, 1000 + seed, GROUPS)
        stream.report(monitor)
        report = stream.report(monitor)
        assert report is not None
        found.append(report.change.p_value < 0.05)
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


def callback_metrics() -> list[Metric]:
    """What the monitor takes beside steps of a TorchRec model, whose only rank counts all samples.

    After a step, the monitor gets the batch and the loop waits until it is counted. Times are those
    of the processor, in all threads, so that others on the machine do not count.
    """
    say("what the drift monitor takes in training")
    with on_one_core():
        times = _trained()
    step = median(times["step"])
    usual, window = fmean(times["sampled"]), fmean(times["window"])
    share = (median(times["idle"]) + usual / _EVERY + window / (_EVERY * _WINDOW)) / step
    return [
        Metric("step of the model, 20 tables on one rank", "", 1e3 * step, "ms"),
        Metric("a counted batch, over a step", "", usual / step),
        Metric("test of a window of 100 counted batches, over a step", "", window / step),
        Metric("drift monitor in all, share of a step", "below 0.005", share),
    ]


def _trained() -> dict[str, list[float]]:
    """Trains a model; returns seconds of steps, and of observing batches by what that did."""
    import torch
    from torch import distributed
    from torch.distributed.optim import _apply_optimizer_in_backward as apply_in_backward
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.datasets.random import RandomRecDataset
    from torchrec.distributed import DistributedModelParallel
    from torchrec.optim import RowWiseAdagrad

    from autoshard.integration import to_torchrec

    rng = np.random.default_rng(3)
    names = [f"t{number}" for number in range(20)]
    rows = np.exp(rng.uniform(np.log(1e3), np.log(1e6), 20)).astype(int).tolist()
    lookups = rng.integers(1, 20, 20).tolist()
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=count, embedding_dim=64, feature_names=[name])
        for name, count in zip(names, rows, strict=True)
    ]
    bags = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    apply_in_backward(RowWiseAdagrad, bags.parameters(), {"lr": 0.05})
    top = torch.nn.Linear(64 * 20, 1)
    described = tuple(
        EmbeddingTable(name, count, 64, float(mean), zipf_alpha=1.0)
        for name, count, mean in zip(names, rows, lookups, strict=True)
    )
    objective = Objective("step")
    task = ShardingTask(described, Device.uniform(1, 2**36), BATCH_SIZE, objective=objective)
    plan = ShardingPlan.table_wise(task, [0] * 20)
    oracle = EstimatedCosts(load_model("cpu").for_objective(objective, 1), BATCH_SIZE)
    monitor = DriftMonitor(plan, task, oracle, 10**6, link=_LINK, every=_OFTEN)
    data = RandomRecDataset(
        names, BATCH_SIZE, hash_sizes=rows, ids_per_features=lookups, manual_seed=1
    )
    batches = list(islice(data, 20))
    times: dict[str, list[float]] = {"step": [], "idle": [], "sampled": [], "window": []}
    with tempfile.TemporaryDirectory() as folder:
        distributed.init_process_group("gloo", f"file://{folder}/store", rank=0, world_size=1)
        try:
            model = DistributedModelParallel(
                bags, device=torch.device("cpu"), plan=to_torchrec(plan, bags, device_type="cpu")
            )
            for number in range(2 * _WINDOW * _OFTEN):
                batch = batches[number % len(batches)]
                began = time.process_time()
                pooled = torch.cat(list(model(batch.sparse_features).wait().to_dict().values()), 1)
                top(pooled).square().mean().backward()
                trained = time.process_time()
                monitor.observe(batch.sparse_features)
                monitor.wait()
                seconds = time.process_time() - trained
                times["step"].append(trained - began)
                counted, place = divmod(number, _OFTEN)
                # The first window is the reference, and predicted only.
                ends = counted >= _WINDOW and counted % _WINDOW == _WINDOW - 1
                times["idle" if place else "window" if ends else "sampled"].append(seconds)
            del model
        finally:
            distributed.destroy_process_group()
    return times
