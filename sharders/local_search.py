"""Local search over a cost model: moves and swaps of tables until none helps any more."""

import numpy as np
import numpy.typing as npt
import torch

from cost_model import EstimatedCosts, Prices
from sharders.cost_greedy import AloneGreedySharder, FusedGreedySharder
from workload import ShardingPlan, ShardingTask

Floats = npt.NDArray[np.float64]
Whole = npt.NDArray[np.int64]

_SHARPNESS = 12.0  # the norm of the devices' costs that is minimised: nearly their maximum
_LEAST_GAIN = 1e-5  # relative: smaller ones are not worth a step


class LocalSearchSharder:
    """Starts from the better greedy plan and improves it, table by table.

    A search finds the mistakes of its model. So costs are taken with `caution` deviations more,
    which keeps it away from what the model is unsure of; and it is kicked away from its first
    optimum only a few times.

    Args:
        oracle: prices devices.
        caution: deviations that are added to each device's cost.
        kicks: restarts from a random change of the best plan so far.
        seed: of those changes.
    """

    def __init__(
        self, oracle: EstimatedCosts, caution: float = 1.0, kicks: int = 8, seed: int = 0
    ) -> None:
        self._oracle = oracle
        self._caution = caution
        self._kicks = kicks
        self._seed = seed

    def shard(self, task: ShardingTask) -> ShardingPlan:
        """A valid plan; PlanError names the table that no device has room for."""
        starts = [s(self._oracle).shard(task) for s in (AloneGreedySharder, FusedGreedySharder)]
        number = {table.name: n for n, table in enumerate(task.tables)}
        searches = []
        for start in starts:
            chosen = np.zeros(len(task.tables), np.int64)
            for placement in start.placements:
                chosen[number[placement.table]] = placement.device
            searches.append(_Search(self._oracle, task, chosen, self._caution))
        best = min(searches, key=lambda search: search.objective())
        best.descend()
        rng = np.random.default_rng(self._seed)
        for _ in range(self._kicks):
            other = _Search(self._oracle, task, best.chosen.copy(), self._caution)
            other.kick(rng)
            other.descend()
            if other.objective() < best.objective():
                best = other
        return ShardingPlan.table_wise(task, best.chosen.tolist())


class _Search:
    """A table-wise plan that is being improved."""

    def __init__(
        self, oracle: EstimatedCosts, task: ShardingTask, chosen: Whole, caution: float
    ) -> None:
        slices = [table.whole() for table in task.tables]
        self._devices = oracle.devices(slices, len(task.devices))
        self._caution = caution
        self._bytes = np.array([task.table_bytes(table) for table in task.tables])
        self._free = np.array([device.memory_bytes for device in task.devices])
        self._items = torch.arange(len(task.tables))
        self.chosen = chosen
        for item, device in enumerate(chosen.tolist()):
            self._devices.put(item, device)
            self._free[device] -= self._bytes[item]
        self._costs = self._believed(self._devices.prices())

    def objective(self) -> float:
        """What is minimised."""
        return float((self._costs**_SHARPNESS).sum() ** (1 / _SHARPNESS))

    def descend(self) -> None:
        """Take the best move or, where none helps, the best swap with the slowest device."""
        for _ in range(20 * len(self.chosen)):
            if not (self._move() or self._swap()):
                return

    def kick(self, rng: np.random.Generator) -> None:
        """Move three tables to random devices with room for them."""
        for item in rng.choice(len(self.chosen), size=min(3, len(self.chosen)), replace=False):
            fitting = np.flatnonzero(self._free >= self._bytes[item])
            if len(fitting):
                self._place(int(item), int(rng.choice(fitting)))
        self._costs = self._believed(self._devices.prices())

    def _move(self) -> bool:
        count = len(self.chosen)
        here = torch.from_numpy(self.chosen)
        left = self._believed(self._devices.without(self._items, here))
        joined = self._believed(self._devices.with_each(self._items)).T
        powers = self._costs**_SHARPNESS
        total = powers.sum()
        change = left[:, None] ** _SHARPNESS - powers[self.chosen][:, None]
        change = change + joined**_SHARPNESS - powers[None]
        change[np.arange(count), self.chosen] = np.inf
        change[self._bytes[:, None] > self._free[None]] = np.inf
        item, device = np.unravel_index(np.argmin(change), change.shape)
        if change[item, device] > -_LEAST_GAIN * total:
            return False
        self._place(int(item), int(device))
        self._costs = self._believed(self._devices.prices())
        return True

    def _swap(self) -> bool:
        slowest = int(self._costs.argmax())
        mine = np.flatnonzero(self.chosen == slowest)
        others = np.flatnonzero(self.chosen != slowest)
        if not len(mine) or not len(others):
            return False
        out, into = (torch.from_numpy(grid) for grid in np.meshgrid(mine, others, indexing="ij"))
        here, there = torch.full_like(out, slowest), torch.from_numpy(self.chosen)[into]
        after_here = self._believed(self._devices.exchanged(out, here, into))
        after_there = self._believed(self._devices.exchanged(into, there, out))
        powers = self._costs**_SHARPNESS
        homes = self.chosen[others][None]
        change = after_here**_SHARPNESS + after_there**_SHARPNESS
        change = change - powers[slowest] - powers[homes]
        grown = self._bytes[others][None] - self._bytes[mine][:, None]
        change[(grown > self._free[slowest]) | (-grown > self._free[homes])] = np.inf
        first, second = np.unravel_index(np.argmin(change), change.shape)
        if change[first, second] > -_LEAST_GAIN * powers.sum():
            return False
        item, other = int(mine[first]), int(others[second])
        home = int(self.chosen[other])
        self._place(item, home)
        self._place(other, slowest)
        self._costs = self._believed(self._devices.prices())
        return True

    def _place(self, item: int, device: int) -> None:
        self._devices.take(item, int(self.chosen[item]))
        self._free[self.chosen[item]] += self._bytes[item]
        self._devices.put(item, device)
        self._free[device] -= self._bytes[item]
        self.chosen[item] = device

    def _believed(self, prices: Prices) -> Floats:
        return prices.cautious_ms(self._caution).double().numpy()
