"""Local search over a cost model: moves, swaps and splits of tables until none helps any more."""

from collections import Counter
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
from autoshard.sharders.cost_greedy import AloneGreedySharder, FusedGreedySharder
from autoshard.workload import PlanError, Sharder, ShardingPlan, ShardingTask, TableSlice
from autoshard.workload.terms import Bundle, Terms, Truths

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
_GONE = -1  # the device of items that are on none: split, or only looked at


class LocalSearch:
    """Improves plans, table by table: first what they cost in the mean, then in scenarios.

    A search finds the mistakes of its model, so it is kicked away from its optimum only a few
    times. Scenarios tell which plans stand or fall with what is not known.

    Args:
        oracle: prices devices.
        kicks: restarts from a random change of the best plan so far.
        split: allow tables to be split by columns.
        seed: of the kicks, and of scenarios.
    """

    def __init__(
        self, oracle: EstimatedCosts, kicks: int = 8, split: bool = True, seed: int = 0
    ) -> None:
        self._oracle = oracle
        self._kicks = kicks
        self._split = split
        self._seed = seed

    @one_thread()
    def improve(self, task: ShardingTask, starts: Sequence[Placed]) -> list[Placed]:
        """Valid plans that the search came to from the best of these: the last ones are the best,
        by the scenarios that it went by.
        """
        mean = self._oracle.expectation()
        searches = [_Search(mean, task, _SOFT, start) for start in starts]
        best = min(searches, key=_Search.objective)
        best.descend(self._split)
        rng = np.random.default_rng(self._seed)
        for _ in range(self._kicks):
            other = _Search(mean, task, _SOFT, best.placed())
            other.kick(rng)
            other.descend(self._split)
            if other.objective() < best.objective():
                best = other
        power = sharpness(self._oracle.factors.prior.rest)
        scenarios = self._oracle.scenarios(task.tables, _SCENARIOS, self._seed)
        last = _Search(scenarios, task, power, best.placed())
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

    def __init__(self, pricing: Pricing, task: ShardingTask, power: float, placed: Placed) -> None:
        self._pricing = pricing
        self._task = task
        self._power = power
        self._terms = Terms(task)
        together = self._terms.gathered(placed)
        self._items = [bundle for bundle, _ in together]
        self._home = np.array([device for _, device in together], np.int64)
        amounts = bundle_amounts(pricing.amounts, self._items)
        self._devices = DeviceSums(pricing, amounts, len(task.devices))
        self._bytes = np.array([self._bytes_of(item) for item in self._items], np.int64)
        self._lawful = self._terms.lawful(self._items)
        self._conflicts = self._conflicts_of(self._items)
        self._free = task.room_bytes
        np.subtract.at(self._free, self._home, self._bytes)
        self._devices.fill(torch.from_numpy(self._home))
        self._weight = self._weights(0)
        self._price_anew()

    def objective(self) -> float:
        """What is minimised, in milliseconds: the mean over scenarios of a norm of the devices."""
        return float(self._after(0.0))

    def placed(self) -> list[tuple[TableSlice, int]]:
        """Each slice and its device."""
        return [
            (piece, int(device))
            for item, device in zip(self._items, self._home, strict=True)
            if device != _GONE
            for piece in item.slices
        ]

    def descend(self, split: bool) -> None:
        """The best move as long as one helps; else the best swap, else the best split."""
        for _ in range(20 * len(self._home)):
            if not (self._move() or self._swap() or (split and self._divide())):
                return

    def kick(self, rng: np.random.Generator) -> None:
        """Move three slices to random devices with room for them."""
        for item in rng.permutation(np.flatnonzero(self._home != _GONE))[:3].tolist():
            fitting = np.flatnonzero(self._admitted(np.array([item]))[0])
            if len(fitting):
                self._leave(item)
                self._enter(item, int(rng.choice(fitting)))
        self._price_anew()

    def _move(self) -> bool:
        """Give the slice of the slowest device away that gains most elsewhere."""
        slowest = self._slowest
        items = np.flatnonzero(self._home == slowest)
        if not len(items):
            return False
        numbers = torch.from_numpy(items)
        left = _floats(self._devices.without(numbers, torch.full_like(numbers, slowest)))
        joined = _floats(self._devices.with_each(numbers)).swapaxes(0, 1)
        after = self._after(self._powers[slowest] + self._powers, left[:, None], joined)
        after[:, slowest] = np.inf
        after[~self._admitted(items)] = np.inf
        place, device = np.unravel_index(np.argmin(after), after.shape)
        return self._take_step(after[place, device], [(int(items[place]), int(device))])

    def _swap(self) -> bool:
        """Swap a slice of the slowest device for one of another."""
        slowest = self._slowest
        mine = np.flatnonzero(self._home == slowest)
        others = np.flatnonzero((self._home != slowest) & (self._home != _GONE))
        if not len(mine) or not len(others):
            return False
        out, into = self._promising(slowest, mine, others)
        if not len(out):
            return False
        homes = self._home[into]
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
        homes, costs = self._home[others], self._costs.mean(1)
        worse = np.maximum(costs[slowest] - gain, costs[homes][None] + gain)
        grown = self._bytes[others][None] - self._bytes[mine][:, None]
        worse[(grown > self._free[slowest]) | (-grown > self._free[homes][None])] = np.inf
        if self._task.rules:
            worse[~self._may_swap(slowest, mine, others)] = np.inf
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
        slices = Counter(
            item.name for item, home in zip(self._items, self._home, strict=True) if home != _GONE
        )
        wide = [
            number
            for number in np.flatnonzero(self._home == slowest).tolist()
            if self._terms.may_halve(item := self._items[number], slices[item.name])
        ]
        if not wide or len(self._free) == 1:
            return False
        pairs = [self._items[item].halves() for item in wide]
        first = self._add([stays for stays, _ in pairs])
        second = self._add([goes for _, goes in pairs])
        staying = torch.arange(first, first + len(pairs))
        going = torch.arange(second, second + len(pairs))
        here = torch.full_like(staying, slowest)
        kept = _floats(self._devices.exchanged(torch.tensor(wide), here, staying))
        joined = _floats(self._devices.with_each(going)).swapaxes(0, 1)
        after = self._after(self._powers[slowest] + self._powers, kept[:, None], joined)
        after[:, slowest] = np.inf
        after[~self._admitted(going.numpy())] = np.inf
        place, device = np.unravel_index(np.argmin(after), after.shape)
        if after[place, device] > self.objective() * (1 - _LEAST_SPLIT_GAIN):
            return False
        self._leave(wide[place])
        self._enter(first + int(place), slowest)
        self._enter(second + int(place), int(device))
        self._price_anew()
        return True

    def _admitted(self, items: Whole) -> Truths:
        """Whether memory and rules admit each item on each device: [items, devices]."""
        found = self._lawful[items] & (self._bytes[items][:, None] <= self._free[None])
        if self._conflicts is not None:
            found &= self._rivals(items) == 0
        return found

    def _rivals(self, items: Whole) -> Whole:
        """How many items are on each device that each of these may not share it with."""
        assert self._conflicts is not None
        there = self._home[:, None] == np.arange(len(self._free))
        return np.asarray(self._conflicts[items].astype(np.int64) @ there.astype(np.int64))

    def _may_swap(self, here: int, mine: Whole, others: Whole) -> Truths:
        """Whether rules admit that each of mine and each of others change places."""
        homes = self._home[others]
        found = self._lawful[mine][:, homes] & self._lawful[others][:, here]
        if self._conflicts is not None:
            each_other = self._conflicts[np.ix_(mine, others)]
            found &= self._rivals(mine)[:, homes] == each_other
            found &= self._rivals(others)[:, here] == each_other
        return found

    def _conflicts_of(self, items: Sequence[Bundle]) -> Truths | None:
        return self._terms.conflicts(items) if self._terms.keeps_apart else None

    def _add(self, items: list[Bundle]) -> int:
        """Make items that are on no device yet; returns the number of the first."""
        first = self._devices.extend(bundle_amounts(self._pricing.amounts, items))
        self._items += items
        self._home = np.concatenate([self._home, np.full(len(items), _GONE)])
        sizes = np.array([self._bytes_of(item) for item in items], np.int64)
        self._bytes = np.concatenate([self._bytes, sizes])
        self._lawful = np.concatenate([self._lawful, self._terms.lawful(items)])
        self._conflicts = self._conflicts_of(self._items)
        self._weight = np.concatenate([self._weight, self._weights(first)])
        return first

    def _weights(self, first: int) -> Floats:
        """Milliseconds beside others of the items from number `first` on: forward and backward."""
        amounts = self._devices.amounts[first:]
        return np.asarray(amounts[..., :DIRECTIONS].mean(1).sum(-1).double().numpy())

    def _leave(self, item: int) -> None:
        device = int(self._home[item])
        self._devices.take(item, device)
        self._free[device] += self._bytes[item]
        self._home[item] = _GONE

    def _enter(self, item: int, device: int) -> None:
        self._devices.put(item, device)
        self._free[device] -= self._bytes[item]
        self._home[item] = device

    def _bytes_of(self, item: Bundle) -> int:
        return sum(map(self._task.piece_bytes, item.slices))

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
