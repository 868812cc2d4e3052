"""The report on every plan: memory, and expected step time against the best heuristic's.

Reports are lines of text and tables without frames.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
from rich.table import Table

from autoshard.cost_model import EstimatedCosts, StepPrediction, StepPredictor
from autoshard.experiments.console import cli
from autoshard.experiments.console.objectives import ObjectiveOptions
from autoshard.sharders import HEURISTICS, SharderContext, make_sharder
from autoshard.workload import EmbeddingTable, Objective, PlanError, ShardingPlan, ShardingTask
from autoshard.workload.operators import MemoryParts
from autoshard.workload.sizes import format_bytes
from autoshard.workload.tables import hot_name

ReportPart = str | Table  # a line of text, or a table

_MB = 1e6
_MEMORY = "memory (MB; inputs and outputs are a batch's, with gradients of the outputs)"
_SHOWN = 3  # names of tables
_UNEVEN = 1.1  # lookups of a block over its even share that are worth a line
_EQUAL = 5e-4  # a relative difference that would read 0.0 %


def show(parts: Iterable[ReportPart]) -> None:
    """Prints the parts as they are made."""
    for part in parts:
        cli.console.print(part, soft_wrap=isinstance(part, str), markup=False)


def new_table(columns: Sequence[str], texts: int = 1) -> Table:
    """Returns an empty table. Its first `texts` columns are aligned left, the others right."""
    shown = Table(box=None, padding=(0, 0, 0, 1))
    for number, column in enumerate(columns):
        text = number < texts
        shown.add_column(
            column, justify="left" if text else "right", no_wrap=not text, overflow="fold"
        )
    return shown


def format_columns(table: EmbeddingTable, start: int, width: int) -> str:
    """Returns `all 64`, or `0-32 of 64`."""
    whole = width == table.dim
    return f"all {table.dim}" if whole else f"{start}-{start + width} of {table.dim}"


def present_step(
    options: ObjectiveOptions, oracle: EstimatedCosts, plan: ShardingPlan, task: ShardingTask
) -> StepPrediction:
    """Predicts the step of a plan in use, on the devices that it is for.

    On another number of devices than the task has, it is priced by the link for so many; the time
    of the dense part is taken to be proportional to the samples of a device.
    """
    ranks, last = plan.num_devices, len(task.devices) - 1
    if ranks != len(task.devices):
        objective = options.for_devices(ranks).build_objective(ranks, oracle.model)
        dense_ms = objective.dense_ms * len(task.devices) / ranks
        task = replace(
            task,
            devices=tuple(task.devices[min(number, last)] for number in range(ranks)),
            rules=(),
            objective=replace(objective, dense_ms=dense_ms),
        )
        oracle = oracle.for_objective(task.objective, ranks)
    return StepPredictor(oracle, task).of(plan)


def memory_parts(plan: ShardingPlan, task: ShardingTask) -> Iterator[ReportPart]:
    """Yields a table of each device's memory by part, reserved if any, and free, in MB."""
    reserved = any(device.reserved_bytes for device in task.devices)
    uses = [name for name in MemoryParts._fields if name != "gradients" or plan.has_copies]
    shown = new_table(("device", *uses, *(["reserve"] if reserved else []), "free", "of", "full"))
    for device, parts in zip(task.devices, plan.device_memory(task), strict=True):
        kept = [device.reserved_bytes] if reserved else []
        held = (getattr(parts, name) for name in uses)
        sizes = (*held, *kept, device.usable_bytes - parts.total, device.memory_bytes)
        full = (parts.total + device.reserved_bytes) / device.memory_bytes
        shown.add_row(device.name, *(f"{size / _MB:,.1f}" for size in sizes), f"{full:.1%}")
    yield _MEMORY
    yield shown


def training_notes(plan: ShardingPlan, task: ShardingTask) -> Iterator[str]:
    """Yields what a plan changes in training, beside where tables are."""
    if plan.copied:
        size = format_bytes(task.copies_memory(plan.copied).total)
        yield (
            f"copied to all devices (data-parallel): {len(plan.copied)} of {len(task.tables)} "
            f"tables, {size} on each, {_named(plan.copied)}: the optimizer of the dense layers "
            "must train them (constraint ways: [table_wise, column_wise, row_wise] forbids copies)"
        )
    if plan.copied_hot_rows:
        yield from _hot_rows(plan, task)
    if hashed := [name for name, count in plan.hot_rows if not count]:
        yield (
            f"rows numbered by a hash of their ids: {len(hashed)} of {len(task.tables)} tables, "
            f"{_named(hashed)}, whose blocks get equal shares of lookups whatever the order of "
            "ids: make the model's collections by with_hot_rows"
        )
    if plan.cached_rows:
        yield from _in_host_memory(plan, task)
    if plan.row_wise:
        yield (
            f"row-wise (in blocks of rows): {len(plan.row_wise)} of {len(task.tables)} tables, "
            f"{_named([*plan.row_wise])}: the fused optimizer trains them (constraint ways: "
            "[table_wise, column_wise, data_parallel] forbids rows)"
        )
        yield from _use_of_blocks(plan, task)
    dims = {table.name: table.dim for table in task.tables}
    split = len({p.table for p in plan.placements if p.width < dims[p.table]})
    if split and task.operator.optimizer == "rowwise_adagrad":
        yield (
            f"split by columns: {split} tables, of which row-wise Adagrad keeps a state for each "
            "slice, so that they train slightly differently"
        )


def _hot_rows(plan: ShardingPlan, task: ShardingTask) -> Iterator[str]:
    """Yields which tables have hot rows, and how many lookups these get."""
    tables, counts = {table.name: table for table in task.tables}, plan.copied_hot_rows
    _, apart = plan.resolved(task)
    size = format_bytes(apart.copies_memory([hot_name(name) for name in counts]).total)
    cold = {table.name: table.pooling_factor for table in apart.tables}
    lookups = sum(tables[name].pooling_factor for name in counts)
    share = 1 - sum(cold[name] for name in counts) / lookups if lookups else 0.0
    profiled = all(tables[name].access is not None for name in counts)
    known = "" if profiled else " (estimated: profile_tables.py counts them)"
    yield (
        f"hot rows copied to all devices: {sum(counts.values()):,} of {len(counts)} tables, {size} "
        f"on each, {_named(list(counts))}, with {share:.0%} of their lookups{known}: make the "
        "model's collections by with_hot_rows and the file of --hot-ids; the optimizer of the "
        "dense layers must train them"
    )


def _in_host_memory(plan: ShardingPlan, task: ShardingTask) -> Iterator[str]:
    """Yields which tables are in host memory, and what their caches hold."""
    from autoshard.workload.caches import lfu_hits  # other plans do without

    counts = dict(plan.cached_rows)
    tables = [table for table in task.tables if table.name in counts]
    found = [
        lfu_hits(table, np.array([counts[table.name]], float), task.batch_size) for table in tables
    ]
    used, held = sum(distinct for distinct, _ in found), sum(float(hits[0]) for _, hits in found)
    size = format_bytes(max(plan.host_bytes(task)))
    yield (
        f"in host memory: {len(counts)} of {len(task.tables)} tables, at most {size} for a device, "
        f"{_named(list(counts))}; caches on devices have {sum(counts.values()):,} of their "
        f"{sum(table.rows for table in tables):,} rows, and {held / used if used else 1:.1%} of "
        "the rows that a batch uses (kernels fused_uvm_caching and fused_uvm, never measured here)"
    )


def _named(tables: Sequence[str]) -> str:
    """Returns the first few names."""
    more = f" and {len(tables) - _SHOWN} more" if len(tables) > _SHOWN else ""
    return ", ".join(tables[:_SHOWN]) + more


def _use_of_blocks(plan: ShardingPlan, task: ShardingTask) -> Iterator[str]:
    """Yields which row-wise tables have unevenly used blocks, and of which that is not known."""
    hot = dict(plan.hot_rows)  # whose other rows are spread
    row_wise = {t: blocks for t, blocks in plan.blocks(task).items() if t.name not in hot}
    unknown = [table.name for table in row_wise if table.access is None]
    if unknown:
        yield (
            f"  blocks of {_named(unknown)} are taken to get equal shares of lookups: if ids are "
            "sorted by use, the first device gets most (profile_tables.py counts them, --hash-ids "
            "spreads them)"
        )
    uneven = {}
    for table, blocks in row_wise.items():
        if table.access is not None and table.pooling_factor:
            busiest = max(block.pooling_factor for block in blocks)
            uneven[table.name] = busiest * len(blocks) / table.pooling_factor
    if uneven and max(uneven.values()) > _UNEVEN:
        name = max(uneven, key=lambda name: uneven[name])
        yield (
            f"  the busiest block of {name} gets {uneven[name]:.2f} times the mean lookups: "
            "with --hot-ids of profile_tables.py and shard.py a plan copies its most used rows "
            "and spreads the others where that pays; --hash-ids of shard.py spreads all"
        )


@dataclass(frozen=True)
class Baseline:
    """A heuristic, its plan, and the prediction for it."""

    name: str
    plan: ShardingPlan
    prediction: StepPrediction


def best_heuristic(task: ShardingTask, predictor: StepPredictor, seed: int) -> Baseline | None:
    """Returns the heuristic with the lowest expected step time; None if no plan of any fits."""
    found = []
    for name in HEURISTICS:
        with suppress(PlanError):
            plan = make_sharder(name, SharderContext(seed=seed)).shard(task)
            found.append(Baseline(name, plan, predictor.of(plan)))
    return min(found, key=lambda baseline: baseline.prediction.expected_ms, default=None)


def expected_line(
    name: str, ours: StepPrediction, best: Baseline | None, objective: Objective
) -> str:
    """Returns the expected step time of a sharder's plan, and its ratio to the best heuristic's."""
    low, high = ours.interval_ms
    line = (
        f"expected, with uncertain costs: {ours.expected_ms:.2f} ms ({objective}; "
        f"90% interval {low:.2f} to {high:.2f})"
    )
    if best is None:
        return f"{line}; no heuristic finds a plan that fits"
    than = ours.over(best.prediction)
    if name == best.name or abs(1 - than.ratio) < _EQUAL:
        return f"{line}, the least of any heuristic"
    less = f"{1 - than.ratio:.1%} less" if than.ratio < 1 else f"{than.ratio - 1:.1%} more"
    return (
        f"{line}, {less} than by the best heuristic ({best.name}, "
        f"{best.prediction.expected_ms:.2f} ms): {than.low:.3f} to {than.high:.3f} of it, faster "
        f"with probability {than.probability:.2f}"
    )
