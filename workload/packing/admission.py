"""Decides which devices may take a placement unit: by memory, and by the rules of the task.

`RuleMasks` compiles the rules of a task once, as arrays over its placement units. `Occupancy` keeps
what the devices of one or several plans hold and have free. All sharders and the environment use
them. `ShardingPlan.check` is implemented independently, because it validates their results.
"""

from collections.abc import Sequence

import numpy as np

from autoshard.workload.arrays import Bools, Ints
from autoshard.workload.packing.units import Placeable, PlacementUnit
from autoshard.workload.tables.table import Piece, halves
from autoshard.workload.tasks.task import ShardingTask

NOTHING = -1  # stands for no unit: it takes no memory, and breaks no rule
ANY_PARTS = 2**30  # parts of a table, where no rule says how many


class RuleMasks:
    """The rules of a task as arrays.

    The last row of each array, at `NOTHING`, stands for no unit.

    Args:
        task: Task whose rules are compiled.

    Attributes:
        units: Placement units of whole tables, in the order of the task's tables.
        allowed: Whether the rules allow each unit on each device: [units + 1, devices].
        groups: Membership of units in groups that must not share a device: [units + 1, groups].
        max_parts: Maximum number of parts of a table; 1 where it must stay whole.
        min_width: Minimum number of columns of a part, where there are several.
    """

    def __init__(self, task: ShardingTask) -> None:
        self.units = units_of(task)
        self.any = any(rule.restricts_pieces for rule in task.rules)
        self._numbers = {
            piece.table.name: number
            for number, unit in enumerate(self.units)
            for piece in unit.pieces
        }
        count, devices = len(self.units), len(task.devices)
        apart = [rule for rule in task.rules if rule.kind == "apart"]
        self.allowed = np.ones((count + 1, devices), bool)
        self.groups = np.zeros((count + 1, len(apart)), bool)
        self.max_parts = np.full(count + 1, ANY_PARTS)
        self.min_width = np.zeros(count + 1, np.int64)
        for rule in task.rules:
            for table in rule.tables:
                number = self._numbers[table]
                if rule.kind in ("together", "whole"):
                    self.max_parts[number] = 1
                elif rule.kind == "max_slices":
                    self.max_parts[number] = min(rule.numbers[0], self.max_parts[number])
                elif rule.kind == "min_width":
                    self.min_width[number] = max(rule.numbers[0], self.min_width[number])
                elif rule.kind in ("copied", "row_wise"):  # no device alone may take it
                    self.allowed[number] = False
                elif rule.of_devices:
                    named = np.isin(np.arange(devices), rule.numbers)
                    self.allowed[number] &= named if rule.kind == "on" else ~named
        for column, rule in enumerate(apart):
            members = [self._numbers[table] for table in dict.fromkeys(rule.tables)]
            self.groups[members, column] = True
            for number in {n for n in members if members.count(n) > 1}:
                self.allowed[number] = False  # rules keep it together and apart at once

    def number(self, piece: Placeable) -> int:
        """Returns the number of the whole unit that this is a part of, or `NOTHING`."""
        pieces = PlacementUnit.of(piece).pieces
        return self._numbers[pieces[0].table.name] if pieces else NOTHING

    def numbers(self, pieces: Sequence[Placeable]) -> Ints:
        """Returns `number` of each."""
        return np.array([self.number(piece) for piece in pieces], np.int64)

    def freedom(self, units: Ints) -> Ints:
        """Returns the number of devices that each unit may be on, minus the number of units that it
        must not share a device with: [units]. Units with little freedom are placed first.
        """
        freedom = self.allowed.sum(1)
        if self.groups.shape[1]:
            groups = self.groups[:-1].astype(np.float32)
            apart = (groups @ groups.T > 0) & ~np.eye(len(groups), dtype=bool)
            freedom[:-1] -= apart @ np.bincount(units, minlength=len(groups))
        return np.asarray(freedom[units])

    def may_split(self, unit: PlacementUnit, parts: int = 1) -> bool:
        """Returns whether a unit may be split, where its table has `parts` parts already."""
        if not unit.can_be_split:
            return False
        number = self.number(unit)
        narrow = min(half.width for half in halves(unit.pieces[0]))
        return bool(parts < self.max_parts[number] and narrow >= self.min_width[number])

    def gathered(self, placed: Sequence[tuple[Piece, int]]) -> list[tuple[PlacementUnit, int]]:
        """Returns the pieces of a plan as placement units with their devices."""
        together = [unit for unit in self.units if len(unit.pieces) > 1]
        if not together:
            return [(PlacementUnit.of(piece), device) for piece, device in placed]
        homes = {piece.table.name: device for piece, device in placed}
        names = {piece.table.name for unit in together for piece in unit.pieces}
        alone = [(PlacementUnit.of(p), device) for p, device in placed if p.table.name not in names]
        return [(unit, homes[unit.name]) for unit in together] + alone


class Occupancy:
    """What the devices of a task hold and have free, in one plan or in several independent ones.

    Args:
        masks: Rules of the task, or None.
        free: Free bytes of each device, [plans, devices]; updated in place.
    """

    def __init__(self, masks: RuleMasks | None, free: Ints) -> None:
        self.free = free
        self._rules = masks if masks is not None and masks.any else None
        groups = 0 if self._rules is None else self._rules.groups.shape[1]
        # For each device and group: the one unit that it may hold, and the number of its parts.
        self._resident = np.full((*free.shape, groups), NOTHING)
        self._parts = np.zeros((*free.shape, groups), np.int64)

    def admits(self, units: Ints, sizes: Ints) -> Bools:
        """Returns whether each device may take a unit: [n, devices].

        Args:
            units: One unit for each plan; or any number of units if there is one plan.
            sizes: Bytes of each unit.
        """
        found: Bools = self.free >= sizes[:, None]
        if self._rules is None:
            return found
        found = found & self._rules.allowed[units]
        for group in range(self._resident.shape[2]):
            resident, member = self._resident[..., group], self._rules.groups[units, group][:, None]
            found &= ~member | (resident == NOTHING) | (resident == units[:, None])
        return found

    def admits_exchange(
        self, devices: Ints, leaving: Ints, gone: Ints, entering: Ints, come: Ints
    ) -> Bools:
        """Returns whether devices of the only plan may take one unit in exchange for another.

        All arguments broadcast; `NOTHING` may leave or enter.

        Args:
            devices: Numbers of devices.
            leaving: Unit that leaves each device.
            gone: Bytes that leave.
            entering: Unit that enters each device.
            come: Bytes that enter.
        """
        found = come - gone <= self.free[0, devices]
        if self._rules is None:
            return np.asarray(found)
        found = found & self._rules.allowed[entering, devices]
        for group in range(self._resident.shape[2]):
            resident = self._resident[0, devices, group]
            emptied = (resident == leaving) & (self._parts[0, devices, group] == 1)
            free = (resident == NOTHING) | (resident == entering) | emptied
            found = found & (~self._rules.groups[entering, group] | free)
        return np.asarray(found)

    def enter(self, unit: int, size: int, device: int) -> None:
        """Adds a unit, or a part of it, to a device of the only plan."""
        self.free[0, device] -= size
        if self._rules is not None:
            self.record(unit, device)

    def leave(self, unit: int, size: int, device: int) -> None:
        """Removes a unit, or a part of it, from its device."""
        self.free[0, device] += size
        for group in self._groups_of(unit):
            self._parts[0, device, group] -= 1
            if not self._parts[0, device, group]:
                self._resident[0, device, group] = NOTHING

    def record(self, unit: int, device: int) -> None:
        """Adds a unit, or a part of it, without changing the free memory."""
        for group in self._groups_of(unit):
            self._resident[0, device, group] = unit
            self._parts[0, device, group] += 1

    def enter_each(self, plans: Ints, units: Ints, sizes: Ints, devices: Ints) -> None:
        """Adds a unit to a device in each of these plans, which must differ."""
        self.free[plans, devices] -= sizes
        self.record_each(plans, units, devices)

    def record_each(self, plans: Ints, units: Ints, devices: Ints) -> None:
        """Adds units as `enter_each` does, without changing the free memory."""
        if self._rules is None:
            return
        for group in range(self._resident.shape[2]):
            members = self._rules.groups[units, group]
            self._resident[plans[members], devices[members], group] = units[members]
            self._parts[plans[members], devices[members], group] += 1

    def _groups_of(self, unit: int) -> list[int]:
        return [] if self._rules is None else self._rules.groups[unit].nonzero()[0].tolist()


def units_of(task: ShardingTask) -> list[PlacementUnit]:
    """Returns placement units of whole tables; those that a rule keeps together form one."""
    leader = {table.name: table.name for table in task.tables}

    def root_of(name: str) -> str:
        while leader[name] != name:
            name = leader[name]
        return name

    for rule in task.rules:
        if rule.kind == "together":
            for other in rule.tables[1:]:
                leader[root_of(other)] = root_of(rule.tables[0])
    joined: dict[str, list[Piece]] = {}
    for table in task.tables:
        joined.setdefault(root_of(table.name), []).append(table.whole())
    return [PlacementUnit(tuple(pieces)) for pieces in joined.values()]
