"""Decides what a device may hold: memory, rules of the task, and parts of a table.

`RuleMasks` compiles the rules of a task once, as arrays over its placement units: a table, or whole
tables that a rule keeps together. `Occupancy` knows what the devices of one plan, or of several
plans side by side, hold and have free, and answers what they admit. Heuristics, greedies, searches,
annealing and the environment ask here; `ShardingPlan.check` is written apart, for it judges them.
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from autoshard.workload.tables import Piece, halves
from autoshard.workload.tasks import ShardingTask
from autoshard.workload.units import Placeable, PlacementUnit

Truths: TypeAlias = npt.NDArray[np.bool_]
Ints: TypeAlias = npt.NDArray[np.int64]

NOTHING = -1  # the number of no unit: it takes no memory, and breaks no rule
ANY_PARTS = 2**30  # parts of a table, where no rule says how many


class RuleMasks:
    """The rules of a task as arrays.

    The last row of each array, at `NOTHING`, is that of no unit.

    Args:
        task: Whose rules are compiled.

    Attributes:
        units: What is placed, whole, in the order of the task's tables.
        lawful: Whether each unit may lie on each device, as far as it alone goes:
            [units + 1, devices].
        groups: Which units are in which group of tables that must lie apart: [units + 1, groups].
        max_parts: Most parts that a table may be split into; 1 where it must stay whole.
        min_width: Fewest columns of each of several parts.
    """

    def __init__(self, task: ShardingTask) -> None:
        self.units = units_of(task)
        self.any = bool(task.rules)
        self._numbers = {
            piece.table.name: number
            for number, unit in enumerate(self.units)
            for piece in unit.pieces
        }
        count, devices = len(self.units), len(task.devices)
        apart = [rule for rule in task.rules if rule.kind == "apart"]
        self.lawful = np.ones((count + 1, devices), bool)
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
                elif rule.of_devices:
                    named = np.isin(np.arange(devices), rule.numbers)
                    self.lawful[number] &= named if rule.kind == "on" else ~named
        for column, rule in enumerate(apart):
            members = [self._numbers[table] for table in dict.fromkeys(rule.tables)]
            self.groups[members, column] = True
            for number in {n for n in members if members.count(n) > 1}:
                self.lawful[number] = False  # of one unit: together and apart at once

    def number(self, piece: Placeable) -> int:
        """Returns the number of the unit that a slice, or a unit, is of; `NOTHING` of none."""
        pieces = PlacementUnit.of(piece).pieces
        return self._numbers[pieces[0].table.name] if pieces else NOTHING

    def numbers(self, pieces: Sequence[Placeable]) -> Ints:
        """Returns the number of each piece's unit."""
        return np.array([self.number(piece) for piece in pieces], np.int64)

    def freedom(self, units: Ints) -> Ints:
        """Returns how many devices each of these pieces may lie on, less one for each other piece
        that it must lie apart from: [pieces]. Those with little freedom are placed first.
        """
        freedom = self.lawful.sum(1)
        if self.groups.shape[1]:
            groups = self.groups[:-1].astype(np.float32)
            apart = (groups @ groups.T > 0) & ~np.eye(len(groups), dtype=bool)
            freedom[:-1] -= apart @ np.bincount(units, minlength=len(groups))
        return np.asarray(freedom[units])

    def may_split(self, unit: PlacementUnit, parts: int = 1) -> bool:
        """Returns whether a slice may become two, where its table has so many parts already."""
        if not unit.can_be_split:
            return False
        number = self.number(unit)
        narrow = min(half.width for half in halves(unit.pieces[0]))
        return bool(parts < self.max_parts[number] and narrow >= self.min_width[number])

    def gathered(self, placed: Sequence[tuple[Piece, int]]) -> list[tuple[PlacementUnit, int]]:
        """Returns the slices of a plan as units, each with its device."""
        together = [unit for unit in self.units if len(unit.pieces) > 1]
        if not together:
            return [(PlacementUnit.of(piece), device) for piece, device in placed]
        homes = {piece.table.name: device for piece, device in placed}
        names = {piece.table.name for unit in together for piece in unit.pieces}
        alone = [(PlacementUnit.of(p), device) for p, device in placed if p.table.name not in names]
        return [(unit, homes[unit.name]) for unit in together] + alone


class Occupancy:
    """What the devices of a task hold and have free, in one plan or in several side by side.

    Args:
        masks: The task's rules; None where there are none.
        free: Bytes that each device has free, [plans, devices]; kept up to date in place.
    """

    def __init__(self, masks: RuleMasks | None, free: Ints) -> None:
        self.free = free
        self._rules = masks if masks is not None and masks.any else None
        groups = 0 if self._rules is None else self._rules.groups.shape[1]
        # Of each device and group: the unit that lies there, of which there is one at most, and how
        # many parts of it.
        self._resident = np.full((*free.shape, groups), NOTHING)
        self._parts = np.zeros((*free.shape, groups), np.int64)

    def admits(self, units: Ints, sizes: Ints) -> Truths:
        """Returns whether each device may take one more: [n, devices].

        Args:
            units: Numbers of units, one for each plan; or any number of them for the only plan.
            sizes: Bytes of each.
        """
        found: Truths = self.free >= sizes[:, None]
        if self._rules is None:
            return found
        found = found & self._rules.lawful[units]
        for group in range(self._resident.shape[2]):
            resident, asks = self._resident[..., group], self._rules.groups[units, group][:, None]
            found &= ~asks | (resident == NOTHING) | (resident == units[:, None])
        return found

    def admits_exchange(
        self, devices: Ints, leaving: Ints, gone: Ints, entering: Ints, come: Ints
    ) -> Truths:
        """Returns whether devices of the only plan may take something in place of something else.

        All arguments broadcast; `NOTHING` may leave or enter.

        Args:
            devices: Numbers of devices.
            leaving: The unit that leaves each.
            gone: Bytes that leave.
            entering: The unit that enters each.
            come: Bytes that enter.
        """
        found = come - gone <= self.free[0, devices]
        if self._rules is None:
            return np.asarray(found)
        found = found & self._rules.lawful[entering, devices]
        for group in range(self._resident.shape[2]):
            resident = self._resident[0, devices, group]
            emptied = (resident == leaving) & (self._parts[0, devices, group] == 1)
            free = (resident == NOTHING) | (resident == entering) | emptied
            found = found & (~self._rules.groups[entering, group] | free)
        return np.asarray(found)

    def enter(self, unit: int, size: int, device: int) -> None:
        """Puts a part of a unit, or all of it, on a device of the only plan."""
        self.free[0, device] -= size
        if self._rules is not None:
            self.settle(unit, device)

    def leave(self, unit: int, size: int, device: int) -> None:
        """Takes a part of a unit, or all of it, off its device."""
        self.free[0, device] += size
        for group in self._groups_of(unit):
            self._parts[0, device, group] -= 1
            if not self._parts[0, device, group]:
                self._resident[0, device, group] = NOTHING

    def settle(self, unit: int, device: int) -> None:
        """Notes a part of a unit on a device; for those who keep the free memory themselves."""
        for group in self._groups_of(unit):
            self._resident[0, device, group] = unit
            self._parts[0, device, group] += 1

    def enter_each(self, plans: Ints, units: Ints, sizes: Ints, devices: Ints) -> None:
        """Puts a unit on a device in each of these plans, which are different ones."""
        self.free[plans, devices] -= sizes
        if self._rules is None:
            return
        for group in range(self._resident.shape[2]):
            mine = self._rules.groups[units, group]
            self._resident[plans[mine], devices[mine], group] = units[mine]
            self._parts[plans[mine], devices[mine], group] += 1

    def _groups_of(self, unit: int) -> list[int]:
        """Returns the groups of units that must lie apart which this unit is in."""
        return [] if self._rules is None else self._rules.groups[unit].nonzero()[0].tolist()


def units_of(task: ShardingTask) -> list[PlacementUnit]:
    """Returns what is placed: all tables whole, those that a rule keeps together as one."""
    leader = {table.name: table.name for table in task.tables}

    def led_by(name: str) -> str:
        while leader[name] != name:
            name = leader[name]
        return name

    for rule in task.rules:
        if rule.kind == "together":
            for other in rule.tables[1:]:
                leader[led_by(other)] = led_by(rule.tables[0])
    joined: dict[str, list[Piece]] = {}
    for table in task.tables:
        joined.setdefault(led_by(table.name), []).append(table.whole())
    return [PlacementUnit(tuple(pieces)) for pieces in joined.values()]
