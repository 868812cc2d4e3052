"""Fitting tables into memory, whatever they cost: first fit decreasing, and what is missing."""

from collections.abc import Sequence

from autoshard.workload.operators import MemoryParts
from autoshard.workload.plans import PlanError
from autoshard.workload.sizes import told
from autoshard.workload.tables import DIM_STEP, EmbeddingTable, TableSlice
from autoshard.workload.tasks import ShardingTask

_NAMED = 3  # tables that an error names


def first_fit_decreasing(sizes: Sequence[int], rooms: Sequence[int]) -> list[int] | None:
    """The room of each size: the largest first, each where it fits first; None if one does not.

    The largest rooms are tried first.
    """
    free = list(rooms)
    order = sorted(range(len(free)), key=lambda room: -free[room])
    homes = [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        for room in order:
            if free[room] >= sizes[number]:
                free[room] -= sizes[number]
                homes[number] = room
                break
        else:
            return None
    return homes


def pack(task: ShardingTask, split: bool) -> list[tuple[TableSlice, int]]:
    """Any valid plan, as slices and their devices: tables whole if that packs, else split.

    PlanError says which tables are too large, or how much memory is missing.
    """
    rooms = [device.memory_bytes for device in task.devices]
    pieces = [table.whole() for table in task.tables]
    while True:
        sizes = [task.piece_bytes(piece) for piece in pieces]
        homes = first_fit_decreasing(sizes, rooms)
        if homes is not None:
            return list(zip(pieces, homes, strict=True))
        wide = [n for n, piece in enumerate(pieces) if piece.width >= 2 * DIM_STEP]
        if not split or not wide or sum(sizes) > sum(rooms):
            raise does_not_fit(task, split)
        largest = max(wide, key=lambda n: sizes[n])
        pieces[largest : largest + 1] = halves(pieces[largest])


def can_be_halved(piece: TableSlice) -> bool:
    """True if both halves would be wide enough."""
    return piece.width >= 2 * DIM_STEP


def halves(piece: TableSlice) -> tuple[TableSlice, TableSlice]:
    """A slice that can be halved as two, of nearly equal width."""
    width = piece.width // (2 * DIM_STEP) * DIM_STEP
    first = TableSlice(piece.table, piece.start, width)
    return first, TableSlice(piece.table, piece.start + width, piece.width - width)


def does_not_fit(task: ShardingTask, split: bool) -> PlanError:
    """Why the tables do not fit into the devices' memory, and how much is missing of what."""
    rooms = [device.memory_bytes for device in task.devices]
    by_size = sorted(task.tables, key=lambda table: -task.table_bytes(table))
    parts = _parts(task, task.tables)
    total, largest = parts.total, max(rooms)
    named = [f"{table.name} ({told(task.table_bytes(table))})" for table in by_size[:_NAMED]]
    stored = total - parts.inputs - parts.outputs
    # What a batch needs grows with it, and what is stored does not.
    mend = "add devices or memory" + (", or make batches smaller" if stored <= sum(rooms) else "")
    if total > sum(rooms):
        return PlanError(
            f"the tables need {told(total)} ({parts.told}) and the {len(rooms)} devices have "
            f"{told(sum(rooms))}: {told(total - sum(rooms))} of memory are missing; the largest "
            f"tables are {', '.join(named)}: {mend}"
        )
    too_large = [name for name, t in zip(named, by_size, strict=False)
                 if task.table_bytes(t) > largest]  # fmt: skip
    if too_large and not split:
        over = task.table_bytes(by_size[0]) - largest
        return PlanError(
            f"whole tables larger than the largest device ({told(largest)}): "
            f"{', '.join(too_large)}: {told(over)} of memory are missing on one device, where "
            f"{by_size[0].name} needs {_parts(task, by_size[:1]).told}: add memory, "
            "or use a sharder that splits tables, such as autoshard"
        )
    return PlanError(
        f"no way is found to pack tables of {told(total)} ({parts.told}) into {len(rooms)} devices "
        f"of together {told(sum(rooms))}: they fit only in sum; the largest tables are "
        f"{', '.join(named)}: {mend}"
    )


def _parts(task: ShardingTask, tables: Sequence[EmbeddingTable]) -> MemoryParts:
    """Of whole tables together."""
    return task.operator.memory([table.whole() for table in tables], task.batch_size)
