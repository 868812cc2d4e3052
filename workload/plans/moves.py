"""Moves of columns and rows between devices when one plan replaces another."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import scipy  # which loads its parts when they are used

from autoshard.workload.plans.placements import Placement
from autoshard.workload.plans.plan import PlanError, ShardingPlan
from autoshard.workload.tables.table import EmbeddingTable
from autoshard.workload.tasks.task import ShardingTask
from autoshard.workload.ways.option import option_of


@dataclass(frozen=True)
class Move:
    """Columns `start` to `start + width` of a table that move from one device to another.

    `bytes` counts their weights and optimizer state; that of a copy is as large as its weights.
    Copies of hot rows are of table `hot_name`. `rows` are the first row and the one after the last;
    None for all rows.
    """

    table: str
    start: int
    width: int
    source: int
    target: int
    bytes: int
    rows: tuple[int, int] | None = None


class Traffic(NamedTuple):
    """Bytes that a device sends and receives."""

    out: int = 0
    into: int = 0

    @property
    def most(self) -> int:
        """Returns the bytes of the busier direction, because links carry both at once."""
        return max(self.out, self.into)


def moves_between(old: ShardingPlan, new: ShardingPlan, task: ShardingTask) -> tuple[Move, ...]:
    """Returns the moves from the old plan to the new one, in the order of the task's tables.

    The old plan may be for another number of devices: what was on devices that are gone moves, and
    devices that are new get their copies of tables and hot rows, in turn from each of the others.
    Columns that stay on their device do not move, even if they are in another piece. In blocks of
    rows, other hot rows mean that all others are numbered anew, and move. Copies of new hot
    rows are not counted. The copies of a table come from where its columns were; of copies, columns
    that a device keeps do not move. Memory is not checked.

    Args:
        old: Plan in use.
        new: Plan that replaces it.
        task: Task of the new plan; the old one is of the same tables.

    Raises:
        PlanError: A plan does not place the task's tables on its devices.
    """
    name = "old"
    try:
        old.check_columns(task.tables)
        name = "new"
        new.check_places(task)
    except PlanError as fault:
        raise PlanError(f"the {name} plan is not of this task: {fault}") from fault
    before, after, held = old.by_table(), new.by_table(), new.held_tables(task)
    found, copies = list[Move](), list[Move]()
    for table in task.tables:
        was, now = before.get(table.name), after.get(table.name)
        options = [option_of(plan.options, table.name) for plan in (old, new)]
        one, other = (set(option.copies(table, task.batch_size)) for option in options)
        for copy in one & other:
            copies += _copies_on_new(copy, old.num_devices, task)
        if was is None:  # each device that there was has all columns
            found += _from_copies(table, old, now or (), task)
            continue
        anew = not options[0].same_row_numbers(options[1])
        if anew and now is not None and any(len(p.devices) > 1 for p in (*was, *now)):
            found += _numbered_anew(table, was, now, task)
            continue
        targets = [[p] for p in _on_each(table, task)] if now is None else [now]
        same = table if anew else held[table.name]  # copied rows are where they were
        for target in targets:
            found += _of_table(same, was, target, task)
    return (*found, *copies)


def moved_bytes(moves: Iterable[Move]) -> int:
    """Returns the bytes of all moves together."""
    return sum(move.bytes for move in moves)


def traffic_of(moves: Iterable[Move], num_devices: int) -> tuple[Traffic, ...]:
    """Returns what each device sends and receives."""
    out, into = [0] * num_devices, [0] * num_devices
    for move in moves:
        out[move.source] += move.bytes
        into[move.target] += move.bytes
    return tuple(map(Traffic, out, into))


def renumbered(
    plan: ShardingPlan,
    near: ShardingPlan,
    task: ShardingTask,
    weigh: Callable[[EmbeddingTable, int], float] | None = None,
) -> ShardingPlan:
    """Returns the plan with equal devices exchanged so that least moves from plan `near`.

    Devices are equal if memory and rules agree, so costs and validity do not change. Blocks of rows
    have their devices by their number, so a plan with any is returned as it is.

    Args:
        plan: Plan to renumber.
        near: Plan in use, for any number of devices.
        task: Task of both plans.
        weigh: Weight of so many columns of a table. Default: the bytes that would move.
    """
    if plan.row_wise:
        return plan
    kinds = [
        (replace(device, name="any"), task.rules_of_device(number))
        for number, device in enumerate(task.devices)
    ]
    kept = np.array([[0.0 if one == other else -np.inf for other in kinds] for one in kinds])
    before, after = near.by_table(), plan.by_table()
    for table in task.tables:
        if table.name not in before or table.name not in after:  # copies, which are everywhere
            continue
        for move in _overlaps(table, before[table.name], after[table.name]):
            if move.source >= len(kept):  # a device that is gone
                continue
            width, rows = move.width, _rows_of(move, table)
            kept[move.target, move.source] += (
                weigh(table, width) * rows / table.rows
                if weigh
                else task.operator.stored_bytes(rows, width)
            )
    # Ties keep the plan's own numbers.
    kept += np.eye(len(kept)) * 1e-9 * max(1.0, kept.max())
    _, numbers = scipy.optimize.linear_sum_assignment(kept, maximize=True)
    placements = tuple(replace(p, device=int(numbers[p.device])) for p in plan.placements)
    return replace(plan, placements=placements)


def _of_table(
    table: EmbeddingTable,
    old: Sequence[Placement],
    new: Sequence[Placement],
    task: ShardingTask,
) -> list[Move]:
    moves: list[Move] = []
    for move in _overlaps(table, old, new):
        if move.source == move.target:
            continue
        last = moves[-1] if moves else None
        if last and replace(last, start=last.start + last.width, width=move.width) == move:
            move = replace(last, width=last.width + move.width)
            moves.pop()
        moves.append(move)
    stored = task.operator.stored_bytes
    return [replace(move, bytes=stored(_rows_of(move, table), move.width)) for move in moves]


def _numbered_anew(
    table: EmbeddingTable,
    old: Sequence[Placement],
    new: Sequence[Placement],
    task: ShardingTask,
) -> list[Move]:
    """Returns the moves if any row of a block may be in any block afterwards."""
    moves = []
    for was in old:
        for now in new:
            start = max(was.start, now.start)
            width = min(was.start + was.width, now.start + now.width) - start
            rows = table.rows // (len(was.devices) * len(now.devices))
            if width <= 0:
                continue
            size = task.operator.stored_bytes(rows, width)
            moves += [
                Move(table.name, start, width, source, target, size)
                for source in was.devices
                for target in now.devices
                if source != target
            ]
    return moves


def _from_copies(
    table: EmbeddingTable, old: ShardingPlan, new: Sequence[Placement], task: ShardingTask
) -> list[Move]:
    """Returns the moves to new devices of columns of a table of which each device that there was
    has a copy.

    Args:
        table: The table.
        old: Plan with the copies.
        new: Where columns are in the new plan.
        task: Task of the new plan.
    """
    found = list[Move]()
    for device in range(old.num_devices, len(task.devices)) if new else ():
        source = Placement(table.name, 0, table.dim, device % old.num_devices)
        found += [m for m in _of_table(table, [source], new, task) if m.target == device]
    return found


def _copies_on_new(table: EmbeddingTable, ranks: int, task: ShardingTask) -> list[Move]:
    """Returns the moves of copies to devices that are new, in turn from each of the others."""
    size = task.operator.copied_bytes(table.rows, table.dim)
    new = range(ranks, len(task.devices))
    return [Move(table.name, 0, table.dim, device % ranks, device, size) for device in new]


def _rows_of(move: Move, table: EmbeddingTable) -> int:
    return table.rows if move.rows is None else move.rows[1] - move.rows[0]


def _on_each(table: EmbeddingTable, task: ShardingTask) -> list[Placement]:
    return [Placement(table.name, 0, table.dim, device) for device in range(len(task.devices))]


def _overlaps(
    table: EmbeddingTable, old: Sequence[Placement], new: Sequence[Placement]
) -> Iterator[Move]:
    """Yields what has one device in each plan, also where it is the same; without bytes."""
    for rows in _ranges(table.rows, old, new):
        covered = None if rows == (0, table.rows) else rows
        cuts = sorted({p.start for p in (*old, *new)} | {old[-1].start + old[-1].width})
        for start, end in pairwise(cuts):
            source, target = (_device_at(plan, start, rows[0], table.rows) for plan in (old, new))
            yield Move(table.name, start, end - start, source, target, 0, covered)


def _ranges(rows: int, *plans: Sequence[Placement]) -> list[tuple[int, int]]:
    """Returns ranges of rows that are on one device in all plans."""
    cuts = {0, rows} | {first for plan in plans for first, _, _ in plan[0].row_ranges(rows)}
    return list(pairwise(sorted(cuts)))


def _device_at(placements: Sequence[Placement], column: int, row: int, rows: int) -> int:
    """Returns the device that has a column of a row."""
    found = next(p for p in reversed(placements) if p.start <= column)
    return found.device_of(row, rows)
