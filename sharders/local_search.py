"""Local search over a cost model: moves, swaps and splits of tables until none helps any more."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from autoshard.cost_model import DeviceSums, EstimatedCosts
from autoshard.cost_model.inputs import bundle_amounts
from autoshard.cost_model.network import DIRECTIONS
from autoshard.cost_model.outlook import Placed, TaskOutlook, sharpness
from autoshard.cost_model.scenarios import Pricing
from autoshard.cost_model.training import one_thread
from autoshard.sharders.admission import GONE, Admission, Near
from autoshard.sharders.cost_greedy import AloneGreedySharder, FusedGreedySharder
from autoshard.workload import PlanError, Sharder, ShardingPlan, ShardingTask, TableSlice
from autoshard.workload.terms import Bundle, Terms

Floats = npt.NDArray[np.float64]
Whole = npt.NDArray[np.int64]

# The norm of the devices' costs that is minimised in the mean: softer than their maximum, for what
# evens out devices that are not the slowest helps the next move.
_SOFT = 12.0
_SCENARIOS = 16  # that the end of the search goes by
_LEAST_GAIN = 1e-5  # relative: smaller ones are not worth a step
_LEAST_SPLIT_GAIN = 0.01  # relative, of the norm: a split costs lookups on two devices
_SWAPS = 256  # that are priced at a step: those that should even out most
_LEAST_MS = 1e-12


class LocalSearch:
    """Improves plans, table by table: first what they cost in the mean, then in scenarios.

    A search finds the mistakes of its model, so it is kicked away from its optimum only a few
    times, by turns with random moves and with a split. Scenarios tell which plans stand or fall
    with what is not known.

    Args:
        oracle: prices devices.
        kicks: restarts from a change of the best plan so far.
        split: allow tables to be split by columns.
        seed: of the kicks, and of scenarios.
        near: a plan to stay near; by default none.
    """

    def __init__(
        self,
        oracle: EstimatedCosts,
        kicks: int = 8,
        split: bool = True,
        seed: int = 0,
        near: Near | None = None,
    ) -> None:
        self._oracle = oracle
        self._kicks = kicks
        self._split = split
        self._seed = seed
        self._near = near

    @one_thread()
    def improve(self, task: ShardingTask, starts: Sequence[Placed]) -> list[Placed]:
        """Valid plans that the search came to from the best of these: the last ones are the best,
        by the scenarios that it went by.
        """
        mean = self._oracle.expectation()
        searches = [_Search(mean, task, _SOFT, start, self._near) for start in starts]
        best = min(searches, key=_Search.objective)
        best.descend(self._split)
        rng = np.random.default_rng(self._seed)
        for number in range(self._kicks):
            other = _Search(mean, task, _SOFT, best.placed(), self._near)
            # By turns: what holds a device up is halved, though it helps only after other moves.
            if not (self._split and number % 2 and other.halve(number // 2)):
                other.kick(rng)
            other.descend(self._split)
            if other.objective() < best.objective():
                best = other
        power = sharpness(self._oracle.factors.prior.rest)
        scenarios = self._oracle.scenarios(task.tables, _SCENARIOS, self._seed)
        last = _Search(scenarios, task, power, best.placed(), self._near)
        last.descend(self._split)
        return [best.placed(), last.placed()]


class LocalSearchSharder:
    """Local search from the better of the two greedy plans by cost."""

    def __init__(self, oracle: EstimatedCosts, split: bool = True) -> None:
        self._starts: tuple[Sharder, ...] = (AloneGreedySharder(oracle), FusedGreedySharder(oracle))
        self._oracle = oracle
        self._search = LocalSearch(oracle, split=split)

    def shard(self, task: ShardingTask) -> ShardingPlan:
        """A valid plan; PlanError names the table that no device has room for, as a whole."""
        plans, faults = [], []
        for start in self._starts:
            try:
                plans.append(start.shard(task).placed(task))
            except PlanError as fault:
                faults.append(fault)
        if not plans:
            raise faults[0]
        found: list[Placed] = [*plans, *self._search.improve(task, plans)]
        return ShardingPlan.of_slices(task, TaskOutlook(self._oracle, task).ranked(found)[0])


class _Search:
    """A plan that is being improved. Only the width of a slice matters until it is written down."""

    def __init__(
        self,
        pricing: Pricing,
        task: ShardingTask,
        power: float,
        placed: Placed,
        near: Near | None,
    ) -> None:
        self._pricing = pricing
        self._power = power
        gathered = Terms(task).gathered(placed)
        items, homes = [i for i, _ in gathered], np.array([d for _, d in gathered], np.int64)
        self._at = Admission(task, items, homes, near)
        amounts = bundle_amounts(pricing.amounts, items)
        self._devices = DeviceSums(pricing, amounts, len(task.devices))
        self._devices.fill(torch.from_numpy(homes))
        self._weight = self._weights(0)
        self._price_anew()

    def objective(self) -> float:
        """What is minimised, in milliseconds: the mean over scenarios of a norm of the devices."""
        return float(self._after(0.0))

    def placed(self) -> list[tuple[TableSlice, int]]:
        """Each slice and its device."""
        return [
            (piece, int(device))
            for item, device in zip(self._at.items, self._at.homes, strict=True)
            if device != GONE
            for piece in item.slices
        ]

    def descend(self, split: bool) -> None:
        """The best move as long as one helps; else the best swap, else the best split."""
        for _ in range(20 * len(self._at.homes)):
            if not (self._move() or self._swap() or (split and self._divide())):
                return

    def kick(self, rng: np.random.Generator) -> None:
        """Move three slices to random devices with room for them."""
        for item in rng.permutation(np.flatnonzero(self._at.homes != GONE))[:3].tolist():
            fitting = np.flatnonzero(self._at.admitted(np.array([item]))[0])
            if len(fitting):
                self._leave(item)
                self._enter(item, int(rng.choice(fitting)))
        self._price_anew()

    def halve(self, rank: int) -> bool:
        """Halve the costliest slice of the slowest device but so many, and put one half where that
        is slowest least; False if there is none, or no room.
        """
        slowest = self._slowest
        mine = self._at.to_halve(np.flatnonzero(self._at.homes == slowest).tolist())
        if rank >= len(mine):
            return False
        item = sorted(mine, key=lambda number: -self._weight[number])[rank]
        pair = self._at.items[item].halves()
        stays, goes = (self._add([half]) for half in pair)
        admitted = self._at.admitted(np.array([goes]))[0]
        admitted[slowest] = False
        if not admitted.any():
            return False
        device = int(np.where(admitted, self._costs.mean(1), np.inf).argmin())
        self._leave(item)
        self._enter(stays, slowest)
        self._enter(goes, device)
        self._price_anew()
        return True

    def _move(self) -> bool:
        """Give the slice of the slowest device away that gains most elsewhere."""
        slowest = self._slowest
        items = np.flatnonzero(self._at.homes == slowest)
        if not len(items):
            return False
        numbers = torch.from_numpy(items)
        left = _floats(self._devices.without(numbers, torch.full_like(numbers, slowest)))
        joined = _floats(self._devices.with_each(numbers)).swapaxes(0, 1)
        after = self._after(self._powers[slowest] + self._powers, left[:, None], joined)
        after[:, slowest] = np.inf
        after[~self._at.admitted(items)] = np.inf
        place, device = np.unravel_index(np.argmin(after), after.shape)
        return self._take_step(after[place, device], [(int(items[place]), int(device))])

    def _swap(self) -> bool:
        """Swap a slice of the slowest device for one of another."""
        slowest = self._slowest
        mine = np.flatnonzero(self._at.homes == slowest)
        others = np.flatnonzero((self._at.homes != slowest) & (self._at.homes != GONE))
        if not len(mine) or not len(others):
            return False
        out, into = self._promising(slowest, mine, others)
        if not len(out):
            return False
        homes = self._at.homes[into]
        first, second = torch.from_numpy(out), torch.from_numpy(into)
        here, there = torch.full_like(first, slowest), torch.from_numpy(homes)
        after_here = _floats(self._devices.exchanged(first, here, second))
        after_there = _floats(self._devices.exchanged(second, there, first))
        after = self._after(self._powers[slowest] + self._powers[homes], after_here, after_there)
        best = int(np.argmin(after))
        steps = [(int(out[best]), int(homes[best])), (int(into[best]), slowest)]
        return self._take_step(after[best], steps)

    def _promising(self, slowest: int, mine: Whole, others: Whole) -> tuple[Whole, Whole]:
        """Pairs to swap that memory admits and that should even out most, if costs added up."""
        gain = self._weight[mine][:, None] - self._weight[others][None]
        homes, costs = self._at.homes[others], self._costs.mean(1)
        worse = np.maximum(costs[slowest] - gain, costs[homes][None] + gain)
        worse[~self._at.may_swap(slowest, mine, others)] = np.inf
        flat = worse.ravel()
        count = min(_SWAPS, len(flat))
        chosen = np.sort(np.argpartition(flat, count - 1)[:count])
        chosen = chosen[flat[chosen] < np.inf]
        return mine[chosen // len(others)], others[chosen % len(others)]

    def _take_step(self, after: float, steps: Sequence[tuple[int, int]]) -> bool:
        """Place items on other devices, if the objective becomes better by it."""
        if after > self.objective() * (1 - _LEAST_GAIN):
            return False
        for item, _ in steps:
            self._leave(item)
        for item, device in steps:
            self._enter(item, device)
        self._price_anew()
        return True

    def _divide(self) -> bool:
        """Halve one slice of the slowest device and give one half away."""
        slowest = self._slowest
        wide = self._at.to_halve(np.flatnonzero(self._at.homes == slowest).tolist())
        if not wide or len(self._costs) == 1:
            return False
        pairs = [self._at.items[item].halves() for item in wide]
        first = self._add([stays for stays, _ in pairs])
        second = self._add([goes for _, goes in pairs])
        staying = torch.arange(first, first + len(pairs))
        going = torch.arange(second, second + len(pairs))
        here = torch.full_like(staying, slowest)
        kept = _floats(self._devices.exchanged(torch.tensor(wide), here, staying))
        joined = _floats(self._devices.with_each(going)).swapaxes(0, 1)
        after = self._after(self._powers[slowest] + self._powers, kept[:, None], joined)
        after[:, slowest] = np.inf
        after[~self._at.admitted(going.numpy())] = np.inf
        place, device = np.unravel_index(np.argmin(after), after.shape)
        if after[place, device] > self.objective() * (1 - _LEAST_SPLIT_GAIN):
            return False
        self._leave(wide[place])
        self._enter(first + int(place), slowest)
        self._enter(second + int(place), int(device))
        self._price_anew()
        return True

    def _add(self, items: list[Bundle]) -> int:
        """Make items that are on no device yet; returns the number of the first."""
        first = self._devices.extend(bundle_amounts(self._pricing.amounts, items))
        self._at.extend(items)
        self._weight = np.concatenate([self._weight, self._weights(first)])
        return first

    def _weights(self, first: int) -> Floats:
        """Milliseconds beside others of the items from number `first` on: forward and backward."""
        amounts = self._devices.amounts[first:]
        return np.asarray(amounts[..., :DIRECTIONS].mean(1).sum(-1).double().numpy())

    def _leave(self, item: int) -> None:
        self._devices.take(item, self._at.leave(item))

    def _enter(self, item: int, device: int) -> None:
        self._devices.put(item, device)
        self._at.enter(item, device)

    @property
    def _slowest(self) -> int:
        """The device that is slowest in the mean over scenarios."""
        return int(self._costs.mean(1).argmax())

    def _price_anew(self) -> None:
        """Costs [devices, scenarios], and their powers over what is slowest in each scenario."""
        self._costs = _floats(self._devices.prices())
        self._most = np.maximum(self._costs.max(0), _LEAST_MS)
        self._powers = (self._costs / self._most) ** self._power

    def _after(self, gone: Floats | float, *come: Floats) -> Floats:
        """The objective where powers [..., scenarios] of devices are replaced by other costs."""
        sums = self._powers.sum(0) - gone
        for costs in come:
            sums = sums + (costs / self._most) ** self._power
        norms = self._most * np.maximum(sums, _LEAST_MS) ** (1 / self._power)
        return np.asarray(norms.mean(-1))


def _floats(prices: torch.Tensor) -> Floats:
    return np.asarray(prices.double().numpy())
