"""Greedy placements, many at once: of tables cut in many ways, each within several limits of the
columns that a device may have.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from autoshard.cost_model import EstimatedCosts
from autoshard.cost_model.outlook import Placed
from autoshard.workload import ShardingTask
from autoshard.workload.step_price import StepPrice
from autoshard.workload.terms import Bundle, Terms, bytes_of_bundles

Floats = npt.NDArray[np.float64]
Whole = npt.NDArray[np.int64]

_NOWHERE, _NOBODY = -1, -1


@dataclass(frozen=True)
class GreedyPlan:
    """What a greedy placement came to.

    Args:
        bundles: what was to be placed.
        homes: the device of each; -1: none might take it.
        cost_ms: by the task's objective; infinite where not all is placed.
        lack: squared bytes of all that is not placed; 0 where all is.
    """

    bundles: Sequence[Bundle]
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
        homes = zip(self.bundles, self.homes.tolist(), strict=True)
        return [(piece, home) for bundle, home in homes for piece in bundle.slices]


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
        self._terms = Terms(task)
        columns = sum(table.whole().output_width for table in task.tables)
        self._limits = np.array(shares) * columns / len(task.devices)

    def best(self, cuts: Sequence[Sequence[Bundle]]) -> list[GreedyPlan]:
        """The best placement of each cut: lists of equally many bundles, each all of the task.

        A bundle that stands in several of them is looked at once.
        """
        different = dict.fromkeys(bundle for cut in cuts for bundle in cut)
        numbers = {bundle: number for number, bundle in enumerate(different)}
        deck = _Deck(self._oracle, self._task, list(different))
        members = np.array([[numbers[bundle] for bundle in cut] for cut in cuts])
        freedom = np.stack([self._terms.freedom(cut) for cut in cuts])
        turns = np.lexsort((-deck.alone_ms[members], freedom))  # of each cut, as `place_in_turn`
        ordered = np.take_along_axis(members, turns, 1).repeat(len(self._limits), 0)
        games = _Games(deck, np.tile(self._limits, len(cuts)))
        homes = np.stack([games.place(items) for items in ordered.T], axis=1)
        shape = len(cuts), len(self._limits)
        costs, lacks = games.costs_ms().reshape(shape), games.lack.reshape(shape)
        chosen = np.lexsort((lacks, costs))[:, 0]
        found = []
        for number, (cut, limit) in enumerate(zip(cuts, chosen, strict=True)):
            home = np.empty(len(cut), np.int64)
            home[turns[number]] = homes[number * shape[1] + limit]
            cost, lack = float(costs[number, limit]), float(lacks[number, limit])
            found.append(GreedyPlan(cut, home, cost, lack))
        return found


class _Deck:
    """What is known of each bundle, by number."""

    def __init__(
        self, oracle: EstimatedCosts, task: ShardingTask, bundles: Sequence[Bundle]
    ) -> None:
        terms, devices = Terms(task), oracle.devices(bundles, 1)
        self.task = task
        self.price = oracle.model.compute.price
        self.amounts = devices.amounts.double()
        self.alone_ms: Floats = devices.alone().total_ms.double().numpy()
        self.bytes = bytes_of_bundles(task.operator, task.batch_size, bundles)
        self.columns = np.array([bundle.columns for bundle in bundles], np.int64)
        self.lawful, self.groups = terms.lawful(bundles), terms.groups(bundles)
        self.kin = terms.kin(bundles)
        # Sums of these name what a device holds, whatever the order it came in.
        self.marks = np.random.default_rng(0).integers(2**63, size=len(bundles), dtype=np.uint64)


class _Games:
    """Placements under way, one for each limit of columns; all place a bundle at a time.

    What no device may take is left out, and the others go on: so it is known how much is left.
    """

    def __init__(self, deck: _Deck, limits: Floats) -> None:
        self._deck = deck
        seats, devices = len(limits), len(deck.task.devices)
        self._limits = limits[:, None]
        self._free = np.tile(deck.task.room_bytes, (seats, 1))
        self._columns = np.zeros((seats, devices), np.int64)
        self._marks = np.zeros((seats, devices), np.uint64)
        # The table of each group of those that lie apart: there is one at most on a device.
        self._residents = np.full((seats, devices, deck.groups.shape[1]), _NOBODY)
        # In double precision and flat: the same sums as in `DeviceSums`.
        shape = deck.amounts.shape[1:]
        self._sums = torch.zeros(seats * devices, *shape, dtype=torch.float64)
        self._ms = np.zeros((seats, devices, 2))  # forward, backward
        self.lack = np.zeros(seats)

    def place(self, items: Whole) -> Whole:
        """Put an item of each placement where the device computes least with it: their homes."""
        deck, open_to = self._deck, self._admitted(items)
        fits, where = open_to.any(1), np.flatnonzero(open_to)
        self.lack += np.where(fits, 0.0, deck.bytes[items].astype(float) ** 2)
        homes = np.full(len(items), _NOWHERE)
        if not len(where):
            return homes
        devices = open_to.shape[1]
        with_it = np.full((*open_to.shape, 2), np.inf)
        with_it.reshape(-1, 2)[where] = self._with(items[where // devices], where)
        seats = np.flatnonzero(fits)
        chosen = with_it[seats].sum(2).argmin(1)
        homes[seats] = chosen
        item = items[seats]
        self._ms[seats, chosen] = with_it[seats, chosen]
        self._free[seats, chosen] -= deck.bytes[item]
        self._columns[seats, chosen] += deck.columns[item]
        self._marks[seats, chosen] += deck.marks[item]
        self._sums.index_add_(0, torch.from_numpy(seats * devices + chosen), deck.amounts[item])
        groups, kin = deck.groups[item], deck.kin[item][:, None]
        self._residents[seats, chosen] = np.where(groups, kin, self._residents[seats, chosen])
        return homes

    def _admitted(self, items: Whole) -> npt.NDArray[np.bool_]:
        """Whether memory, limits and rules let each item go to each device: [seats, devices]."""
        deck = self._deck
        found = deck.lawful[items] & (self._free >= deck.bytes[items][:, None])
        found &= self._columns + deck.columns[items][:, None] <= self._limits
        alike = self._residents == deck.kin[items][:, None, None]
        apart = deck.groups[items][:, None] & (self._residents != _NOBODY) & ~alike
        return np.asarray(found & ~apart.any(2))

    def _with(self, items: Whole, where: Whole) -> Floats:
        """Forward and backward ms of devices, numbered over all seats, with an item more.

        Devices that would hold the same are priced once: limits that do not bind change nothing.
        """
        deck = self._deck
        marks = self._marks.reshape(-1)[where] + deck.marks[items]
        _, first, which = np.unique(marks, return_index=True, return_inverse=True)
        sums = self._sums[where[first]] + deck.amounts[items[first]]
        prices = deck.price(sums.float())
        both = torch.stack([prices.forward_ms, prices.backward_ms], dim=-1)
        return np.asarray(both.double().numpy()[which])

    def costs_ms(self) -> Floats:
        """What each placement costs, by the task's objective; infinite where something is left."""
        price, columns = StepPrice.of_task(self._deck.task), self._columns.astype(float)
        stages = price.stages_ms(self._ms[..., 0], self._ms[..., 1], columns)
        return np.where(self.lack == 0, sum(stage.max(-1) for stage in stages), np.inf)
