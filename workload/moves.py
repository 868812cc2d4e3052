"""What moves between devices where one plan takes another's place."""

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
    """Columns `start` to `start + width` of a table that go from one device to another.

    `bytes` are those of their weights and of their optimizer's state.
    """

    table: str
    start: int
    width: int
    source: int
    target: int
    bytes: int


class Traffic(NamedTuple):
    """Bytes that a device sends away, and that it takes in."""

    out: int = 0
    into: int = 0

    @property
    def most(self) -> int:
        """In the busier direction: links carry both at once."""
        return max(self.out, self.into)


def moves_between(old: ShardingPlan, new: ShardingPlan, task: ShardingTask) -> tuple[Move, ...]:
    """The moves that make the new plan of the old one, in the order of the task's tables.

    Columns that stay on their device do not move, whatever slices they are in. PlanError unless
    both plans place the task's tables on its devices; whether they fit does not matter.
    """
    for name, plan in (("old", old), ("new", new)):
        try:
            plan.check_places(task)
        except PlanError as fault:
            raise PlanError(f"the {name} plan is not of this task: {fault}") from fault
    before, after = old.by_table(), new.by_table()
    return tuple(
        move for table in task.tables
        for move in _of_table(table, before[table.name], after[table.name], task)
    )  # fmt: skip


def moved_bytes(moves: Iterable[Move]) -> int:
    """Of all moves together."""
    return sum(move.bytes for move in moves)


def traffic_of(moves: Iterable[Move], num_devices: int) -> tuple[Traffic, ...]:
    """What each device sends and takes."""
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
    """The plan with its devices numbered so that most lies where the other plan has it.

    Only like devices take each other's numbers, so it costs and fits as it did.

    Args:
        plan: to be numbered otherwise.
        near: whose places count.
        task: of both.
        weigh: what so many columns of a table count; by default the bytes that would move.
    """
    like = [
        (replace(device, name="any"), task.rules_of_device(number))
        for number, device in enumerate(task.devices)
    ]
    kept = np.array([[0.0 if one == other else -np.inf for other in like] for one in like])
    before, after = near.by_table(), plan.by_table()
    for table in task.tables:
        for start, end, there, here in _pieces(before[table.name], after[table.name]):
            width = end - start
            kept[here, there] += (
                weigh(table, width) if weigh else task.operator.stored_bytes(table.rows, width)
            )
    # Of equally good numbers its own: a plan is not renumbered for nothing.
    kept += np.eye(len(kept)) * 1e-9 * max(1.0, kept.max())
    _, numbers = scipy.optimize.linear_sum_assignment(kept, maximize=True)
    placements = tuple(replace(p, device=int(numbers[p.device])) for p in plan.placements)
    return ShardingPlan(placements, plan.num_devices)


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
            start = moves.pop().start  # one piece of both: its state goes once
        size = task.operator.stored_bytes(table.rows, end - start)
        moves.append(Move(table.name, start, end - start, source, target, size))
    return moves


def _pieces(old: Sequence[Placement], new: Sequence[Placement]) -> list[tuple[int, int, int, int]]:
    """Columns from and up to, and their device in each plan, of a table that both place whole."""
    cuts = {p.start for p in (*old, *new)} | {old[-1].start + old[-1].width}
    homes = [[_device_at(plan, start) for start in sorted(cuts)[:-1]] for plan in (old, new)]
    return [
        (start, end, *devices)
        for (start, end), *devices in zip(pairwise(sorted(cuts)), *homes, strict=True)
    ]


def _device_at(placements: Sequence[Placement], column: int) -> int:
    """Of the placement that covers the column."""
    return next(p.device for p in reversed(placements) if p.start <= column)
