"""Local search over a cost model: moves, swaps and splits of tables until none helps any more."""

import numpy as np
import numpy.typing as npt
import torch

from cost_model import EstimatedCosts, Prices
from sharders.cost_greedy import AloneGreedySharder, FusedGreedySharder
from workload import Placement, PlanError, Sharder, ShardingPlan, ShardingTask, TableSlice
from workload.tables import DIM_STEP

Floats = npt.NDArray[np.float64]
Whole = npt.NDArray[np.int64]

_SHARPNESS = 12.0  # the norm of the devices' costs that is minimised: nearly their maximum
_LEAST_GAIN = 1e-4  # relative, of the norm's power: smaller ones are not worth a step
_LEAST_SPLIT_GAIN = 0.01  # relative, of the norm: a split costs lookups on two devices
_GONE = -1  # the device of items that are on none: split, or only looked at


class LocalSearchSharder:
    """Starts from the better greedy plan and improves it, table by table.

    A search finds the mistakes of its model. So costs are taken with `caution` deviations more,
    which keeps it away from what the model is unsure of, and it is kicked away from its optimum
    only a few times.

    Args:
        oracle: prices devices.
        caution: deviations that are added to each device's cost.
        kicks: restarts from a random change of the best plan so far.
        split: allow tables to be split by columns.
        seed: of the kicks.
    """

    def __init__(
        self,
        oracle: EstimatedCosts,
        caution: float = 2.0,
        kicks: int = 8,
        split: bool = True,
        seed: int = 0,
    ) -> None:
        self._oracle = oracle
        self._caution = caution
        self._kicks = kicks
        self._split = split
        self._seed = seed

    def shard(self, task: ShardingTask) -> ShardingPlan:
        """A valid plan; PlanError names the table that no device has room for, as a whole."""
        starts: tuple[Sharder, ...] = (
            AloneGreedySharder(self._oracle),
            FusedGreedySharder(self._oracle),
        )
        searches, faults = [], []
        for start in starts:
            try:
                placed = _whole_tables(start.shard(task), task)
            except PlanError as fault:
                faults.append(fault)
            else:
                searches.append(_Search(self._oracle, task, self._caution, placed))
        if not searches:
            raise faults[0]
        best = min(searches, key=_Search.objective)
        best.descend(self._split)
        rng = np.random.default_rng(self._seed)
        for _ in range(self._kicks):
            other = _Search(self._oracle, task, self._caution, best.placed())
            other.kick(rng)
            other.descend(self._split)
            if other.objective() < best.objective():
                best = other
        return best.plan()


def _whole_tables(plan: ShardingPlan, task: ShardingTask) -> list[tuple[TableSlice, int]]:
    tables = {table.name: table for table in task.tables}
    return [(tables[p.table].whole(), p.device) for p in plan.placements]


class _Search:
    """A plan that is being improved. Only the width of a slice matters until it is written down."""

    def __init__(
        self,
        oracle: EstimatedCosts,
        task: ShardingTask,
        caution: float,
        placed: list[tuple[TableSlice, int]],
    ) -> None:
        self._oracle = oracle
        self._task = task
        self._caution = caution
        self._slices = [piece for piece, _ in placed]
        self._home = np.array([device for _, device in placed], np.int64)
        self._devices = oracle.devices(self._slices, len(task.devices))
        self._bytes = np.array([self._bytes_of(piece) for piece in self._slices], np.int64)
        self._free = np.array([device.memory_bytes for device in task.devices], np.int64)
        for item, device in enumerate(self._home.tolist()):
            self._devices.put(item, device)
            self._free[device] -= self._bytes[item]
        self._costs = self._believed(self._devices.prices())

    def objective(self) -> float:
        """What is minimised, in milliseconds: a norm of the devices' costs."""
        return float((self._costs**_SHARPNESS).sum() ** (1 / _SHARPNESS))

    def placed(self) -> list[tuple[TableSlice, int]]:
        """Each slice and its device."""
        return [
            (piece, int(device))
            for piece, device in zip(self._slices, self._home, strict=True)
            if device != _GONE
        ]

    def plan(self) -> ShardingPlan:
        """The plan: what a device holds of a table becomes one slice of it."""
        widths: dict[tuple[str, int], int] = {}
        for piece, device in self.placed():
            key = (piece.table.name, device)
            widths[key] = widths.get(key, 0) + piece.width
        starts = {table.name: 0 for table in self._task.tables}
        placements = []
        for (name, device), width in sorted(widths.items()):
            placements.append(Placement(name, starts[name], width, device))
            starts[name] += width
        return ShardingPlan(tuple(placements), len(self._task.devices))

    def descend(self, split: bool) -> None:
        """The best move as long as one helps; else the best swap, else the best split."""
        for _ in range(20 * len(self._home)):
            if not (self._move() or self._swap() or (split and self._divide())):
                return

    def kick(self, rng: np.random.Generator) -> None:
        """Move three slices to random devices with room for them."""
        for item in rng.permutation(np.flatnonzero(self._home != _GONE))[:3].tolist():
            fitting = np.flatnonzero(self._free >= self._bytes[item])
            if len(fitting):
                self._place(item, int(rng.choice(fitting)))
        self._costs = self._believed(self._devices.prices())

    def _move(self) -> bool:
        items = np.flatnonzero(self._home != _GONE)
        homes, numbers = self._home[items], torch.from_numpy(items)
        left = self._believed(self._devices.without(numbers, torch.from_numpy(homes)))
        joined = self._believed(self._devices.with_each(numbers)).T
        powers = self._costs**_SHARPNESS
        change = left[:, None] ** _SHARPNESS - powers[homes][:, None]
        change = change + joined**_SHARPNESS - powers[None]
        change[np.arange(len(items)), homes] = np.inf
        change[self._bytes[items][:, None] > self._free[None]] = np.inf
        place, device = np.unravel_index(np.argmin(change), change.shape)
        if change[place, device] > -_LEAST_GAIN * powers.sum():
            return False
        self._place(int(items[place]), int(device))
        self._costs = self._believed(self._devices.prices())
        return True

    def _swap(self) -> bool:
        slowest = int(self._costs.argmax())
        mine = np.flatnonzero(self._home == slowest)
        others = np.flatnonzero((self._home != slowest) & (self._home != _GONE))
        if not len(mine) or not len(others):
            return False
        out, into = (torch.from_numpy(grid) for grid in np.meshgrid(mine, others, indexing="ij"))
        here, there = torch.full_like(out, slowest), torch.from_numpy(self._home)[into]
        after_here = self._believed(self._devices.exchanged(out, here, into))
        after_there = self._believed(self._devices.exchanged(into, there, out))
        powers = self._costs**_SHARPNESS
        homes = self._home[others][None]
        change = after_here**_SHARPNESS + after_there**_SHARPNESS
        change = change - powers[slowest] - powers[homes]
        grown = self._bytes[others][None] - self._bytes[mine][:, None]
        change[(grown > self._free[slowest]) | (-grown > self._free[homes])] = np.inf
        first, second = np.unravel_index(np.argmin(change), change.shape)
        if change[first, second] > -_LEAST_GAIN * powers.sum():
            return False
        item, other = int(mine[first]), int(others[second])
        home = int(self._home[other])
        self._place(item, home)
        self._place(other, slowest)
        self._costs = self._believed(self._devices.prices())
        return True

    def _divide(self) -> bool:
        """Halve one slice of the slowest device and give one half away."""
        slowest = int(self._costs.argmax())
        wide = [
            item
            for item in np.flatnonzero(self._home == slowest).tolist()
            if self._slices[item].width % (2 * DIM_STEP) == 0
        ]
        if not wide or len(self._costs) == 1:
            return False
        halves = [_half(self._slices[item]) for item in wide]
        first = self._add(halves)
        numbers = torch.arange(first, first + len(halves))
        here = torch.full_like(numbers, slowest)
        kept = self._believed(self._devices.exchanged(torch.tensor(wide), here, numbers))
        joined = self._believed(self._devices.with_each(numbers)).T
        powers = self._costs**_SHARPNESS
        after = powers.sum() - powers[slowest] - powers[None]
        after = after + kept[:, None] ** _SHARPNESS + joined**_SHARPNESS
        after[:, slowest] = np.inf
        after[self._bytes[first:, None] > self._free[None]] = np.inf
        place, device = np.unravel_index(np.argmin(after), after.shape)
        if after[place, device] ** (1 / _SHARPNESS) > self.objective() * (1 - _LEAST_SPLIT_GAIN):
            return False
        self._leave(wide[place])
        self._enter(first + int(place), slowest)
        self._enter(self._add([halves[place]]), int(device))
        self._costs = self._believed(self._devices.prices())
        return True

    def _add(self, pieces: list[TableSlice]) -> int:
        """Make slices items that are on no device yet; returns the number of the first."""
        first = self._devices.extend(self._oracle.amounts(pieces))
        self._slices += pieces
        self._home = np.concatenate([self._home, np.full(len(pieces), _GONE)])
        sizes = np.array([self._bytes_of(piece) for piece in pieces], np.int64)
        self._bytes = np.concatenate([self._bytes, sizes])
        return first

    def _place(self, item: int, device: int) -> None:
        self._leave(item)
        self._enter(item, device)

    def _leave(self, item: int) -> None:
        device = int(self._home[item])
        self._devices.take(item, device)
        self._free[device] += self._bytes[item]
        self._home[item] = _GONE

    def _enter(self, item: int, device: int) -> None:
        self._devices.put(item, device)
        self._free[device] -= self._bytes[item]
        self._home[item] = device

    def _bytes_of(self, piece: TableSlice) -> int:
        return self._task.operator.stored_bytes(piece.table.rows, piece.width)

    def _believed(self, prices: Prices) -> Floats:
        return prices.cautious_ms(self._caution).double().numpy()


def _half(piece: TableSlice) -> TableSlice:
    return TableSlice(piece.table, piece.start, piece.width // 2)
