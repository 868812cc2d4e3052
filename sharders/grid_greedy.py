"""Greedy placements, many at once: of tables cut in many ways, each within several limits of the
columns that a device may have.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autoshard.cost_model import EstimatedCosts
from autoshard.cost_model.network import DIRECTIONS
from autoshard.cost_model.placement_state import PlacementState, UnitCatalog
from autoshard.cost_model.step_prediction import Placed
from autoshard.workload import ShardingTask
from autoshard.workload.admission import RuleMasks
from autoshard.workload.units import PlacementUnit

Floats = npt.NDArray[np.float64]
Whole = npt.NDArray[np.int64]

_NOWHERE = -1


@dataclass(frozen=True)
class GreedyPlan:
    """What a greedy placement came to.

    Args:
        bundles: what was to be placed.
        homes: the device of each; -1: none might take it.
        cost_ms: by the task's objective; infinite where not all is placed.
        lack: squared bytes of all that is not placed; 0 where all is.
    """

    units: Sequence[PlacementUnit]
    homes: Whole
    cost_ms: float
    lack: float

    @property
    def rank(self) -> tuple[float, float]:
        """Less is better. What does not fit comes closer with each half that it is cut into: hence
        squares.
        """
        return self.cost_ms, self.lack

    def placed(self) -> Placed:
        """Each slice and its device."""
        homes = zip(self.units, self.homes.tolist(), strict=True)
        return [(piece, home) for unit, home in homes for piece in unit.pieces]


class GridGreedy:
    """The greedy of `FusedGreedySharder`, by what devices compute alone, within limits of columns;
    the limit counts that is best by the objective.

    Columns are what all-to-alls exchange: where a device may have few more than others, these are
    balanced, and where it may have many, compute is.

    Args:
        oracle: prices devices.
        task: whose devices, rules and objective count.
        shares: limits, each a multiple of the mean columns of a device.
    """

    def __init__(self, oracle: EstimatedCosts, task: ShardingTask, shares: Sequence[float]) -> None:
        self._oracle, self._task = oracle, task
        self.masks = RuleMasks(task)
        columns = sum(table.whole().output_width for table in task.tables)
        self._limits = np.array(shares) * columns / len(task.devices)

    def best(self, cuts: Sequence[Sequence[PlacementUnit]]) -> list[GreedyPlan]:
        """The best placement of each cut: lists of equally many bundles, each all of the task.

        A bundle that stands in several of them is looked at once.
        """
        different = dict.fromkeys(unit for cut in cuts for unit in cut)
        numbers = {unit: number for number, unit in enumerate(different)}
        pricing = self._oracle.expectation()
        catalog = UnitCatalog(pricing, self._task, self.masks, list(different))
        members = np.array([[numbers[unit] for unit in cut] for cut in cuts])
        freedom = np.stack([self.masks.freedom(origins) for origins in catalog.origins[members]])
        alone = self._oracle.alone_ms(catalog.units)[members]
        turns = np.lexsort((-alone, freedom))  # of each cut, as `place_in_turn`
        ordered = np.take_along_axis(members, turns, 1).repeat(len(self._limits), 0)
        plans = _Plans(catalog, np.tile(self._limits, len(cuts)))
        homes = np.stack([plans.place(units) for units in ordered.T], axis=1)
        shape = len(cuts), len(self._limits)
        costs, lacks = plans.costs_ms().reshape(shape), plans.lack.reshape(shape)
        chosen = np.lexsort((lacks, costs))[:, 0]
        found = []
        for number, (cut, limit) in enumerate(zip(cuts, chosen, strict=True)):
            home = np.empty(len(cut), np.int64)
            home[turns[number]] = homes[number * shape[1] + limit]
            cost, lack = float(costs[number, limit]), float(lacks[number, limit])
            found.append(GreedyPlan(cut, home, cost, lack))
        return found


class _Plans:
    """Plans under way, one for each limit of columns; all place a unit at a time.

    What no device may take is left out, and the others go on: so it is known how much is left.

    Args:
        catalog: The units.
        limits: Most columns of a device of each plan.
    """

    def __init__(self, catalog: UnitCatalog, limits: Floats) -> None:
        self._catalog, self._limits = catalog, limits[:, None]
        self._devices = PlacementState(catalog, len(limits))
        # Sums of these name what a device holds, whatever the order it came in.
        rng = np.random.default_rng(0)
        self._marks = rng.integers(2**63, size=len(catalog.units), dtype=np.uint64)
        self._held = np.zeros(self._devices.free.shape, np.uint64)
        self._ms = np.zeros((*self._devices.free.shape, DIRECTIONS))
        self.lack = np.zeros(len(limits))

    def place(self, units: Whole) -> Whole:
        """Puts a unit of each plan where the device computes least with it: [plans]."""
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

    def _with(self, units: Whole, where: Whole) -> Floats:
        """Forward and backward ms of devices, numbered over all plans, with a unit more.

        Devices that would hold the same are priced once: limits that do not bind change nothing.
        """
        marks = self._held.reshape(-1)[where] + self._marks[units]
        _, first, which = np.unique(marks, return_index=True, return_inverse=True)
        return self._devices.joined_at(where[first], units[first])[which]

    def costs_ms(self) -> Floats:
        """What each plan costs, by the task's objective; infinite where something is left."""
        price, ms = self._devices.price, self._ms
        stages = price.stages_ms(ms[..., 0], ms[..., 1], self._devices.columns)
        return np.where(self.lack == 0, sum(stage.max(-1) for stage in stages), np.inf)
