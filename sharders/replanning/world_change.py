"""Carries a plan over to another number of devices, so that least moves.

What is on a device that stays remains there. Pieces on devices that go are placed greedily, each on
the device that is the fastest with it. Blocks of rows on all devices, and copies, follow the number
of devices.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from autoshard.cost_model import EstimatedCosts
from autoshard.cost_model.pricing.placement_state import TaskPlacement, UnitCatalog
from autoshard.cost_model.pricing.prediction import Placed
from autoshard.cost_model.threads import one_thread
from autoshard.sharders.search.move_budget import GONE
from autoshard.workload import EmbeddingTable, Piece, PlanError, ShardingPlan, ShardingTask
from autoshard.workload.errors import FieldError
from autoshard.workload.packing.admission import RuleMasks
from autoshard.workload.plans.placements import Placement
from autoshard.workload.sizes import format_bytes
from autoshard.workload.tables.table import can_be_blocks


class CarriedPlan(NamedTuple):
    """A plan that was carried over to another number of devices.

    Args:
        plan: Valid plan of the new task.
        was: Where columns were, and where blocks of rows will be, for as many devices as there are
            and were; those beyond the task's are gone.
    """

    plan: ShardingPlan
    was: ShardingPlan


@one_thread()
def carried_over(oracle: EstimatedCosts, plan: ShardingPlan, task: ShardingTask) -> CarriedPlan:
    """Returns the plan for the devices of a task, with as few moves as that takes.

    Pieces also move off devices that have no memory for them any longer, as blocks of rows and the
    samples of copies grow where devices go, and off those that a rule forbids.

    Args:
        oracle: Predicts which device is the fastest.
        plan: Plan in use, of the task's tables, for any number of devices.
        task: The task.

    Raises:
        PlanError: Something does not fit, or a rule is broken.
    """
    held = _with_blocks(plan, task)
    try:
        rest = held.columns_task(task, reserve=True)
    except FieldError as lack:
        raise PlanError(f"{lack.problem}: add memory, or make a plan anew") from None
    carried = held
    if held.placements:
        blocks = {block.name for parts in held.blocks(task).values() for block in parts}
        placed = _Pieces(oracle, rest, held.placed(task), blocks).placed()
        columns = [pair for pair in placed if pair[0].table.name not in blocks]
        carried = held.with_columns(ShardingPlan.in_place(task, columns))
    carried.check(task)
    ranks = len(task.devices)
    devices = ranks * (_nowhere(plan, task) // ranks + 1)  # which blocks of rows divide, too
    return CarriedPlan(carried, replace(held, num_devices=devices))


def _nowhere(plan: ShardingPlan, task: ShardingTask) -> int:
    """Returns the number of a device that there neither is nor was."""
    return max(plan.num_devices, len(task.devices))


def _with_blocks(plan: ShardingPlan, task: ShardingTask) -> ShardingPlan:
    """Returns the plan with blocks of rows for the devices of the task; other pieces are where they
    were, perhaps on devices that are gone.
    """
    tables = plan.held_tables(task)
    found = list[Placement]()
    for name, pieces in plan.by_table().items():
        by_rows = len(pieces[0].devices) > 1
        found += _blocks(tables[name], pieces, plan, task) if by_rows else pieces
    return replace(plan, placements=tuple(found), num_devices=len(task.devices))


def _blocks(
    table: EmbeddingTable, pieces: Sequence[Placement], plan: ShardingPlan, task: ShardingTask
) -> list[Placement]:
    """Returns the blocks of rows of a table: on all devices if they were, or if there are not as
    many nodes as before; in one piece, which is nowhere, if that is not possible.
    """
    ranks, of_node = len(task.devices), len(pieces[0].devices)
    if of_node < min(ranks, plan.num_devices) and ranks % of_node == 0:
        stay = [piece for piece in pieces if piece.device < ranks]
        go = [piece for piece in pieces if piece.device >= ranks]
        free = sorted(set(range(0, ranks, of_node)) - {piece.device for piece in stay})
        if len(go) <= len(free):
            first = go[0].device // of_node if go else 0  # nodes that go are spread over others
            moved = (
                replace(piece, device=free[(first + number) % len(free)])
                for number, piece in enumerate(go)
            )
            return [*stay, *moved]
    if ranks > 1 and can_be_blocks(table.rows, ranks):
        return [Placement(table.name, 0, table.dim, 0, ranks)]
    return [Placement(table.name, 0, table.dim, _nowhere(plan, task))]


class _Pieces:
    """Pieces of a plan and their devices, while those on devices that are gone are placed.

    Args:
        oracle: Predicts costs.
        task: The task.
        was: Pieces with their devices, of which those from `len(task.devices)` on are gone.
        fixed: Tables that do not move.
    """

    def __init__(
        self, oracle: EstimatedCosts, task: ShardingTask, was: Placed, fixed: Collection[str]
    ) -> None:
        self._masks, self._oracle, self._fixed = RuleMasks(task), oracle, fixed
        gathered = self._masks.gathered(was)
        self._units = [unit for unit, _ in gathered]
        self._homes = [GONE] * len(gathered)
        self._catalog = UnitCatalog(oracle.expectation(), task, self._masks, self._units)
        self._devices = TaskPlacement(self._catalog)
        self._parts = Counter(piece.table.name for unit in self._units for piece in unit.pieces)
        for number, (unit, device) in enumerate(gathered):
            stays = device < len(task.devices)
            allowed = stays and self._masks.allowed[self._catalog.origins[number], device]
            if allowed or unit.name in fixed:
                self._put(number, device)
        for device in range(len(task.devices)):
            self._free(device)

    def placed(self) -> list[tuple[Piece, int]]:
        """Returns all pieces with their devices; PlanError if one has none."""
        gone = np.flatnonzero(np.array(self._homes) == GONE)
        if len(gone):
            alone_ms = self._oracle.alone_ms([self._units[number] for number in gone])
            order = np.lexsort((-alone_ms, self._masks.freedom(self._catalog.origins[gone])))
            for number in gone[order].tolist():
                self._place(number)
        return [
            (piece, device)
            for unit, device in zip(self._units, self._homes, strict=True)
            for piece in unit.pieces
            if device != GONE  # halves take the place of what was split
        ]

    def _free(self, device: int) -> None:
        """Takes pieces off a device until what it holds fits: the smallest that is enough, or the
        largest.
        """
        catalog = self._catalog
        held = [n for n, home in enumerate(self._homes)
                if home == device and self._units[n].name not in self._fixed]  # fmt: skip
        held.sort(key=lambda number: int(catalog.bytes[number]))
        while held and (lack := -int(self._devices.free[0, device])) > 0:
            enough = (place for place, n in enumerate(held) if catalog.bytes[n] >= lack)
            number = held.pop(next(enough, -1))
            self._devices.take(number, device)
            self._homes[number] = GONE

    def _place(self, number: int) -> None:
        """Places a piece on the device that is the fastest with it, or its halves."""
        unit, which = self._units[number], np.array([number])
        fitting = self._devices.admits_units(which)[0]
        # Else the columns of the table would be assigned anew, and more of them would move.
        near = fitting & [self._continues(unit.pieces[0], device) for device in range(len(fitting))]
        if near.any():
            fitting = near
        if fitting.any():
            with_it = self._devices.joined(which)[0].mean(-1).sum(-1)
            self._put(number, int(np.where(fitting, with_it, np.inf).argmin()))
        elif self._masks.may_split(unit, self._parts[unit.name]):
            self._parts[unit.name] += 1
            halves = unit.halves()
            first = self._catalog.extend(halves)
            self._units += halves
            self._homes += [GONE, GONE]
            self._place(first)
            self._place(first + 1)
        else:
            size, most = self._catalog.bytes[number], self._devices.free.max()
            raise PlanError(
                f"table {unit.name} has to move and needs {format_bytes(int(size))}, and no device "
                f"that may take it has as much left (at most {format_bytes(int(most))}): add "
                "memory, or make a plan anew"
            )

    def _continues(self, piece: Piece, device: int) -> bool:
        """Returns whether columns of the table on a device, if any, are beside those of a piece."""
        others = [
            other
            for unit, home in zip(self._units, self._homes, strict=True)
            if home == device and unit.name == piece.table.name
            for other in unit.pieces[:1]
        ]
        ends = {piece.start, piece.start + piece.width}
        return not others or any(
            ends & {other.start, other.start + other.width} for other in others
        )

    def _put(self, number: int, device: int) -> None:
        self._devices.put(number, device)
        self._homes[number] = device
