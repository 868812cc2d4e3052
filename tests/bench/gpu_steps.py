"""Training steps on GPUs by price: over what others published, and over other planners' plans."""

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from published_points import Held, grouped, held, points
from scipy.stats import spearmanr

from autoshard.cost_model import EstimatedCosts, StepPredictor
from autoshard.cost_model.roofline import roofline_model
from autoshard.experiments.evaluation.ratio import relative
from autoshard.sharders import SharderContext, load_policy, make_sharder
from autoshard.sharders.explaining.summary import best_heuristic
from autoshard.workload import (
    Device,
    EmbeddingTable,
    Objective,
    PlanError,
    ShardingPlan,
    ShardingTask,
    load_tables,
)
from autoshard.workload.data_sheets import DATA_SHEETS
from autoshard.workload.packing.gpu_memory import on_gpus
from autoshard.workload.plans.placements import Placement
from autoshard.workload.tables.table import can_be_blocks
from bench.embark import embark_tables
from bench.metric import Metric
from bench.workbench import say

_SHEET, _BATCH = DATA_SHEETS["h100-80gb"], 65_536
_LARGE_BYTES = 2**26  # of a collective: smaller ones depend on protocols
_MEMORY_BYTES = 72 * 2**30
_TASKS: dict[str, tuple[Callable[[], Sequence[EmbeddingTable]], Sequence[int]]] = {
    "MLPerf DLRM-v2": (lambda: load_tables("mlperf:dlrm-v2"), (8, 16, 64, 128)),
    "856 tables": (lambda: load_tables("synthetic:856:1:full"), (16, 64, 128)),
    "180 tables as of EMBark": (lambda: embark_tables("T180"), (16,)),
    "200 tables as of EMBark": (lambda: embark_tables("T200"), (8, 16, 64)),
    "510 tables as of EMBark": (lambda: embark_tables("T510"), (64,)),
}
_OTHERS = ("torchrec_all", "neuroshard")
_SECONDS = 120.0  # of other planners, at most


def gpu_step_metrics() -> list[Metric]:
    """Prices over published figures; autoshard's plans over others', by price."""
    return [*_published_metrics(), *_plan_metrics()]


def _published_metrics() -> list[Metric]:
    say("prices of what others have published")
    found = []
    for aside in (False, True):
        every = [each for point in points(aside) if (each := held(point)) is not None]
        which = "aside" if aside else "known"
        for name, some in grouped(every).items():
            if name.startswith("all-reduces"):
                some = [one for one in some if one.point["bytes_per_rank"] >= _LARGE_BYTES]
                name += " from 64 MiB"
            if name == "training steps":
                mlperf = [one for one in some if one.source == "mlperf"]
                found += _of_steps(f"MLPerf training steps, {which}", mlperf)
                some = [one for one in some if one.source != "mlperf"]
                name = "other training steps"
            if some:
                label = f"published {name}, {which} ({len(some)}): price over published"
                found.append(Metric(label, "0.7 to 1.4", _mean_ratio(some)))
    return found


def _of_steps(label: str, some: Sequence[Held]) -> list[Metric]:
    published = [one.point["value"] for one in some]
    prices = [one.price for one in some]
    inside = [one.is_inside for one in some]
    label = f"published {label} ({len(some)})"
    return [
        Metric(f"{label}: price over published", "0.7 to 1.4", _mean_ratio(some)),
        Metric(
            f"{label}: rank correlation", "at least 0.9", float(spearmanr(prices, published)[0])
        ),
        Metric(f"{label}: share inside the 90 % interval", "", float(np.mean(inside))),
    ]


def _mean_ratio(some: Sequence[Held]) -> float:
    ratio = relative([one.price for one in some], [one.point["value"] for one in some])
    assert ratio is not None
    return ratio.value


def _plan_metrics() -> list[Metric]:
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, (tables, numbers) in _TASKS.items():
            for ranks in numbers:
                say(f"{name} on {ranks} H100")
                found += _of_task(f"{name}, {ranks} H100", tables(), ranks)
    return found


def _of_task(label: str, tables: Sequence[EmbeddingTable], ranks: int) -> list[Metric]:
    objective = Objective("step", _SHEET.link(ranks))
    task = on_gpus(
        ShardingTask(
            tuple(tables), Device.uniform(ranks, _MEMORY_BYTES), _BATCH, objective=objective
        )
    )
    model = roofline_model(_SHEET, task.operator).for_objective(objective, ranks)
    oracle = EstimatedCosts(model, _BATCH)
    context = SharderContext(oracle, load_policy("cpu"))
    started = time.monotonic()
    plan = make_sharder("autoshard", context).shard(task)
    seconds = time.monotonic() - started
    predictor = StepPredictor(oracle, task)
    ours = predictor.of(plan)
    found = [
        Metric(f"{label}: autoshard's step by price", "", ours.expected_ms, "ms"),
        Metric(f"{label}: tables copied", "", float(len(plan.copied))),
        Metric(f"{label}: tables by rows", "", float(len(plan.row_wise))),
        Metric(f"{label}: planned in", "", seconds, "s"),
    ]
    others = {"the best heuristic": best_heuristic(task, predictor, 0)}
    predictions = {n: one.prediction for n, one in others.items() if one is not None}
    for other in _OTHERS:
        limited = replace(context, seconds=_SECONDS if other == "torchrec_all" else None)
        try:
            plan_of = make_sharder(other, limited).shard(task)
        except PlanError as fault:
            say(f"{other}: {fault}")
            continue
        predictions[other] = predictor.of(plan_of)
    if (rows := _all_by_rows(task, oracle)) is not None:
        predictions["table-row-wise for all"] = predictor.of(rows)
    for other, prediction in predictions.items():
        low, high = np.quantile(ours.drawn_ms / prediction.drawn_ms, [0.025, 0.975]).tolist()
        found.append(
            Metric(
                f"{label}: step by price over {other}",
                _goal(other, ranks),
                ours.expected_ms / prediction.expected_ms,
                interval=(low, high),
            )
        )
    return found


def _goal(other: str, ranks: int) -> str:
    if other == "torchrec_all":
        return {8: "at most 0.85", 16: "at most 0.75"}.get(ranks, "at most 0.7")
    return "at most 0.67" if other.startswith("table-row-wise") and ranks > 8 else ""


def _all_by_rows(task: ShardingTask, oracle: EstimatedCosts) -> ShardingPlan | None:
    """Returns the plan with each table in blocks on the node that has least to do; None if it does
    not fit. Tables with too few rows are whole, on the device that has least to do.
    """
    nodes = task.nodes
    of_node = len(task.devices) // nodes
    busy_ms, placed = np.zeros(len(task.devices)), list[Placement]()
    alone_ms = oracle.alone_ms([table.whole() for table in task.tables])
    for number in np.argsort(-alone_ms, kind="stable").tolist():
        table: EmbeddingTable = task.tables[number]
        if can_be_blocks(table.rows, of_node):
            node = int(busy_ms.reshape(nodes, of_node).sum(1).argmin())
            first = node * of_node
            placed.append(Placement(table.name, 0, table.dim, first, of_node))
            busy_ms[first : first + of_node] += alone_ms[number] / of_node
        else:
            device = int(busy_ms.argmin())
            placed.append(Placement(table.name, 0, table.dim, device))
            busy_ms[device] += alone_ms[number]
    plan = ShardingPlan(tuple(sorted(placed)), len(task.devices))
    try:
        plan.check(task)
    except PlanError:
        return None
    return plan
