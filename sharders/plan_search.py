"""A plan that is being improved, step by step: moves, swaps and splits, priced at once."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from autoshard.cost_model import DeviceSums
from autoshard.cost_model.inputs import bundle_amounts
from autoshard.cost_model.network import DIRECTIONS
from autoshard.cost_model.outlook import Placed
from autoshard.cost_model.scenarios import Pricing
from autoshard.sharders.admission import GONE, Admission, Near
from autoshard.workload import ShardingTask, TableSlice
from autoshard.workload.terms import Bundle, Terms

Floats = npt.NDArray[np.float64]
Whole = npt.NDArray[np.int64]

_LEAST_GAIN = 1e-5  # relative: smaller ones are not worth a step
_LEAST_SPLIT_GAIN = 0.01  # relative, of the norm: a split costs lookups on two devices
_SWAPS = 256  # that are priced at a step: those that should even out most
_LEAST_MS = 1e-12


class Change(NamedTuple):
    """One step: items that leave their devices, and items that enter devices."""

    leave: tuple[int, ...]
    enter: tuple[tuple[int, int], ...]


class Choices(NamedTuple):
    """Steps of one kind.

    Args:
        after_ms: the objective after each of them; infinite where it is not admitted.
        change: the one of that number.
    """

    after_ms: Floats
    change: Callable[[int], Change]


_NONE = Choices(np.empty(0), lambda number: Change((), ((number, GONE),)))


class PlanSearch:
    """A plan that is being improved. Only the width of a slice matters until it is written down.

    Args:
        pricing: what devices cost, in one scenario or several.
        task: of the plan.
        power: of the norm of the devices' costs that is minimised.
        placed: the plan to begin with.
        near: a plan to stay near, if any.
    """

    def __init__(
        self,
        pricing: Pricing,
        task: ShardingTask,
        power: float,
        placed: Placed,
        near: Near | None = None,
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

    def placed(self, change: Change | None = None) -> list[tuple[TableSlice, int]]:
        """Each slice and its device, as it is or after a step."""
        homes = self._at.homes.copy()
        if change is not None:
            homes[list(change.leave)] = GONE
            for item, device in change.enter:
                homes[item] = device
        return [
            (piece, int(device))
            for item, device in zip(self._at.items, homes, strict=True)
            if device != GONE
            for piece in item.slices
        ]

    def descend(self, split: bool) -> None:
        """The best move as long as one helps; else the best swap, else the best split."""
        for _ in range(20 * len(self._at.homes)):
            if not (
                self._take(self.moves(), _LEAST_GAIN)
                or self._take(self.swaps(), _LEAST_GAIN)
                or (split and self._take(self.splits(), _LEAST_SPLIT_GAIN))
            ):
                return

    def _take(self, choices: Choices, least_gain: float) -> bool:
        """Take the best step, if the objective becomes better by it."""
        if not len(choices.after_ms):
            return False
        best = int(np.argmin(choices.after_ms))
        if choices.after_ms[best] > self.objective() * (1 - least_gain):
            return False
        self._apply(choices.change(best))
        return True

    def _apply(self, change: Change) -> None:
        for item in change.leave:
            self._devices.take(item, self._at.leave(item))
        for item, device in change.enter:
            self._devices.put(item, device)
            self._at.enter(item, device)
        self._price_anew()

    def kick(self, rng: np.random.Generator) -> None:
        """Move three slices to random devices with room for them."""
        for item in rng.permutation(np.flatnonzero(self._at.homes != GONE))[:3].tolist():
            fitting = np.flatnonzero(self._at.admitted(np.array([item]))[0])
            if len(fitting):
                self._apply(Change((item,), ((item, int(rng.choice(fitting))),)))

    def halve(self, rank: int) -> bool:
        """Halve the costliest slice of the slowest device but so many, and put one half where that
        is slowest least; False if there is none, or no room.
        """
        slowest = self.slowest
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
        self._apply(Change((item,), ((stays, slowest), (goes, device))))
        return True

    def moves(self) -> Choices:
        """Give a slice of the slowest device away."""
        slowest = self.slowest
        items = np.flatnonzero(self._at.homes == slowest)
        if not len(items):
            return _NONE
        numbers = torch.from_numpy(items)
        left = _floats(self._devices.without(numbers, torch.full_like(numbers, slowest)))
        joined = _floats(self._devices.with_each(numbers)).swapaxes(0, 1)
        after = self._after(self._powers[slowest] + self._powers, left[:, None], joined)
        after[:, slowest] = np.inf
        after[~self._at.admitted(items)] = np.inf

        def change(number: int) -> Change:
            item, device = int(items[number // len(self._costs)]), number % len(self._costs)
            return Change((item,), ((item, device),))

        return Choices(after.ravel(), change)

    def swaps(self) -> Choices:
        """Swap a slice of the slowest device for one of another: the most promising pairs."""
        slowest = self.slowest
        mine = np.flatnonzero(self._at.homes == slowest)
        others = np.flatnonzero((self._at.homes != slowest) & (self._at.homes != GONE))
        if not len(mine) or not len(others):
            return _NONE
        out, into = self._promising(slowest, mine, others)
        if not len(out):
            return _NONE
        homes = self._at.homes[into]
        first, second = torch.from_numpy(out), torch.from_numpy(into)
        here, there = torch.full_like(first, slowest), torch.from_numpy(homes)
        after_here = _floats(self._devices.exchanged(first, here, second))
        after_there = _floats(self._devices.exchanged(second, there, first))
        after = self._after(self._powers[slowest] + self._powers[homes], after_here, after_there)

        def change(number: int) -> Change:
            gone, come, home = int(out[number]), int(into[number]), int(homes[number])
            return Change((gone, come), ((gone, home), (come, slowest)))

        return Choices(after, change)

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

    def splits(self) -> Choices:
        """Halve a slice of the slowest device and give one half away."""
        slowest = self.slowest
        wide = self._at.to_halve(np.flatnonzero(self._at.homes == slowest).tolist())
        if not wide or len(self._costs) == 1:
            return _NONE
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

        def change(number: int) -> Change:
            place, device = divmod(number, len(self._costs))
            return Change((wide[place],), ((first + place, slowest), (second + place, device)))

        return Choices(after.ravel(), change)

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

    @property
    def slowest(self) -> int:
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
