"""A page about a plan: one HTML file, which needs no server and no network.

The page holds its figures as JSON, of which a script in it draws charts and tables. The script sets
texts as text only, so that names of tables are never read as HTML.
"""

import html
import json
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from autoshard import __version__
from autoshard.benchmark import PlanCost
from autoshard.cost_model import EstimatedCosts, StepPrediction, StepPredictor
from autoshard.cost_model.pricing.explanation import table_costs_ms
from autoshard.sharders.context import SharderContext
from autoshard.sharders.explaining.alternatives import (
    alternatives,
    replanner,
    without_options,
)
from autoshard.sharders.explaining.explain import format_step
from autoshard.sharders.explaining.options import devices_of, options_of
from autoshard.sharders.explaining.summary import Baseline, best_heuristic, training_notes
from autoshard.sharders.registry import make_sharder
from autoshard.sharders.search.steps import next_steps
from autoshard.workload import ShardingPlan, ShardingTask, UserError, documents
from autoshard.workload.tables.operators import MemoryParts
from autoshard.workload.tasks.objective import PHASES

_GIB = 2**30
_SAVINGS = 20  # tables whose options are priced
_STEPS = 5  # single changes
_TORCHREC = "torchrec_all"
_TORCHREC_SECONDS = 10.0
# Tables times devices: for more, TorchRec's planner takes minutes to list what it chooses from.
_TORCHREC_SIZE = 20_000
_PHASES_IN_ORDER = (0, 2, 3, 1)  # forward, both all-to-alls, backward
Document = dict[str, Any]


def write_report(
    path: Path,
    plan: ShardingPlan,
    task: ShardingTask,
    context: SharderContext,
    *,
    title: str = "",
    notes: Sequence[str] = (),
) -> None:
    """Writes a page about a plan: its step beside those of other planners, what each device does
    and holds, each table, what options save, and what would make a step shorter.

    For the latter, it plans again some times.

    Args:
        path: The HTML file.
        plan: The plan.
        task: Its task.
        context: Cost model, policy, seed and resources of options.
        title: Title of the page.
        notes: Lines that users of the plan have to know, beside those that follow from it.

    Raises:
        UserError: The file cannot be written.
    """
    oracle = context.costs
    predictor, others = StepPredictor(oracle, task), list[Baseline]()
    torchrec = _of_torchrec(task, context, predictor)
    best = best_heuristic(task, predictor, context.seed)
    lacks = ["No heuristic finds a plan that fits."] if best is None else []
    if isinstance(torchrec, str):
        lacks.append(torchrec)
    else:
        others.append(torchrec)
    if best is not None:
        others.append(replace(best, name=f"best heuristic ({best.name})"))
    document = plan_document(plan, task, oracle, others, (*notes, *training_notes(plan, task)))
    document["lacks"] = lacks
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other tasks; this one was warned of
        document |= _what_options_save(plan, task, oracle) | _what_would_help(plan, task, context)
    document["how"] += [
        f"Other tasks are planned again by {replanner(context)}, or keep this plan where that is "
        "faster; ratios are of the same scenarios.",
        f"TorchRec's planner is {_TORCHREC}; after {_TORCHREC_SECONDS:.0f} s, the best of its "
        "plans so far counts. All plans are priced by the same cost model.",
    ]
    write_page(path, document, title)


def plan_document(
    plan: ShardingPlan,
    task: ShardingTask,
    oracle: EstimatedCosts,
    others: Iterable[Baseline],
    notes: Iterable[str] = (),
) -> Document:
    """Returns the figures of a page, without those that need plans of other tasks.

    Args:
        plan: The plan.
        task: Its task.
        oracle: Predicts costs.
        others: Plans that it is compared with.
        notes: Lines that users of the plan have to know.
    """
    cost, step = oracle.plan_cost(plan, task), StepPredictor(oracle, task).of(plan)
    costs_ms = table_costs_ms(oracle, plan, task)
    found: Document = {
        "facts": _facts(plan, task, oracle),
        "step": _step("this plan", step),
        "others": [{**_step(o.name, o.prediction), **_ratio(step, o.prediction)} for o in others],
        "notes": list(dict.fromkeys(notes)),
        "how": _how(oracle, task, cost, step),
    }
    return found | _devices(plan, task, oracle, cost) | {"tables": _tables(plan, task, costs_ms)}


def write_page(path: Path, document: Document, title: str = "") -> None:
    """Writes the HTML file of a page; UserError if that is not possible."""
    title = title or "Sharding plan"
    # In a script element, "<" could end it; ASCII alone is read alike in any encoding.
    figures = json.dumps({"title": title, **document}, separators=(",", ":"))
    for sign in "<>&":
        figures = figures.replace(sign, f"\\u{ord(sign):04x}")
    template = (files(__package__) / "page.html").read_text(encoding="ascii")
    filled = {"@title@": html.escape(title), "@figures@": figures}
    page = re.sub("|".join(filled), lambda found: filled[found[0]], template)
    text = page.encode("ascii", "xmlcharrefreplace").decode()
    documents.write_text(path, text, "the report")


def _facts(plan: ShardingPlan, task: ShardingTask, oracle: EstimatedCosts) -> list[list[str]]:
    """Returns what the plan is for: names and texts."""
    known, devices = oracle.model.provenance.hardware, task.devices
    kinds = Counter(
        (each.hardware or known, f"{each.memory_bytes / _GIB:,.4g} GiB") for each in devices
    )
    named = "; ".join(f"{count:,} x {kind}, {size} each" for (kind, size), count in kinds.items())
    weights = sum(task.operator.stored_bytes(table.rows, table.dim) for table in task.tables)
    found = [
        ["tables", f"{len(task.tables):,} with {weights / _GIB:,.1f} GiB of weights and state"],
        ["devices", named],
        ["batch", f"{task.batch_size:,} samples of all devices together"],
        ["objective", str(task.objective)],
        ["operator", str(task.operator)],
    ]
    if task.nodes > 1:
        found.insert(2, ["nodes", f"{task.nodes} of {len(devices) // task.nodes} devices"])
    if task.rules:
        found.append(["constraints", f"{len(task.rules):,}"])
    if plan.replicas is not None:
        groups = plan.replicas
        found.append(
            ["replicas", f"{groups.count} groups of {groups.group_size} devices; this is of one"]
        )
    return found


def _how(
    oracle: EstimatedCosts, task: ShardingTask, cost: PlanCost, step: StepPrediction
) -> list[str]:
    """Returns how figures were made, in sentences."""
    measured = sum(oracle.residuals.knows(table.in_device_memory) for table in task.tables)
    corrected = f", corrected by measurements of {measured:,} tables" if measured else ""
    return [
        f"Made by autoshard {__version__}. Times are predicted by the cost model of "
        f"{oracle.model.provenance.hardware}{corrected}; nothing was measured for this page.",
        f"The expected step is the mean over {len(step.drawn_ms)} scenarios of uncertain costs, "
        "and the interval has 90 % of them. Ratios compare plans in the same scenarios.",
        f"Times of devices are those of mean costs, by which a step takes {cost.step_ms:.2f} ms: "
        "with uncertain costs the slowest device is expected to take longer.",
    ]


def _step(name: str, step: StepPrediction) -> Document:
    low, high = step.interval_ms
    return {"name": name, "ms": _short(step.expected_ms), "low": _short(low), "high": _short(high)}


def _ratio(step: StepPrediction, other: StepPrediction) -> Document:
    than = step.over(other)
    return {"ratio": [_short(than.ratio), _short(than.low), _short(than.high)],
            "faster": _short(than.probability)}  # fmt: skip


def _devices(
    plan: ShardingPlan, task: ShardingTask, oracle: EstimatedCosts, cost: PlanCost
) -> Document:
    """Returns the stages of a step, and the times and memory of all devices."""
    stages = sorted(cost.objective.stages, key=lambda phases: _PHASES_IN_ORDER.index(phases[0]))
    used = [name for name in MemoryParts._fields if name != "gradients" or plan.has_copies]
    held, host = plan.device_memory(task), plan.host_bytes(task)
    rows = zip(task.devices, cost.devices, held, host, strict=True)
    return {
        "phases": list(PHASES),
        "stages": [list(phases) for phases in stages],
        "common_ms": _short(cost.common_ms),
        "step_ms": _short(cost.step_ms),
        "balance": _short(cost.balance),
        "memory": used,
        "devices": [
            {
                "name": device.name,
                "kind": device.hardware or oracle.model.provenance.hardware,
                "tables": of.tables,
                "ms": [_short(ms) for ms in of.phases_ms],
                "bytes": [getattr(parts, name) for name in used],
                "reserved": device.reserved_bytes,
                "of": device.memory_bytes,
                "host": in_host,
            }
            for device, of, parts, in_host in rows
        ],
    }


def _tables(plan: ShardingPlan, task: ShardingTask, costs_ms: dict[str, float]) -> list[list[Any]]:
    """Returns a row for each table: name, rows, columns, lookups of a sample, option, devices, ms,
    and bytes on all devices together.
    """
    options, homes, sizes = options_of(plan, task), devices_of(plan, task), dict[str, int]()
    placed = plan.placed(task)
    owners = (each.table for each in plan.placements for _ in each.devices)
    each_bytes = task.operator.bytes_of_each([piece for piece, _ in placed], task.batch_size)
    for owner, size in zip(owners, each_bytes.tolist() if placed else (), strict=True):
        sizes[owner] = sizes.get(owner, 0) + size
    for table in task.tables:
        if (option := plan.options.get(table.name)) is not None:
            each = option.common_memory(table, task).total
            sizes[table.name] = sizes.get(table.name, 0) + each * len(task.devices)
    return [
        [t.name, t.rows, t.dim, _short(t.pooling_factor), options[t.name], homes[t.name],
         _short(costs_ms[t.name]), sizes[t.name]]
        for t in task.tables
    ]  # fmt: skip


def _what_options_save(plan: ShardingPlan, task: ShardingTask, oracle: EstimatedCosts) -> Document:
    """Returns tables, their options, the devices where they would be whole, and steps then."""
    costs_ms, options = table_costs_ms(oracle, plan, task), options_of(plan, task)
    found = [
        (each.table, options[each.table], task.devices[each.device].name, _short(each.expected_ms))
        for each in without_options(oracle, task, plan, costs_ms, _SAVINGS)
    ]
    return {"savings": found}


def _what_would_help(plan: ShardingPlan, task: ShardingTask, context: SharderContext) -> Document:
    """Returns the steps of plans for other tasks, and the best single changes of the plan."""
    oracle, found = context.costs, list[Document]()
    now = StepPredictor(oracle, task).of(plan)
    for each in alternatives(task, plan, context):
        step = each.step and {**_step(each.what, each.step), **_ratio(each.step, now)}
        found.append(step or {"name": each.what, "note": each.note})
    changes = [
        [format_step(step, task), _short(step.expected_ms)]
        for step in next_steps(oracle, task, plan, _STEPS)
    ]
    return {"alternatives": found, "changes": changes}


def _of_torchrec(
    task: ShardingTask, context: SharderContext, predictor: StepPredictor
) -> Baseline | str:
    """Returns the plan of TorchRec's planner, or why there is none, in a sentence."""
    size = len(task.tables) * len(task.devices)
    if size > _TORCHREC_SIZE:
        return (
            f"TorchRec's planner is left out: {len(task.tables):,} tables on "
            f"{len(task.devices):,} devices take it minutes."
        )
    try:
        plan = make_sharder(_TORCHREC, replace(context, seconds=_TORCHREC_SECONDS)).shard(task)
    except UserError as error:
        return f"TorchRec's planner is left out: {error}."
    return Baseline("TorchRec's planner", plan, predictor.of(plan))


def _short(number: float) -> float:
    """Returns a number with five digits, which keep a page small."""
    return float(f"{number:.5g}")
