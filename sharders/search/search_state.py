"""A plan that a search changes: where pieces are, how tables are sharded, and what a step takes.

The search minimises the step time by the task's objective: the sum over stages of a norm over
devices, and what all devices bear alike. Costs of devices are [devices, stages, scenarios].
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from autoshard.cost_model.pricing.placement_state import TaskPlacement, UnitCatalog
from autoshard.cost_model.step.common_price import num_sharded
from autoshard.cost_model.uncertainty.scenarios import Pricing
from autoshard.sharders.search.move_budget import GONE, MoveBudget
from autoshard.workload import EmbeddingTable, Piece, ShardingPlan, ShardingTask
from autoshard.workload.arrays import Bools, Floats, Ints
from autoshard.workload.packing.admission import NOTHING, RuleMasks
from autoshard.workload.packing.units import PlacementUnit
from autoshard.workload.plans.sharded import Sharded
from autoshard.workload.ways.option import COLUMN_WISE, ShardingOption, pinned_parts

_MIN_MS = 1e-12


class Change(NamedTuple):
    """One step: items that leave their devices, and items with the devices that they enter.

    Args:
        leave: Numbers of items.
        enter: Numbers of items, each with a device.
        option: Number of a table's unit and its new option, if that changes.
    """

    leave: tuple[int, ...]
    enter: tuple[tuple[int, int], ...]
    option: tuple[int, ShardingOption] | None = None


class SearchState:
    """A plan with its costs. Items are pieces with one device each, of which only the width
    matters. Blocks of rows are items, too: they come and go with the option of their table.

    Args:
        pricing: Predicts costs of devices, in one scenario or several.
        task: Task of the plan.
        power: Power of the norms over devices.
        start: Initial plan.
        near: A plan in use and the bytes that may move away from it, if any.
        masks: Rules of the task, if they are known already.
    """

    def __init__(
        self,
        pricing: Pricing,
        task: ShardingTask,
        power: float,
        start: Sharded,
        near: tuple[ShardingPlan, int] | None = None,
        masks: RuleMasks | None = None,
    ) -> None:
        self._task, self._power = task, power
        self._masks = RuleMasks(task) if masks is None else masks
        self._names = [unit.name for unit in self._masks.units]
        self._slices = np.array([_slices(unit) for unit in self._masks.units])
        gathered = self._masks.gathered(start.placed)
        self._units = [unit for unit, _ in gathered]
        self._homes = np.array([device for _, device in gathered], np.int64)
        self._catalog = UnitCatalog(pricing, task, self._masks, self._units)
        self._owners = self._catalog.origins.copy()  # [items]: units of their tables
        self._devices = TaskPlacement(self._catalog)
        self._devices.fill(self._homes)
        self._budget = None if near is None else MoveBudget(*near, task)
        if self._budget is not None:
            self._budget.extend(self._units)
        self._weight = self._devices.beside()  # [items, stages]
        self._known: dict[tuple[object, ...], int] = {}  # first items of what was added once
        self._common = pricing.common(task)
        self._options = [COLUMN_WISE] * len(self._names)
        self._in_columns = np.ones(len(self._names), bool)
        self._loads = self._common.loads_of({})
        self._whole_ms = float(self._common.ms(self._loads, 0))
        numbers = {name: number for number, name in enumerate(self._names)}
        self._know_pinned([(numbers[name], option) for name, option in start.options.items()])
        for name, option in start.options.items():
            number = numbers[name]
            self._make(Change((), self._pinned(number, option), (number, option)))
        self._price_anew()

    def objective(self) -> float:
        """Returns the mean over scenarios of the softened step time in ms, less what all devices
        bear if all tables are whole.
        """
        return float(self._after(0.0))

    @property
    def step_ms(self) -> float:
        """The mean over scenarios of the step time."""
        return float(self._costs.max(0).sum(0).mean()) + self._common_ms + self._whole_ms

    @property
    def even_ms(self) -> float:
        """The step time if all devices took as long as they do on average."""
        return float(self._means.mean(0).sum()) + self._common_ms + self._whole_ms

    def sharpen(self, power: float) -> None:
        """Sets the power of the norms over devices."""
        self._power = power
        self._price_anew()

    def placed(self, change: Change | None = None) -> list[tuple[Piece, int]]:
        """Returns the pieces of tables in columns and their devices, as they are or after a step
        that changes no option.
        """
        homes = self._homes.copy()
        if change is not None:
            homes[list(change.leave)] = GONE
            for item, device in change.enter:
                homes[item] = device
        free = np.flatnonzero((homes != GONE) & self._may_move)
        return [(piece, int(homes[n])) for n in free for piece in self._units[n].pieces]

    def sharded(self) -> Sharded:
        """Returns the plan."""
        options = zip(self._names, self._options, strict=True)
        return Sharded(self.placed(), {n: option for n, option in options if option != COLUMN_WISE})

    @property
    def slowest(self) -> list[int]:
        """Slowest device of each stage in the mean over scenarios, the longest stage first."""
        leaders = self._means.argmax(0)[self._longest]
        return list(dict.fromkeys(leaders.tolist()))

    @property
    def first_split_ms(self) -> float:
        """What a first split would add beside its own cost; 0 if there is one already."""
        none, one, two = self._bearing_ms(self._splits + np.arange(3)).tolist()
        return float((one - none) - (two - one))

    @property
    def _may_move(self) -> Bools:
        """Whether each item may move: [items]. Blocks of rows have their devices."""
        return np.asarray(self._catalog.origins != NOTHING)

    @property
    def _movable(self) -> Ints:
        """Items that have a device and may move."""
        return np.flatnonzero((self._homes != GONE) & self._may_move)

    def _on(self, devices: Sequence[int]) -> Ints:
        """Returns the items on these devices that may move."""
        return np.flatnonzero(np.isin(self._homes, devices) & self._may_move)

    def state(self) -> tuple[Ints, list[ShardingOption]]:
        """Returns where items are and the options of units, for `restore`."""
        return self._homes.copy(), list(self._options)

    def restore(self, state: tuple[Ints, list[ShardingOption]]) -> None:
        """Returns to an earlier state."""
        before, options = state
        homes = np.full(len(self._homes), GONE)
        homes[: len(before)] = before
        for number, option in enumerate(options):
            if option != self._options[number]:
                self._make(Change((), (), (number, option)))
        items = np.flatnonzero(homes != self._homes)
        leave = tuple(items[self._homes[items] != GONE].tolist())
        enter = tuple((n, int(homes[n])) for n in items.tolist() if homes[n] != GONE)
        self._make(Change(leave, enter))
        self._price_anew()

    def _apply(self, change: Change) -> None:
        self._make(change)
        self._price_anew()

    def _make(self, change: Change) -> None:
        for item in change.leave:
            self._devices.take(item, int(self._homes[item]))
            self._homes[item] = GONE
        if change.option is not None:
            number, option = change.option
            self._loads = self._loads + self._loads_of(number, option)
            self._devices.free -= self._common_bytes(number, option)
            self._options[number], self._in_columns[number] = option, option.by_columns
        for item, device in change.enter:
            self._devices.put(item, device)
            self._homes[item] = device

    def _loads_of(self, number: int, option: ShardingOption) -> Floats:
        """Returns the loads on all devices that an option brings more than the present one."""
        name = self._names[number]
        return self._common.loads(name, option) - self._common.loads(name, self._options[number])

    def _common_bytes(self, number: int, option: ShardingOption) -> int:
        """Returns the bytes on all devices that an option takes more than the present one."""
        table = self.table_of(number)
        before = self._options[number].common_memory(table, self._task).total
        return option.common_memory(table, self._task).total - before

    def _pinned(self, number: int, option: ShardingOption) -> tuple[tuple[int, int], ...]:
        """Returns the parts that have their devices by an option as items, with these."""
        if not option.homes:
            return ()
        self._know_pinned([(number, option)])
        first = self._known[number, option.at(0)]
        return tuple((first + n, home) for n, home in enumerate(option.homes))

    def _know_pinned(self, options: Iterable[tuple[int, ShardingOption]]) -> None:
        """Adds the parts that have their devices by options of units as items, all at once. They
        are the same on other devices.
        """
        units, owners, first = list[PlacementUnit](), list[int](), len(self._homes)
        for number, option in options:
            key = number, option.at(0)
            if not option.homes or key in self._known:
                continue
            self._known[key] = first + len(units)
            pinned = pinned_parts(self._task, self.table_of(number), option)
            units += [PlacementUnit.of(part) for part, _ in pinned]
            owners += [number] * len(pinned)
        if units:
            self._add(units, np.array(owners), pinned=True)

    def table_of(self, number: int) -> EmbeddingTable:
        """Returns the table of a unit that is a single one."""
        return self._masks.units[number].pieces[0].table

    @cached_property
    def _whole_units(self) -> Ints:
        """Items that are whole units: [units]."""
        return self._wholes([(number, COLUMN_WISE) for number in range(len(self._names))])

    def _wholes(self, keys: Sequence[tuple[int, ShardingOption]]) -> Ints:
        """Returns the items that are what devices hold of units, by their number and an option in
        columns.
        """
        new = [key for key in dict.fromkeys(keys) if key not in self._known]
        if new:
            first = self._add([self._held(*key) for key in new], np.array([n for n, _ in new]))
            self._known.update({key: first + place for place, key in enumerate(new)})
        return np.array([self._known[key] for key in keys], np.int64)

    def _held(self, number: int, option: ShardingOption) -> PlacementUnit:
        """Returns what devices hold of a whole unit by an option in columns."""
        if option == COLUMN_WISE:
            return self._masks.units[number]
        return PlacementUnit.of(option.held(self.table_of(number), self._task.batch_size).whole())

    def _halves(self, items: Sequence[int]) -> tuple[Ints, Ints]:
        """Returns the halves of items as items."""
        new = [item for item in items if (item, "halves") not in self._known]
        pairs = [self._units[item].halves() for item in new]
        if new:
            owners = np.repeat(self._owners[new], 2)
            first = self._add([half for pair in pairs for half in pair], owners)
            for place, item in enumerate(new):
                self._known[item, "halves"] = first + 2 * place
        firsts = np.array([self._known[item, "halves"] for item in items], np.int64)
        return firsts, firsts + 1

    def _add(self, units: list[PlacementUnit], owners: int | Ints, pinned: bool = False) -> int:
        """Adds items that are on no device yet; returns the number of the first."""
        first = self._catalog.extend(units, pinned)
        self._units += units
        self._owners = np.concatenate([self._owners, np.broadcast_to(owners, len(units))])
        self._homes = np.concatenate([self._homes, np.full(len(units), GONE)])
        if self._budget is not None:
            self._budget.extend(units)
        self._weight = np.concatenate([self._weight, self._devices.beside(first)])
        return first

    def _admitted(self, items: Ints) -> Bools:
        """Returns whether each device admits each item, [items, devices]."""
        found = self._devices.admits_units(items)
        return found if self._budget is None else found & self._budget.admits(items, self._homes)

    def _price_anew(self) -> None:
        """Updates costs, and their powers relative to the slowest device in each scenario."""
        self._costs = self._devices.costs()
        self._means = self._costs.mean(2)  # [devices, stages]
        self._longest = np.argsort(-self._means.max(0), kind="stable")
        self._largest = np.maximum(self._costs.max(0), _MIN_MS)
        self._powers = (self._costs / self._largest) ** self._power
        self._more_slices = np.zeros(len(self._names), np.int64)  # than features, [units]
        if self._common.counts_splits:
            devices, here = len(self._costs), self._movable
            # Pieces of a table that meet on a device are one.
            held = np.unique(self._owners[here] * devices + self._homes[here]) // devices
            parts = np.bincount(held, minlength=len(self._names))
            self._more_slices = (parts - self._in_columns) * self._slices
        self._splits = int(self._more_slices.sum())
        self._common_ms = float(self._bearing_ms(self._splits))

    def _bearing_ms(self, splits: Ints | int, loads: Floats | None = None) -> Floats:
        """Returns what all devices bear, less what they do if all tables are whole: [...]."""
        loads = self._loads if loads is None else loads
        # Prices of devices contain the start of all-to-alls, which copies alone do not need.
        price = self._devices.price
        idle_ms = price.exchanges * price.latency_ms * (num_sharded(loads) == 0)
        return np.asarray(self._common.ms(loads, splits) - self._whole_ms - idle_ms)

    def _after(
        self, removed: Floats | float, *added: Floats, common_ms: Floats | None = None
    ) -> Floats:
        """Returns the objective if powers of devices are replaced by other costs, [...].

        Args:
            removed: Sum of powers that are removed, [..., stages, scenarios].
            added: Costs that are added, each [..., stages, scenarios].
            common_ms: What all devices bear then, [...]; by default as now.
        """
        sums = self._powers.sum(0) - removed
        for costs in added:
            sums = sums + (costs / self._largest) ** self._power
        return self._norms(sums) + (self._common_ms if common_ms is None else common_ms)

    def _norms(self, sums: Floats) -> Floats:
        """Returns the mean over scenarios of norms of devices, summed over stages: [...].

        Args:
            sums: Sums of powers, [..., stages, scenarios].
        """
        norms = self._largest * np.maximum(sums, _MIN_MS) ** (1 / self._power)
        return np.asarray(norms.mean(-1).sum(-1))

    def price(self, changes: Sequence[Change]) -> Floats:
        """Returns the objective after each change, whatever changes: [changes].

        It is infinite where a device has no memory. Whether rules admit it is not looked at.
        """
        devices, catalog = len(self._costs), self._catalog
        flows = [
            (number, device, item, sign)
            for number, change in enumerate(changes)
            for item, device, sign in self._flows(change)
        ]
        table = np.array(flows, np.int64).reshape(-1, 4)
        places, where = np.unique(table[:, 0] * devices + table[:, 1], return_inverse=True)
        numbers, homes = np.divmod(places, devices)
        items, signs = table[:, 2], table[:, 3]
        amounts = torch.zeros(len(places), *catalog.amounts.shape[1:], dtype=torch.float64)
        moved = catalog.amounts[items].double() * torch.from_numpy(signs)[:, None, None]
        amounts.index_add_(0, torch.from_numpy(where), moved)
        columns, sizes = np.zeros(len(places)), np.zeros(len(places), np.int64)
        np.add.at(columns, where, signs * catalog.columns[items])
        np.add.at(sizes, where, signs * catalog.bytes[items])
        costs = (self._devices.changed(homes, amounts, columns) / self._largest) ** self._power
        sums = np.broadcast_to(self._powers.sum(0), (len(changes), *self._largest.shape)).copy()
        np.add.at(sums, numbers, costs - self._powers[homes])
        loads, splits = np.tile(self._loads, (len(changes), 1)), np.full(len(changes), self._splits)
        common = np.zeros(len(changes), np.int64)
        for place, change in enumerate(changes):
            if change.option is not None:
                loads[place] += self._loads_of(*change.option)
                common[place] = self._common_bytes(*change.option)
                number, option = change.option
                splits[place] -= self._more_slices[number]
                if option.by_columns and self._common.counts_splits:
                    splits[place] += (len(change.enter) - 1) * self._slices[number]
        found = self._norms(sums) + self._bearing_ms(splits, loads)
        needed = np.repeat(common[:, None], devices, axis=1)
        needed[numbers, homes] += sizes
        lacks = (needed > np.maximum(self._devices.free[0], 0)) & (needed > 0)
        found[lacks.any(1)] = np.inf
        return found

    def _flows(self, change: Change) -> Iterable[tuple[int, int, int]]:
        """Yields items, devices, and 1 or -1 for what comes or goes."""
        for item in change.leave:
            yield item, int(self._homes[item]), -1
        for item, device in change.enter:
            yield item, device, 1


def _slices(unit: PlacementUnit) -> int:
    """Returns into how many slices of outputs the samples of a unit are put."""
    return sum(piece.table.features for piece in unit.pieces)
