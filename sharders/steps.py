"""What one more step would bring to a plan: a move, a swap or a split of what is slowest."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from autoshard.cost_model import EstimatedCosts, Prices, TaskOutlook
from autoshard.cost_model.outlook import expected_max, sharpness
from autoshard.cost_model.training import one_thread
from autoshard.workload import PlanError, ShardingPlan, ShardingTask, TableSlice
from autoshard.workload.tables import can_be_halved, halves

Floats = npt.NDArray[np.float64]
Whole = npt.NDArray[np.int64]
Kind = Literal["move", "swap", "split"]
Moved = tuple[tuple[TableSlice, int, int], ...]  # a slice, from where, and where to

_SWAPS = 4096  # that are priced: those that should even out most, if costs added up
_LOOKED_AT = 1000  # candidates that are made plans of, the most promising first
_LIKELY = 4  # times as many as are asked for are priced in scenarios
_LEAST_GAIN = 1e-3  # relative: smaller ones are not worth a step


@dataclass(frozen=True)
class Step:
    """One change of a plan, and what the slowest device is expected to compute after it.

    `moved`: slices, the device that each leaves, and the one it goes to.
    """

    kind: Kind
    moved: Moved
    plan: ShardingPlan
    expected_ms: float


@one_thread()
def next_steps(
    oracle: EstimatedCosts, task: ShardingTask, plan: ShardingPlan, count: int = 5
) -> list[Step]:
    """At most `count` valid plans that are one step from this one and better, the best first.

    One slice of the slowest device goes elsewhere, is swapped for another's, or is halved and one
    half goes: of each slice the best step of a kind. None where the plan is as good as such steps
    make it, by the cost model.
    """
    if len(task.devices) == 1:
        return []
    outlook = TaskOutlook(oracle, task)
    found: dict[tuple[Kind, TableSlice], Step] = {}
    for kind, moved in _candidates(oracle, task, plan):
        if (kind, moved[0][0]) in found:  # to elsewhere: the best place is enough
            continue
        after = _after(plan, task, kind, moved)
        try:
            after.check(task)
        except PlanError:  # of its memory, or of whatever else a plan must keep to
            continue
        found[kind, moved[0][0]] = Step(kind, moved, after, outlook.expected_ms(after.placed(task)))
        if len(found) == _LIKELY * count:
            break
    enough = outlook.expected_ms(plan.placed(task)) * (1 - _LEAST_GAIN)
    better = [step for step in found.values() if step.expected_ms < enough]
    return sorted(better, key=lambda step: step.expected_ms)[:count]


def _candidates(
    oracle: EstimatedCosts, task: ShardingTask, plan: ShardingPlan
) -> Iterator[tuple[Kind, Moved]]:
    """Steps that should help, by the mean of what is not known, the most promising first."""
    around = _Around(oracle, task, plan)
    each = [*around.moves(), *around.swaps(), *around.splits()]
    each.sort(key=lambda step: step[0])
    for _, kind, moved in each[:_LOOKED_AT]:
        yield kind, moved


def _after(plan: ShardingPlan, task: ShardingTask, kind: Kind, moved: Moved) -> ShardingPlan:
    """The plan with these slices on their new devices, the others where they are if that goes."""
    placed = set(plan.placed(task))
    for piece, source, _ in moved:
        if kind == "split":
            whole = next(p for p, home in placed if home == source and _holds(p, piece))
            placed -= {(whole, source)}
            placed.add((halves(whole)[0], source))
        placed -= {(piece, source)}
    for piece, _, target in moved:
        placed.add((piece, target))
    ordered = sorted(placed, key=lambda one: (one[0].table.name, one[0].start))
    homes = [(piece.table.name, device) for piece, device in ordered]
    if len(set(homes)) < len(homes):  # two slices of a table on a device become one
        return ShardingPlan.of_slices(task, ordered)
    return ShardingPlan.of_placed(ordered, plan.num_devices)


def _holds(whole: TableSlice, part: TableSlice) -> bool:
    return whole.table == part.table and 0 <= part.start - whole.start < whole.width


class _Around:
    """All steps around a plan. Each is told with a norm of the devices' costs after it."""

    def __init__(self, oracle: EstimatedCosts, task: ShardingTask, plan: ShardingPlan) -> None:
        placed = plan.placed(task)
        self._oracle = oracle
        self._task = task
        self._free = task.room_bytes - np.array(plan.device_bytes(task))
        self._pieces = [piece for piece, _ in placed]
        self._homes = np.array([home for _, home in placed])
        self._devices = oracle.devices(self._pieces, len(task.devices))
        self._devices.fill(torch.from_numpy(self._homes))
        self._costs = _ms(self._devices.prices())
        self._power = sharpness(oracle.factors.prior.rest)
        self._slowest = int(self._costs.argmax())
        self._mine = np.flatnonzero(self._homes == self._slowest)

    def moves(self) -> Iterator[tuple[float, Kind, Moved]]:
        """A slice of the slowest device goes elsewhere."""
        mine = torch.from_numpy(self._mine)
        left = _ms(self._devices.without(mine, torch.full_like(mine, self._slowest)))
        joined = _ms(self._devices.with_each(mine)).T
        for item, after, costs in zip(self._mine.tolist(), left, joined, strict=True):
            yield from self._given("move", self._pieces[item], after, costs)

    def splits(self) -> Iterator[tuple[float, Kind, Moved]]:
        """A slice of the slowest device is halved, and one half goes elsewhere."""
        wide = [item for item in self._mine.tolist() if can_be_halved(self._pieces[item])]
        if not wide:
            return
        pairs = [halves(self._pieces[item]) for item in wide]
        first = self._devices.extend(self._oracle.amounts([stays for stays, _ in pairs]))
        second = self._devices.extend(self._oracle.amounts([goes for _, goes in pairs]))
        staying = torch.arange(first, first + len(pairs))
        here = torch.full_like(staying, self._slowest)
        kept = _ms(self._devices.exchanged(torch.tensor(wide), here, staying))
        joined = _ms(self._devices.with_each(torch.arange(second, second + len(pairs)))).T
        for (_, goes), after, costs in zip(pairs, kept, joined, strict=True):
            yield from self._given("split", goes, after, costs)

    def swaps(self) -> Iterator[tuple[float, Kind, Moved]]:
        """A slice of the slowest device goes elsewhere for another."""
        others = np.flatnonzero(self._homes != self._slowest)
        if not len(self._mine) or not len(others):
            return
        out, into = self._promising(others)
        homes = self._homes[into]
        first, second, there = map(torch.from_numpy, (out, into, homes))
        here = torch.full_like(there, self._slowest)
        mine = _ms(self._devices.exchanged(first, here, second))
        theirs = _ms(self._devices.exchanged(second, there, first))
        for pair in zip(out.tolist(), into.tolist(), homes.tolist(), mine, theirs, strict=True):
            gone, come, home, *costs = pair
            moved = ((self._pieces[gone], self._slowest, home),
                     (self._pieces[come], home, self._slowest))  # fmt: skip
            yield self._norm({self._slowest: costs[0], home: costs[1]}), "swap", moved

    def _promising(self, others: Whole) -> tuple[Whole, Whole]:
        """Pairs that should even out most, if costs added up."""
        alone = self._oracle.model.compute.described(self._devices.amounts)[:, :2].sum(-1)
        weight = np.asarray(alone.double().numpy())
        gain = weight[self._mine][:, None] - weight[others][None]
        homes = self._homes[others]
        after = np.maximum(self._costs[self._slowest] - gain, self._costs[homes][None] + gain)
        sizes = np.array([self._task.piece_bytes(piece) for piece in self._pieces])
        grown = sizes[others][None] - sizes[self._mine][:, None]
        after[(grown > self._free[self._slowest]) | (-grown > self._free[homes][None])] = np.inf
        flat = after.ravel()
        count = min(_SWAPS, len(flat))
        chosen = np.sort(np.argpartition(flat, count - 1)[:count])
        chosen = chosen[flat[chosen] < np.inf]
        return self._mine[chosen // len(others)], others[chosen % len(others)]

    def _given(
        self, kind: Kind, piece: TableSlice, left_ms: float, joined_ms: Floats
    ) -> Iterator[tuple[float, Kind, Moved]]:
        """To each device with room, where the slowest is left with so much and they come to so."""
        size = self._task.piece_bytes(piece)
        for device, ms in enumerate(joined_ms):
            if device != self._slowest and size <= self._free[device]:
                moved = ((piece, self._slowest, device),)
                yield self._norm({self._slowest: left_ms, device: ms}), kind, moved

    def _norm(self, changed: dict[int, float]) -> float:
        costs = self._costs.copy()
        costs[list(changed)] = list(changed.values())
        return float(expected_max(costs[:, None], self._power))


def _ms(prices: Prices) -> Floats:
    total: Tensor = prices.total_ms
    return np.asarray(total.double().numpy())
