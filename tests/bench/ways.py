"""Rows and copies beside columns alone, by the price of training."""

import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from statistics import geometric_mean

import numpy as np
import torch

from autoshard.cost_model import OtherHardware, OutsideTraining, load_model
from autoshard.sharders import make_sharder
from autoshard.workload import (
    Device,
    EmbeddingTable,
    Link,
    Objective,
    PlanError,
    ShardingTask,
    UserError,
    load_tables,
)
from autoshard.workload.arrays import Floats
from autoshard.workload.packing.table_options import OptionResources
from autoshard.workload.tables.row_access import RowAccess, block_rows, curve_ranks
from autoshard.workload.tables.table import rows_of_block
from autoshard.workload.tasks.rules import Kind, Rule
from bench.metric import Metric
from bench.other_ways import other_ways_metrics
from bench.workbench import context_of, say

_BATCH_SIZE = 8192
_SLOW, _USUAL = Link(1e9, 20e-6), Link(1e10, 10e-6)
_AMPLE = 2**40  # bytes of a device
_MANY = 200  # tables
_TIGHT = 16  # tasks with giants
_SIZES = {(100, 8): 0.3, (1_000, 32): 0.9, (5_000, 128): 4.6}  # tables, devices: target in s
_SORTED_ROWS, _SORTED_LOOKUPS, _SORTED_RANKS = 10_000_000, 4_000_000, 8
_HOT_SHARE = 0.05
_COLUMNS_ALONE: tuple[Kind, ...] = ("not_copied", "not_row_wise")


def ways_metrics() -> list[Metric]:
    """Steps and plans with all ways of sharding over those with columns alone."""
    targets = {"giants on a slow link": "at most 0.80", "thousand tiny tables": "at most 0.95"}
    metrics: list[Metric] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OtherHardware)
        warnings.simplefilter("ignore", OutsideTraining)
        found: dict[str, list[Mapping[str, float]]] = {}
        for family, task in _tasks():
            say(f"{family}, {len(task.devices)} devices")
            found.setdefault(family, []).append(_steps_ms(task))
        for family, steps in found.items():
            for other in ("columns alone", "torchrec_all"):
                ratios = [each["all ways"] / each[other] for each in steps if other in each]
                if ratios:
                    target = targets.get(family, "") if other == "columns alone" else ""
                    name = f"{family}: step by price, all ways over {other}"
                    metrics.append(Metric(name, target, geometric_mean(ratios)))
        seen: dict[str, ShardingTask] = dict(_tasks())  # of each family the last
        others = other_ways_metrics(seen)
        return [*metrics, *others, *_sorted_metrics(), *_giants_metrics(), *_time_metrics()]


def _tasks() -> Iterator[tuple[str, ShardingTask]]:
    for seed in range(3):
        rng = np.random.default_rng(seed)
        giants = tuple(_giant(rng, number) for number in range(4))
        tables = (*giants, *load_tables(f"synthetic:40:{seed}:full"))
        yield "giants on a slow link", _task(tables, 4, _SLOW)
    for family, source in (("mlperf:dlrm-v2", "mlperf:dlrm-v2"), ("criteo", "criteo")):
        for devices in (8, 16):
            yield f"{family} on {devices}", _task(load_tables(source), devices, _USUAL)
    rows = np.exp(np.random.default_rng(4).uniform(np.log(4), np.log(1_000), 1_000)).astype(int)
    tables = load_tables("synthetic:1000:4:small")
    tiny = tuple(replace(t, rows=n) for t, n in zip(tables, rows.tolist(), strict=True))
    yield "thousand tiny tables", _task(tiny, 8, _USUAL)


def _giant(rng: np.random.Generator, number: int) -> EmbeddingTable:
    rows, lookups = int(rng.uniform(1e7, 1e8)), float(rng.uniform(50, 200))
    dim = int(rng.choice((32, 64, 128)))
    return EmbeddingTable(f"giant{number}", rows, dim, lookups, zipf_alpha=1.05)


def _task(tables: tuple[EmbeddingTable, ...], devices: int, link: Link) -> ShardingTask:
    return ShardingTask(
        tables,
        Device.uniform(devices, _AMPLE),
        _BATCH_SIZE,
        load_model("cpu").provenance.operator,
        objective=Objective("step", link),
    )


def _steps_ms(task: ShardingTask) -> dict[str, float]:
    """Returns the price of a step by `autoshard` with all ways and with columns, and TorchRec's."""
    context = context_of(task)
    names = tuple(table.name for table in task.tables)
    columns = replace(task, rules=tuple(Rule(kind, names) for kind in _COLUMNS_ALONE))
    found = {}
    for label, name, some in (
        ("all ways", "autoshard", task),
        ("columns alone", "autoshard", columns),
        ("torchrec_all", "torchrec_all", task),
    ):
        if name == "torchrec_all" and len(task.tables) > _MANY:
            continue  # TorchRec's planner would take many minutes
        with suppress(PlanError, UserError):
            plan = make_sharder(name, context).shard(some)
            found[label] = context.costs.step_ms(plan, task)
    return found


def _sorted_metrics() -> list[Metric]:
    """Hot rows of a table whose ids are sorted by use, beside its blocks of rows alone.

    Ids are drawn, and counted after a model has told hot from cold ones.
    """
    from autoshard.integration.plans.row_numbers import RowNumbers

    metrics = []
    for alpha in (1.1, 1.3):
        popularity = np.arange(1, _SORTED_ROWS + 1) ** -alpha
        drawn = np.random.default_rng(1).random(_SORTED_LOOKUPS)
        cumulated = np.cumsum(popularity / popularity.sum())
        ids = np.searchsorted(cumulated, drawn).clip(max=_SORTED_ROWS - 1)
        numbers = RowNumbers(torch.arange(int(_HOT_SHARE * _SORTED_ROWS)), _SORTED_ROWS)
        hot, _, cold = numbers(torch.from_numpy(ids))
        size = rows_of_block(_SORTED_ROWS - numbers.hot, _SORTED_RANKS)
        in_blocks = np.bincount(cold.numpy() // size, minlength=_SORTED_RANKS)
        served = in_blocks + int(hot.sum()) / _SORTED_RANKS  # hot ones by the samples' own ranks
        before = np.bincount(ids // rows_of_block(_SORTED_ROWS, _SORTED_RANKS))
        label = f"hot rows (5 %) of ids sorted by use, Zipf {alpha:g}, {_SORTED_RANKS} ranks"
        metrics += [
            Metric(f"{label}: ids over the link, over rows", "at most 0.25", len(cold) / len(ids)),
            Metric(f"{label}: busiest rank's lookups", "at most 1.1", served.max() / served.mean()),
            Metric(f"{label}: the same by rows alone", "", before.max() / before.mean()),
            Metric(f"{label}: pooled outputs over the link, over rows", "", 1.0),
        ]
        metrics.append(_sorted_step(alpha, cumulated))
    return metrics


def _sorted_step(alpha: float, cumulated: Floats) -> Metric:
    """The step by price with hot rows over the one without, both with such a table by rows."""
    starts = np.arange(0, _SORTED_ROWS, block_rows(_SORTED_ROWS))
    blocks = np.add.reduceat(np.diff(cumulated, prepend=0.0), starts)
    curve = cumulated[curve_ranks(_SORTED_ROWS) - 1]
    access = RowAccess(tuple(curve), tuple(blocks), 1.0, _SORTED_LOOKUPS, 0.0)
    table = EmbeddingTable("sorted", _SORTED_ROWS, 64, 100.0, zipf_alpha=alpha, access=access)
    task = _task((table, *load_tables("synthetic:20:3:small")), _SORTED_RANKS, _SLOW)
    task = replace(task, rules=(Rule("row_wise", (table.name,)),))
    context = context_of(task)
    known = replace(
        context, resources=OptionResources({table.name: int(_HOT_SHARE * _SORTED_ROWS)})
    )
    steps = [
        context.costs.step_ms(make_sharder("autoshard", each).shard(task), task)
        for each in (known, context)
    ]
    name = f"a table by rows, ids sorted by use, Zipf {alpha:g}: step by price with hot rows"
    return Metric(f"{name} over without", "", steps[0] / steps[1])


def _giants_metrics() -> list[Metric]:
    """Tasks with a table larger than any device, whose memory in sum is enough by a quarter."""
    planned = 0
    for seed in range(_TIGHT):
        rng = np.random.default_rng(seed)
        giant = replace(_giant(rng, 0), dim=int(rng.choice((4, 8, 16))))
        tables = (giant, *load_tables(f"synthetic:20:{seed}:small"))
        task = _task(tables, 8, _USUAL)
        total = sum(task.table_bytes(table) for table in tables)
        # Blocks of rows have outputs of full width on each device.
        outputs = 7 * 2 * 4 * giant.dim * _BATCH_SIZE + 7 * 8 * _BATCH_SIZE
        memory = int(1.25 * (total + outputs) / 8)
        task = replace(task, devices=Device.uniform(8, memory))
        with suppress(PlanError):
            make_sharder("autoshard", context_of(task)).shard(task).check(task)
            planned += 1
    label = f"plans found for {_TIGHT} tasks with a table larger than any device"
    return [Metric(label, f"{_TIGHT}", planned)]


def _time_metrics() -> list[Metric]:
    """Planning time with all ways, where nobody is held to columns."""
    metrics = []
    for (tables, devices), target in _SIZES.items():
        task = _task(load_tables(f"synthetic:{tables}:1:small"), devices, _USUAL)
        sharder = make_sharder("autoshard", context_of(task))
        times = []
        for _ in range(2):
            began = time.process_time()
            sharder.shard(task)
            times.append(time.process_time() - began)
        label = f"planning time, all ways, {tables:,} tables on {devices} devices"
        metrics.append(Metric(label, f"about {target:g} s", min(times), "s"))
    return metrics
