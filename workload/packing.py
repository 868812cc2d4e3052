"""Any valid plan of a task, or what is missing for one."""

from collections.abc import Sequence

from autoshard.workload.admission import RuleMasks
from autoshard.workload.feasibility import Undecided, any_plan, contradiction
from autoshard.workload.first_fit import first_fit_decreasing
from autoshard.workload.operators import MemoryParts
from autoshard.workload.plans import PlanError
from autoshard.workload.sizes import format_bytes
from autoshard.workload.tables import EmbeddingTable, Piece, can_be_split, halves
from autoshard.workload.tasks import ShardingTask
from autoshard.workload.units import bytes_of_units

_NAMED = 3  # tables that an error names


def pack(task: ShardingTask, split: bool) -> list[tuple[Piece, int]]:
    """Any valid plan, as slices and their devices: tables whole if that packs, else split.

    PlanError says which tables are too large, how much memory is missing, or which rules cannot be
    kept together.
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
        if not split or not wide or sizes.sum() > task.usable_bytes.sum():
            raise does_not_fit(task, split)
        largest = max(wide, key=sizes.__getitem__)
        pieces[largest : largest + 1] = halves(pieces[largest])


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
    """Which rules cannot be kept; None if it is the memory alone that is missing."""
    try:
        found = contradiction(task, split)
    except Undecided as undecided:
        return PlanError(f"{undecided}: loosen the constraints, or add memory")
    if found is None:
        return PlanError(
            "placing tables one by one came to an end, but there are plans that keep all "
            "constraints: use a sharder that searches, such as autoshard"
        )
    if not found.rules:
        return None
    rules = " and ".join(repr(rule) for rule in found.rules)
    one = len(found.rules) == 1
    return PlanError(
        f"the constraint{'' if one else 's'} {rules} cannot be kept{'' if one else ' together'}"
        f"{' within the memory of the devices' if found.memory else ''}"
        f"{'' if split else ', with whole tables'}: drop or loosen one"
    )


def does_not_fit(task: ShardingTask, split: bool) -> PlanError:
    """Why there is no plan: how much memory is missing of what, or which rules cannot be kept."""
    if task.rules and (why := _contradicting(task, split)) is not None:
        return why
    rooms = task.usable_bytes.tolist()
    by_size = sorted(task.tables, key=lambda table: -task.table_bytes(table))
    parts = _parts(task, task.tables)
    total, largest, free = parts.total, max(rooms), sum(rooms)
    named = [
        f"{table.name} ({format_bytes(task.table_bytes(table))})" for table in by_size[:_NAMED]
    ]
    stored = total - parts.inputs - parts.outputs
    # What a batch needs grows with it, and what is stored does not.
    mend = "add devices or memory" + (", or make batches smaller" if stored <= free else "")
    if total > free:
        return PlanError(
            f"the tables need {format_bytes(total)} ({parts.breakdown}) and the {len(rooms)} "
            f"devices have {format_bytes(free)}: {format_bytes(total - free)} of memory are "
            f"missing; the largest tables are {', '.join(named)}: {mend}"
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
        f"no way is found to pack tables of {format_bytes(total)} ({parts.breakdown}) into "
        f"{len(rooms)} devices of together {format_bytes(free)}: they fit only in sum; the "
        f"largest tables are {', '.join(named)}: {mend}"
    )


def _parts(task: ShardingTask, tables: Sequence[EmbeddingTable]) -> MemoryParts:
    """Of whole tables together."""
    return task.operator.memory([table.whole() for table in tables], task.batch_size)
