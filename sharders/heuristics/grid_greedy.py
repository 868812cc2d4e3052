"""Batched greedy placement of several cuts of the tables, within several limits of columns."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.cost_model import EstimatedCosts
from autoshard.cost_model.networks.network import DIRECTIONS
from autoshard.cost_model.pricing.placement_state import TaskPlacement, UnitCatalog
from autoshard.cost_model.pricing.prediction import Placed
from autoshard.workload import ShardingTask
from autoshard.workload.arrays import Floats, Ints
from autoshard.workload.packing.admission import RuleMasks
from autoshard.workload.packing.units import PlacementUnit

_NOWHERE = -1


@dataclass(frozen=True)
class GreedyPlan:
    """Result of a greedy placement.

    Args:
        units: Units to place.
        homes: Device of each unit; -1 if no device admits it.
        cost_ms: Step time by the task's objective; infinite if a unit is not placed.
        lack: Sum of squared bytes of units that are not placed.
    """

    units: Sequence[PlacementUnit]
    homes: Ints
    cost_ms: float
    lack: float

    @property
    def rank(self) -> tuple[float, float]:
        """Sort key, lower is better. Squared bytes fall with each split of what does not fit."""
        return self.cost_ms, self.lack

    def placed(self) -> Placed:
        """Returns the pieces and their devices."""
        homes = zip(self.units, self.homes.tolist(), strict=True)
        return [(piece, home) for unit, home in homes for piece in unit.pieces]


class GridGreedy:
    """The greedy of `FusedGreedySharder` by compute time, within limits of columns.

    All-to-alls exchange columns: low limits balance all-to-alls, high limits balance compute. The
    limit whose plan has the lowest step time is chosen.

    Args:
        oracle: Predicts costs.
        task: Task to plan.
        shares: Limits, as multiples of the mean number of columns of a device.
    """

    def __init__(self, oracle: EstimatedCosts, task: ShardingTask, shares: Sequence[float]) -> None:
        self._oracle, self._task = oracle, task
        self.masks = RuleMasks(task)
        columns = max(task.exchanged_columns, 1)  # a share may be infinite
        self._limits = np.array(shares) * columns / len(task.devices)

    def best(self, cuts: Sequence[Sequence[PlacementUnit]]) -> list[GreedyPlan]:
        """Returns the best placement of each cut.

        Args:
            cuts: Units of the whole task, in lists of equal length. Equal units are priced once.
        """
        distinct = dict.fromkeys(unit for cut in cuts for unit in cut)
        numbers = {unit: number for number, unit in enumerate(distinct)}
        pricing = self._oracle.expectation()
        catalog = UnitCatalog(pricing, self._task, self.masks, list(distinct))
        members = np.array([[numbers[unit] for unit in cut] for cut in cuts])
        freedom = np.stack([self.masks.freedom(origins) for origins in catalog.origins[members]])
        alone = self._oracle.alone_ms(list(distinct))[members]
        order = np.lexsort((-alone, freedom))  # [cuts, units], by the same rule as `place_in_turn`
        ordered = np.take_along_axis(members, order, 1).repeat(len(self._limits), 0)
        plans = _Plans(catalog, np.tile(self._limits, len(cuts)))
        homes = np.stack([plans.place(units) for units in ordered.T], axis=1)
        shape = len(cuts), len(self._limits)
        costs, lacks = plans.costs_ms().reshape(shape), plans.lack.reshape(shape)
        chosen = np.lexsort((lacks, costs))[:, 0]
        found = []
        for number, (cut, limit) in enumerate(zip(cuts, chosen, strict=True)):
            home = np.empty(len(cut), np.int64)
            home[order[number]] = homes[number * shape[1] + limit]
            cost, lack = float(costs[number, limit]), float(lacks[number, limit])
            found.append(GreedyPlan(cut, home, cost, lack))
        return found


class _Plans:
    """Partial plans, one for each limit of columns, which place one unit at a time.

    A unit that no device admits is skipped, so that the total lack is known.

    Args:
        catalog: Units to place.
        limits: Maximum number of columns of a device in each plan.
    """

    def __init__(self, catalog: UnitCatalog, limits: Floats) -> None:
        self._catalog, self._limits = catalog, limits[:, None]
        self._devices = TaskPlacement(catalog, len(limits))
        # Sums of these random marks identify what a device holds, in any order.
        rng = np.random.default_rng(0)
        self._marks = rng.integers(2**63, size=len(catalog.bytes), dtype=np.uint64)
        kinds = {name: rng.integers(2**63, dtype=np.uint64) for name in catalog.task.hardware}
        empty = np.array([kinds[name] for name in catalog.task.hardware] or 0, np.uint64)
        self._held = np.zeros(self._devices.free.shape, np.uint64) + empty
        self._ms = np.zeros((*self._devices.free.shape, DIRECTIONS))
        self.lack = np.zeros(len(limits))

    def place(self, units: Ints) -> Ints:
        """Places a unit of each plan on the device with the lowest compute time: [plans]."""
        state, catalog = self._devices, self._catalog
        open_to = state.admits_units(units)
        open_to &= state.columns + catalog.columns[units][:, None] <= self._limits
        fits, where = open_to.any(1), np.flatnonzero(open_to)
        self.lack += np.where(fits, 0.0, catalog.bytes[units].astype(float) ** 2)
        homes = np.full(len(units), _NOWHERE)
        if not len(where):
            return homes
        with_it = np.full((*open_to.shape, DIRECTIONS), np.inf)
        with_it.reshape(-1, DIRECTIONS)[where] = self._with(units[where // open_to.shape[1]], where)
        plans = np.flatnonzero(fits)
        chosen = with_it[plans].sum(2).argmin(1)
        homes[plans] = chosen
        self._ms[plans, chosen] = with_it[plans, chosen]
        self._held[plans, chosen] += self._marks[units[plans]]
        state.put_each(plans, units[plans], chosen)
        return homes

    def _with(self, units: Ints, where: Ints) -> Floats:
        """Returns forward and backward time in ms of devices with another unit.

        Devices are numbered over all plans. Devices with equal content are priced once.
        """
        marks = self._held.reshape(-1)[where] + self._marks[units]
        _, first, which = np.unique(marks, return_index=True, return_inverse=True)
        return self._devices.joined_at(where[first], units[first])[which]

    def costs_ms(self) -> Floats:
        """Returns the step time of each plan; infinite if a unit is not placed."""
        price, ms = self._devices.price, self._ms
        step_ms = price.step_ms(ms[..., 0], ms[..., 1], self._devices.columns)
        return np.where(self.lack == 0, step_ms, np.inf)
