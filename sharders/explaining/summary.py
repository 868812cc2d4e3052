"""The summary of a plan: memory, and expected step time against the best heuristic's.

Reports are lines of text and tables without frames.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from rich.table import Table

from autoshard.cost_model import StepPrediction, StepPredictor
from autoshard.sharders.context import SharderContext
from autoshard.sharders.heuristics.heuristics import HEURISTICS
from autoshard.sharders.registry import make_sharder
from autoshard.workload import EmbeddingTable, Objective, PlanError, ShardingPlan, ShardingTask
from autoshard.workload.tables.operators import MemoryParts
from autoshard.workload.ways import WAYS

ReportPart = str | Table  # a line of text, or a table

_MB = 1e6
_MEMORY = "memory (MB; inputs and outputs are a batch's, with gradients of the outputs)"
_HEADS = {"optimizer": "optim", "gradients": "grads"}  # else lines are longer than 80 characters
_WHOLE_MB = 10_000  # memory of a device from which on tenths of MB are left out
_EQUAL = 5e-4  # a relative difference that would read 0.0 %


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


def memory_parts(plan: ShardingPlan, task: ShardingTask) -> Iterator[ReportPart]:
    """Yields a table of each device's memory by part, reserved if any, and free, in MB."""
    reserved = any(device.reserved_bytes for device in task.devices)
    uses = [name for name in MemoryParts._fields if name != "gradients" or plan.has_copies]
    heads = [_HEADS.get(name, name) for name in uses]
    shown = new_table(("device", *heads, *(["reserve"] if reserved else []), "free", "of", "full"))
    large = max(device.memory_bytes for device in task.devices) >= _WHOLE_MB * _MB
    digits = 0 if large else 1
    for device, parts in zip(task.devices, plan.device_memory(task), strict=True):
        kept = [device.reserved_bytes] if reserved else []
        held = (getattr(parts, name) for name in uses)
        sizes = (*held, *kept, device.usable_bytes - parts.total, device.memory_bytes)
        full = (parts.total + device.reserved_bytes) / device.memory_bytes
        shown.add_row(device.name, *(f"{size / _MB:,.{digits}f}" for size in sizes), f"{full:.1%}")
    yield _MEMORY
    yield shown


def training_notes(plan: ShardingPlan, task: ShardingTask) -> Iterator[str]:
    """Yields what a plan changes in training, beside where tables are."""
    for way in WAYS:
        yield from way.notes(plan, task)
    dims = {table.name: table.dim for table in task.tables}
    split = len({p.table for p in plan.placements if p.width < dims[p.table]})
    if split and task.operator.optimizer == "rowwise_adagrad":
        yield (
            f"split by columns: {split} tables, of which row-wise Adagrad keeps a state for each "
            "slice, so that they train slightly differently"
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
