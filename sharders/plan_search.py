"""Steps of a local search: moves, swaps and splits of a plan, priced as a batch.

The search minimises the step time by the task's objective: the sum over stages of a norm over
devices. Costs are [devices, stages, scenarios].
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from autoshard.cost_model.placement_state import TaskPlacement, UnitCatalog
from autoshard.cost_model.scenarios import Pricing
from autoshard.cost_model.step_prediction import Placed
from autoshard.sharders.move_budget import GONE, MoveBudget
from autoshard.workload import Piece, ShardingPlan, ShardingTask
from autoshard.workload.admission import RuleMasks
from autoshard.workload.arrays import Bools, Floats, Ints
from autoshard.workload.units import PlacementUnit

_MIN_GAIN = 1e-5  # relative: smaller ones are not worth a step
_MIN_SPLIT_GAIN = 0.01  # relative; a split adds lookups on two devices
_MOVES = 256  # priced at a step, those with the best estimates
_SWAPS = 64  # priced at a step, those with the best estimates; more find nothing better
_MIN_MS = 1e-12


class Change(NamedTuple):
    """One step: items that leave their devices, and items with the devices that they enter."""

    leave: tuple[int, ...]
    enter: tuple[tuple[int, int], ...]


class Choices(NamedTuple):
    """Candidate steps of one kind.

    Args:
        after_ms: Objective after each step; infinite where it is not admitted.
        change: Returns the step of a number.
    """

    after_ms: Floats
    change: Callable[[int], Change]


_NONE = Choices(np.empty(0), lambda number: Change((), ((number, GONE),)))


class PlanSearch:
    """Mutable plan with its candidate steps. Of a piece, only the width matters.

    Args:
        pricing: Predicts costs of devices, in one scenario or several.
        task: Task of the plan.
        power: Power of the norms over devices.
        placed: Initial plan.
        near: A plan in use and the bytes that may move away from it, if any.
        masks: Rules of the task, if they are known already.
    """

    def __init__(
        self,
        pricing: Pricing,
        task: ShardingTask,
        power: float,
        placed: Placed,
        near: tuple[ShardingPlan, int] | None = None,
        masks: RuleMasks | None = None,
    ) -> None:
        self._power = power
        self._masks = RuleMasks(task) if masks is None else masks
        gathered = self._masks.gathered(placed)
        self._units = [unit for unit, _ in gathered]
        self._catalog = UnitCatalog(pricing, task, self._masks, self._units)
        self._homes = np.array([device for _, device in gathered], np.int64)
        self._devices = TaskPlacement(self._catalog)
        self._devices.fill(self._homes)
        self._budget = None if near is None else MoveBudget(*near, task)
        if self._budget is not None:
            self._budget.extend(self._units)
        self._weight = self._devices.beside()  # [items, stages]
        self._split_cost = pricing.split_cost(task)  # on all devices
        self._slices = np.array([_slices(unit) for unit in self._masks.units])
        self._splits = 0
        self._price_anew()

    def objective(self) -> float:
        """Returns the mean over scenarios of the softened step time in ms."""
        return float(self._after(0.0))

    def placed(self, change: Change | None = None) -> list[tuple[Piece, int]]:
        """Returns the pieces and their devices, as they are or after a step."""
        homes = self._homes.copy()
        if change is not None:
            homes[list(change.leave)] = GONE
            for item, device in change.enter:
                homes[item] = device
        return [
            (piece, int(device))
            for item, device in zip(self._units, homes, strict=True)
            if device != GONE
            for piece in item.pieces
        ]

    def descend(self, split: bool, time_is_up: Callable[[], bool] = lambda: False) -> None:
        """Applies the best move, else the best swap, else the best split, until none helps.

        Args:
            split: Whether tables may be split.
            time_is_up: Returns whether to stop.
        """
        for _ in range(20 * len(self._homes)):
            if time_is_up() or not (
                self._apply_best(self.moves(), _MIN_GAIN)
                or self._apply_best(self.swaps(), _MIN_GAIN)
                or (split and self._apply_best(self.splits(first_is_paid=True), _MIN_SPLIT_GAIN))
            ):
                return

    def _apply_best(self, choices: Choices, min_gain: float) -> bool:
        """Applies the best step if it improves the objective; returns whether it does."""
        if not len(choices.after_ms):
            return False
        best = int(np.argmin(choices.after_ms))
        if choices.after_ms[best] > self.objective() * (1 - min_gain):
            return False
        self._apply(choices.change(best))
        return True

    def _apply(self, change: Change) -> None:
        for item in change.leave:
            self._devices.take(item, int(self._homes[item]))
            self._homes[item] = GONE
        for item, device in change.enter:
            self._devices.put(item, device)
            self._homes[item] = device
        self._price_anew()

    def kick(self, rng: np.random.Generator) -> None:
        """Moves three random pieces to random devices that admit them."""
        for item in rng.permutation(np.flatnonzero(self._homes != GONE))[:3].tolist():
            fitting = np.flatnonzero(self._admitted(np.array([item]))[0])
            if len(fitting):
                self._apply(Change((item,), ((item, int(rng.choice(fitting))),)))

    def split_costliest(self, rank: int) -> bool:
        """Splits a piece of the slowest device; one half moves to the device that is fastest there.

        Args:
            rank: Rank of the piece by its cost in the longest stage, from 0.

        Returns:
            False if there is no such piece, or no device admits the half.
        """
        slowest, stage = self.slowest[0], self._longest[0]
        mine = self._splittable(np.flatnonzero(self._homes == slowest))
        if rank >= len(mine):
            return False
        item = sorted(mine, key=lambda number: -self._weight[number, stage])[rank]
        pair = self._units[item].halves()
        stays, goes = (self._add([half]) for half in pair)
        admitted = self._admitted(np.array([goes]))[0]
        admitted[slowest] = False
        if not admitted.any():
            return False
        device = int(np.where(admitted, self._means[:, stage], np.inf).argmin())
        self._apply(Change((item,), ((stays, slowest), (goes, device))))
        return True

    def moves(self) -> Choices:
        """Returns moves of a piece away from a device that is the slowest of a stage."""
        items = np.flatnonzero(np.isin(self._homes, self.slowest))
        if not len(items):
            return _NONE
        pairs = self._promising_moves(items)
        rows, into = np.divmod(pairs, len(self._costs))
        out, homes = items[rows], self._homes[items]
        without = self._devices.without(items, homes)[rows]
        removed = self._powers[homes[rows]] + self._powers[into]
        after = self._after(removed, without, self._devices.joined_each(out, into))

        def change(number: int) -> Change:
            item, device = int(out[number]), int(into[number])
            return Change((item,), ((item, device),))

        return Choices(after, change)

    def _promising_moves(self, items: Ints) -> Ints:
        """Returns the admitted moves with the best objectives if costs were additive.

        Each is the number of one of these items times the number of devices, plus that of a device.
        """
        may_move = self._admitted(items)
        may_move[np.arange(len(items)), self._homes[items]] = False
        pairs = np.flatnonzero(may_move)
        if len(pairs) <= _MOVES:
            return pairs
        rows, into = np.divmod(pairs, len(self._costs))
        largest, weight = np.maximum(self._means.max(0), _MIN_MS), self._weight[items]
        powers, here = (self._means / largest) ** self._power, self._homes[items]
        # Of fused tables, a device may take less than one of them does by its share of the work.
        rest = np.maximum(self._means[here] - weight, 0.0)
        left = (rest / largest) ** self._power - powers[here]
        joined = ((self._means[into] + weight[rows]) / largest) ** self._power - powers[into]
        sums = powers.sum(0) + left[rows] + joined
        estimate = (largest * np.maximum(sums, _MIN_MS) ** (1 / self._power)).sum(1)
        return np.sort(pairs[np.argpartition(estimate, _MOVES)[:_MOVES]])

    def swaps(self) -> Choices:
        """Returns the most promising swaps with a device that is the slowest of a stage."""
        out, into = self._promising()
        if not len(out):
            return _NONE
        here, there = self._homes[out], self._homes[into]
        after_here = self._devices.exchanged(out, here, into)
        after_there = self._devices.exchanged(into, there, out)
        after = self._after(self._powers[here] + self._powers[there], after_here, after_there)

        def change(number: int) -> Change:
            leaves, enters = int(out[number]), int(into[number])
            homes = (leaves, int(there[number])), (enters, int(here[number]))
            return Change((leaves, enters), homes)

        return Choices(after, change)

    def _promising(self) -> tuple[Ints, Ints]:
        """Returns pairs of admitted swaps with the best step times if costs were additive."""
        places = np.flatnonzero(self._homes != GONE)
        pairs, estimates = [], []
        for device in self.slowest:
            here = self._homes[places] == device
            mine, others = places[here], places[~here]
            estimates.append(self._additive_ms(device, mine, others).ravel())
            pairs.append(np.stack(np.meshgrid(mine, others, indexing="ij")).reshape(2, -1))
        estimate = np.concatenate(estimates)
        if not len(estimate):
            return estimate.astype(np.int64), estimate.astype(np.int64)
        count = min(_SWAPS, len(estimate))
        chosen = np.sort(np.argpartition(estimate, count - 1)[:count])
        out, into = np.concatenate(pairs, 1)[:, chosen[estimate[chosen] < np.inf]]
        return out, into

    def _additive_ms(self, device: int, mine: Ints, others: Ints) -> Floats:
        """Estimates the step time after each swap, as if costs were additive: [mine, others].

        Args:
            device: Device of `mine`.
            mine: Items on that device.
            others: Items on other devices.
        """
        homes, found = self._homes[others], np.zeros((len(mine), len(others)))
        for weight, means in zip(self._weight.T, self._means.T, strict=True):  # of each stage
            gain = weight[mine][:, None] - weight[others]
            slowest = np.maximum(means[device] - gain, means[homes] + gain)
            leader = means.argmax()
            if leader != device:
                others_ms = np.where(homes == leader, 0.0, means[leader])
                np.maximum(slowest, others_ms, out=slowest)
            found += slowest
        found[~self._may_swap(device, mine, others)] = np.inf
        return found

    @property
    def first_split_ms(self) -> float:
        """What a first split would add beside its own cost; 0 if there is one already."""
        return 0.0 if self._splits else self._split_cost.first_ms

    def splits(self, first_is_paid: bool = False) -> Choices:
        """Returns splits of a piece of a device that is the slowest of a stage; one half moves.

        Args:
            first_is_paid: Whether what a first split adds is left out, because others share it.
        """
        wide = self._splittable(np.flatnonzero(np.isin(self._homes, self.slowest)))
        if not wide or len(self._costs) == 1:
            return _NONE
        homes = self._homes[wide]
        pairs = [self._units[item].halves() for item in wide]
        first = self._add([stays for stays, _ in pairs])
        second = self._add([goes for _, goes in pairs])
        staying = np.arange(first, first + len(pairs))
        going = np.arange(second, second + len(pairs))
        kept = self._devices.exchanged(np.array(wide), homes, staying)
        joined = self._devices.joined(going)
        removed = self._powers[homes][:, None] + self._powers
        after = self._after(removed, kept[:, None], joined)
        after[np.arange(len(wide)), homes] = np.inf
        after[~self._admitted(going)] = np.inf
        more = np.array([_slices(stays) for stays, _ in pairs])
        after += self._split_cost.each_ms * more[:, None]
        if not first_is_paid:
            after += self.first_split_ms

        def change(number: int) -> Change:
            place, device = divmod(number, len(self._costs))
            stays = (first + place, int(homes[place]))
            return Change((wide[place],), (stays, (second + place, device)))

        return Choices(after.ravel(), change)

    def _admitted(self, items: Ints) -> Bools:
        """Returns whether each device admits each item, [items, devices]."""
        found = self._devices.admits_units(items)
        return found if self._budget is None else found & self._budget.admits(items, self._homes)

    def _may_swap(self, here: int, mine: Ints, others: Ints) -> Bools:
        """Returns whether each item of device `here` may be swapped with each of the others:
        [mine, others].
        """
        devices, mine_, others_ = self._devices, mine[:, None], others[None]
        found = devices.admits_swaps(np.array(here), mine_, others_)
        found = found & devices.admits_swaps(self._homes[others_], others_, mine_)
        if self._budget is not None:
            found &= self._budget.admits_swaps(here, mine, others, self._homes)
        return found

    def _splittable(self, items: Ints) -> list[int]:
        """Returns the items that may be split."""
        present = self._catalog.origins[self._homes != GONE]
        parts = np.bincount(present, minlength=len(self._masks.units))
        units, origins = self._units, self._catalog.origins
        return [
            n for n in items.tolist() if self._masks.may_split(units[n], int(parts[origins[n]]))
        ]

    def _add(self, items: list[PlacementUnit]) -> int:
        """Adds items that are on no device yet; returns the number of the first."""
        first = self._catalog.extend(items)
        self._units += items
        self._homes = np.concatenate([self._homes, np.full(len(items), GONE)])
        if self._budget is not None:
            self._budget.extend(items)
        self._weight = np.concatenate([self._weight, self._devices.beside(first)])
        return first

    @property
    def slowest(self) -> list[int]:
        """Slowest device of each stage in the mean over scenarios, the longest stage first."""
        leaders = self._means.argmax(0)[self._longest]
        return list(dict.fromkeys(leaders.tolist()))

    def _price_anew(self) -> None:
        """Updates costs, and their powers relative to the slowest device in each scenario."""
        self._costs = self._devices.costs()
        self._means = self._costs.mean(2)  # [devices, stages]
        self._longest = np.argsort(-self._means.max(0), kind="stable")
        self._largest = np.maximum(self._costs.max(0), _MIN_MS)
        self._powers = (self._costs / self._largest) ** self._power
        if any(self._split_cost):
            here, devices = self._homes != GONE, len(self._costs)
            # Pieces of a table that meet on a device are one.
            held = np.unique(self._catalog.origins[here] * devices + self._homes[here])
            slices = self._slices[held // devices].sum()
            self._splits = int(slices - self._slices.sum())
        self._splits_ms = self._split_cost.ms(self._splits)

    def _after(self, removed: Floats | float, *added: Floats) -> Floats:
        """Returns the objective if powers of devices are replaced by other costs, [...].

        Args:
            removed: Sum of powers that are removed, [..., stages, scenarios].
            added: Costs that are added, each [..., stages, scenarios].
        """
        sums = self._powers.sum(0) - removed
        for costs in added:
            sums = sums + (costs / self._largest) ** self._power
        norms = self._largest * np.maximum(sums, _MIN_MS) ** (1 / self._power)
        return np.asarray(norms.mean(-1).sum(-1)) + self._splits_ms


def _slices(unit: PlacementUnit) -> int:
    """Returns into how many slices of outputs the samples of a unit are put."""
    return sum(piece.table.features for piece in unit.pieces)
