"""Moves of columns between devices when one plan replaces another."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import scipy  # which loads its parts when they are used

from autoshard.workload.plans import Placement, PlanError, ShardingPlan
from autoshard.workload.tables import EmbeddingTable
from autoshard.workload.tasks import ShardingTask


@dataclass(frozen=True)
class Move:
    """Columns `start` to `start + width` of a table that move from one device to another.

    `bytes` counts their weights and optimizer state.
    """

    table: str
    start: int
    width: int
    source: int
    target: int
    bytes: int


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

    Columns that stay on their device do not move, even if they are in another piece. The copies of
    a table come from where its columns were; of copies, columns that a device keeps do not move.
    Memory is not checked.

    Raises:
        PlanError: A plan does not place the task's tables on its devices.
    """
    for name, plan in (("old", old), ("new", new)):
        try:
            plan.check_places(task)
        except PlanError as fault:
            raise PlanError(f"the {name} plan is not of this task: {fault}") from fault
    before, after = old.by_table(), new.by_table()
    found: list[Move] = []
    for table in task.tables:
        was, now = before.get(table.name), after.get(table.name)
        if was is None:  # each device has all columns
            continue
        targets = [[p] for p in _copies(table, task)] if now is None else [now]
        for target in targets:
            found += _of_table(table, was, target, task)
    return tuple(found)


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

    Devices are equal if memory and rules agree, so costs and validity do not change.

    Args:
        plan: Plan to renumber.
        near: Plan in use.
        task: Task of both plans.
        weigh: Weight of so many columns of a table. Default: the bytes that would move.
    """
    kinds = [
        (replace(device, name="any"), task.rules_of_device(number))
        for number, device in enumerate(task.devices)
    ]
    kept = np.array([[0.0 if one == other else -np.inf for other in kinds] for one in kinds])
    before, after = near.by_table(), plan.by_table()
    for table in task.tables:
        if table.name not in before or table.name not in after:  # copies, which are everywhere
            continue
        for start, end, there, here in _pieces(before[table.name], after[table.name]):
            width = end - start
            kept[here, there] += (
                weigh(table, width) if weigh else task.operator.stored_bytes(table.rows, width)
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
    for start, end, source, target in _pieces(old, new):
        if source == target:
            continue
        last = moves[-1] if moves else None
        if last and (last.start + last.width, last.source, last.target) == (start, source, target):
            start = moves.pop().start  # adjacent columns move as one
        size = task.operator.stored_bytes(table.rows, end - start)
        moves.append(Move(table.name, start, end - start, source, target, size))
    return moves


def _copies(table: EmbeddingTable, task: ShardingTask) -> list[Placement]:
    return [Placement(table.name, 0, table.dim, device) for device in range(len(task.devices))]


def _pieces(old: Sequence[Placement], new: Sequence[Placement]) -> list[tuple[int, int, int, int]]:
    """Returns ranges of columns, start and end, with their device in each plan."""
    cuts = {p.start for p in (*old, *new)} | {old[-1].start + old[-1].width}
    homes = [[_device_at(plan, start) for start in sorted(cuts)[:-1]] for plan in (old, new)]
    return [
        (start, end, *devices)
        for (start, end), *devices in zip(pairwise(sorted(cuts)), *homes, strict=True)
    ]


def _device_at(placements: Sequence[Placement], column: int) -> int:
    """Returns the device of the placement that covers the column."""
    return next(p.device for p in reversed(placements) if p.start <= column)
