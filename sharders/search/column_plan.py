"""A plan as a matrix of columns by table and device, with batched pricing of changes.

The cost of a device depends only on how many columns of a table it holds. Pieces of a table that
share a device are therefore one piece, as in the final plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from autoshard.cost_model import EstimatedCosts
from autoshard.cost_model.pricing.placement_state import TaskPlacement, UnitCatalog
from autoshard.cost_model.pricing.prediction import Placed
from autoshard.workload import Piece, ShardingTask
from autoshard.workload.arrays import Bools, Floats, Ints
from autoshard.workload.packing.admission import RuleMasks
from autoshard.workload.packing.units import PlacementUnit
from autoshard.workload.plans.step_price import step_ms
from autoshard.workload.tables.table import DIM_STEP

_NOTHING = 0  # the number of an item


@dataclass(frozen=True)
class Changes:
    """Changes of a plan, each of two devices; widths are in steps of four columns: [changes].

    The width of `table` becomes `keeps` on the first device and `gets` on the second. In a swap,
    `other` leaves the second device and gets width `other_gets` on the first; else it is -1.
    """

    first: Ints
    second: Ints
    table: Ints
    keeps: Ints
    gets: Ints
    other: Ints
    other_gets: Ints

    def chosen(self, which: Bools | Ints) -> "Changes":
        """Returns the selected changes."""
        return Changes(*(getattr(self, field.name)[which] for field in fields(self)))

    def __len__(self) -> int:
        return len(self.first)


@dataclass(frozen=True)
class After:
    """State of the two devices of each change afterwards.

    Args:
        stages: Time in each stage in ms, [changes, 2, stages].
        rows: Items that leave and enter the first device, then the second: [4, changes].
    """

    stages: Floats
    rows: Ints


class ColumnPlan:
    """Mutable plan.

    Args:
        oracle: Predicts costs, in the mean scenario.
        task: Task of the plan.
        placed: Initial plan, which is valid.
    """

    def __init__(self, oracle: EstimatedCosts, task: ShardingTask, placed: Placed) -> None:
        self.task, self._oracle = task, oracle
        masks = RuleMasks(task)
        self.units = masks.units
        self.max_slices = masks.max_parts[:-1]
        self._min_width = -(-masks.min_width[:-1] // DIM_STEP)
        self._full = np.array([_steps(unit) for unit in self.units], np.int64)
        self._features = np.array([unit.pieces[0].table.features for unit in self.units])
        self._split_cost = oracle.split_cost(task.columns_in_order, len(task.devices))
        self.devices = len(task.devices)
        self.widths = np.zeros((len(self.units), self.devices), np.int64)
        numbers = {unit.name: number for number, unit in enumerate(self.units)}
        for piece, device in placed:
            number = numbers.get(piece.table.name)  # a group is known by its first table
            if number is not None:
                whole = len(self.units[number].pieces) > 1
                self.widths[number, device] += 1 if whole else piece.width // DIM_STEP
        # An item is a unit of some width, and gets a row when it is first used. The first item is
        # empty: it has no memory, cost and columns.
        self._first = np.concatenate([[0], np.cumsum(self._full + 1)[:-1]])
        self._row = np.full(int((self._full + 1).sum()), -1, np.int64)
        self._row[self._first] = _NOTHING
        self._row[self._first[0] + self._full[0]] = _NOTHING + 1
        items = [PlacementUnit(()), self.units[0]]
        self._catalog = UnitCatalog(oracle.expectation(), task, masks, items)
        self.state = TaskPlacement(self._catalog)
        self._begin()

    def _begin(self) -> None:
        tables, devices = self.widths.nonzero()
        rows = self.rows(tables, self.widths[tables, devices])
        for row, device in zip(rows.tolist(), devices.tolist(), strict=True):
            self.state.put(row, device)
        self.parts = (self.widths > 0).sum(1)
        self.stages = self.state.costs()[..., 0]

    def rows(self, tables: Ints, widths: Ints) -> Ints:
        """Returns the rows of items of these widths, which are added where they are new."""
        places = self._first[tables] + widths
        new = self._row[places] < 0
        if new.any():
            # When a table is first split, all widths are added, which is faster than one by one.
            split = new & (widths < self._full[tables])
            wide = np.unique(tables[split])
            steps = [self._first[table] + np.arange(self._full[table] + 1) for table in wide]
            unknown = np.unique(np.concatenate([places[new], *steps]))
            unknown = unknown[self._row[unknown] < 0]
            owners = np.searchsorted(self._first, unknown, side="right") - 1
            items = [
                self.item(int(table), int(width))
                for table, width in zip(owners, unknown - self._first[owners], strict=True)
            ]
            first = self._catalog.extend(items)
            self._row[unknown] = np.arange(first, first + len(items))
        return self._row[places]

    def item(self, table: int, width: int) -> PlacementUnit:
        """Returns the item of a width in steps of four columns, or a whole group of tables."""
        unit = self.units[table]
        if len(unit.pieces) > 1:
            return unit
        return PlacementUnit((Piece(unit.pieces[0].table, 0, width * DIM_STEP),))

    def placed(self, widths: Ints) -> list[tuple[Piece, int]]:
        """Returns the pieces and their devices of a plan with these widths."""
        found, start = [], np.zeros(len(self.units), np.int64)
        for table, device in zip(*widths.nonzero(), strict=True):
            unit, width = self.units[table], int(widths[table, device]) * DIM_STEP
            if len(unit.pieces) > 1:
                found += [(piece, int(device)) for piece in unit.pieces]
                continue
            whole = unit.pieces[0].table
            found.append((Piece(whole, int(start[table]), width), int(device)))
            start[table] += width
        return found

    def plan_ms(self) -> float:
        """Returns the step time by the task's objective."""
        splits = int(((self.parts - 1) * self._features).sum())
        return float(step_ms(self.stages)) + self._split_cost.ms(splits)

    def price(self, changes: Changes) -> After:
        """Prices the devices of these changes."""
        c = changes
        swapped = c.other >= 0
        # On either device one item replaces another; in a swap, it is of the other table.
        theirs = np.where(swapped, c.other, c.table)
        rows = np.stack(
            [
                self.rows(c.table, self.widths[c.table, c.first]),
                self.rows(theirs, np.where(swapped, c.other_gets, c.keeps)),
                self.rows(theirs, self.widths[theirs, c.second]),
                self.rows(c.table, c.gets),
            ]
        )
        leave, enter = rows[[0, 2]], rows[[1, 3]]
        devices = np.stack([c.first, c.second])
        return After(self.state.exchanged(leave, devices, enter)[..., 0].swapaxes(0, 1), rows)

    def admitted(self, changes: Changes, after: After) -> Bools:
        """Returns whether memory and constraints admit each change."""
        c, (out_first, into_first, out_second, into_second) = changes, after.rows
        found = self.state.admits_swaps(c.first, out_first, into_first)
        found &= self.state.admits_swaps(c.second, out_second, into_second)
        if not self.task.rules:
            return found
        swapped = c.other >= 0
        stays = (c.keeps > 0) & ~swapped
        pieces = self.parts[c.table] + stays - (self.widths[c.table, c.second] > 0) * ~swapped
        found &= (pieces <= self.max_slices[c.table]) | ~stays
        min_width = self._min_width[c.table]
        return np.asarray(found & (~stays | ((c.keeps >= min_width) & (c.gets >= min_width))))

    def apply(self, changes: Changes, after: After, number: int) -> None:
        """Applies one of the changes."""
        c = changes
        devices = (int(c.first[number]), int(c.second[number]))
        rows = after.rows[:, number].tolist()
        for device, leave, enter in zip(devices, rows[::2], rows[1::2], strict=True):
            self.state.take(leave, device)
            self.state.put(enter, device)
        table, other = int(c.table[number]), int(c.other[number])
        self.widths[table, devices] = c.keeps[number], c.gets[number]
        self.parts[table] = (self.widths[table] > 0).sum()
        if other >= 0:
            self.widths[other, devices] = c.other_gets[number], 0
            self.parts[other] = (self.widths[other] > 0).sum()
        self.stages[list(devices)] = after.stages[number]


def _steps(unit: PlacementUnit) -> int:
    """Returns the width in steps of four columns; 1 for a group of tables."""
    return unit.pieces[0].width // DIM_STEP if len(unit.pieces) == 1 else 1


def stacked(parts: Sequence[Changes]) -> Changes:
    """Concatenates changes."""
    return Changes(
        *(np.concatenate([getattr(p, field.name) for p in parts]) for field in fields(Changes))
    )
