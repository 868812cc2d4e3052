"""Finds any valid plan of a task, or reports why there is none."""

from collections.abc import Sequence

from autoshard.workload.packing.admission import RuleMasks
from autoshard.workload.packing.feasibility import Undecided, any_plan, contradiction
from autoshard.workload.packing.first_fit import first_fit_decreasing
from autoshard.workload.packing.units import bytes_of_units
from autoshard.workload.plans.plan import PlanError
from autoshard.workload.sizes import format_bytes
from autoshard.workload.tables.operators import MemoryParts
from autoshard.workload.tables.table import EmbeddingTable, Piece, can_be_split, halves
from autoshard.workload.tasks.task import ShardingTask

_NAMED = 3  # tables that an error names


def pack(task: ShardingTask, split: bool) -> list[tuple[Piece, int]]:
    """Returns pieces and devices of any valid plan, with whole tables if possible.

    Args:
        task: Task to plan.
        split: Whether tables may be split by columns.

    Raises:
        PlanError: Tables are too large, memory is missing, or rules contradict each other.
    """
    if task.rules:
        return _pack_by_rules(task, split)
    pieces = [table.whole() for table in task.tables]
    while True:
        sizes = task.operator.bytes_of_each(pieces, task.batch_size)
        homes = first_fit_decreasing(sizes[None], task.usable_bytes[None])[0]
        if homes.min() >= 0:
            return list(zip(pieces, homes.tolist(), strict=True))
        wide = [n for n, piece in enumerate(pieces) if can_be_split(piece)]
        if not split or not wide:
            raise does_not_fit(task, split)
        check_total(task, pieces, split)
        largest = max(wide, key=sizes.__getitem__)
        pieces[largest : largest + 1] = halves(pieces[largest])


def check_total(task: ShardingTask, pieces: Sequence[Piece], split: bool) -> None:
    """Raises PlanError if pieces take more than all memory, which splitting them does not change.

    Sums are of floats, which have no upper limit.
    """
    sizes = task.operator.bytes_of_each(pieces, task.batch_size)
    if sizes.sum(dtype=float) > task.usable_bytes.sum(dtype=float):
        raise does_not_fit(task, split)


def _pack_by_rules(task: ShardingTask, split: bool) -> list[tuple[Piece, int]]:
    masks = RuleMasks(task)
    sizes = bytes_of_units(task.operator, task.batch_size, masks.units)
    homes = first_fit_decreasing(sizes[None], task.usable_bytes[None], masks)[0]
    if homes.min() >= 0:
        return [
            (piece, home)
            for unit, home in zip(masks.units, homes.tolist(), strict=True)
            for piece in unit.pieces
        ]
    try:
        placed = any_plan(task, split)
    except Undecided as undecided:
        raise PlanError(f"{undecided}: loosen the constraints, or add memory") from None
    if placed is None:
        raise does_not_fit(task, split)
    return list(placed)


def _contradicting(task: ShardingTask, split: bool) -> PlanError | None:
    """Returns the rules that contradict each other; None if only memory is missing."""
    try:
        found = contradiction(task, split)
    except Undecided as undecided:
        return PlanError(f"{undecided}: loosen the constraints, or add memory")
    if found is None:
        return PlanError(
            "placing tables one by one failed, but there are plans that keep all constraints: use "
            "a sharder that searches, such as autoshard"
        )
    if not found.rules:
        return None
    rules = " and ".join(repr(rule) for rule in found.rules)
    single = len(found.rules) == 1
    return PlanError(
        f"the constraint{'' if single else 's'} {rules} cannot be kept"
        f"{'' if single else ' together'}"
        f"{' within the memory of the devices' if found.memory else ''}"
        f"{'' if split else ', with whole tables'}: drop or loosen one"
    )


def does_not_fit(task: ShardingTask, split: bool) -> PlanError:
    """Returns the error of a task without a plan: missing memory, or contradicting rules."""
    if task.rules and (why := _contradicting(task, split)) is not None:
        return why
    capacities = task.usable_bytes.tolist()
    by_size = sorted(task.tables, key=lambda table: -task.table_bytes(table))
    parts = _parts(task, task.tables)
    total, largest, free = parts.total, max(capacities), sum(capacities)
    named = [
        f"{table.name} ({format_bytes(task.table_bytes(table))})" for table in by_size[:_NAMED]
    ]
    stored = total - parts.inputs - parts.outputs
    # Smaller batches need less memory for inputs and outputs, but not for weights.
    fix = "add devices or memory" + (", or make batches smaller" if stored <= free else "")
    if total > free:
        return PlanError(
            f"the tables need {format_bytes(total)} ({parts.breakdown}) and the {len(capacities)} "
            f"devices have {format_bytes(free)}: {format_bytes(total - free)} of memory are "
            f"missing; the largest tables are {', '.join(named)}: {fix}"
        )
    too_large = [name for name, t in zip(named, by_size, strict=False)
                 if task.table_bytes(t) > largest]  # fmt: skip
    if too_large and not split:
        over = task.table_bytes(by_size[0]) - largest
        return PlanError(
            f"whole tables larger than the largest device ({format_bytes(largest)}): "
            f"{', '.join(too_large)}: {format_bytes(over)} of memory are missing on one device, "
            f"where {by_size[0].name} needs {_parts(task, by_size[:1]).breakdown}: add memory, "
            "or use a sharder that splits tables, such as autoshard"
        )
    return PlanError(
        f"tables of {format_bytes(total)} ({parts.breakdown}) could not be packed into "
        f"{len(capacities)} devices of together {format_bytes(free)}: they fit only in sum; the "
        f"largest tables are {', '.join(named)}: {fix}"
    )


def _parts(task: ShardingTask, tables: Sequence[EmbeddingTable]) -> MemoryParts:
    """Returns the memory of whole tables together."""
    return task.operator.memory([table.whole() for table in tables], task.batch_size)
