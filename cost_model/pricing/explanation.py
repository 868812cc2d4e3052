"""Explains step times: the slowest device of each phase, and what each table costs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from autoshard.cost_model.networks.inputs import sums_of_devices
from autoshard.cost_model.pricing.oracle import EstimatedCosts
from autoshard.cost_model.step.common_price import OWN_MS
from autoshard.workload import Piece, ShardingPlan, ShardingTask
from autoshard.workload.arrays import Floats
from autoshard.workload.plans.step_price import StepPrice
from autoshard.workload.tasks.objective import PHASES
from autoshard.workload.ways.option import option_of

ALL_PHASES = "all phases"


@dataclass(frozen=True)
class PieceCost:
    """Cost that a piece adds to its device, in ms and as share of the device's time.

    It is the device's time minus its time without the piece. Pieces share the start and interfere
    with each other, so shares need not add up to 1.
    """

    piece: Piece
    ms: float
    share: float


@dataclass(frozen=True)
class PhaseCost:
    """The slowest device in a phase, with its pieces by falling cost.

    `phase` is one of `PHASES`, or `ALL_PHASES`.
    """

    phase: str
    device: int
    ms: float
    mean_ms: float
    pieces: tuple[PieceCost, ...]

    @property
    def is_exchange(self) -> bool:
        """True for all-to-alls, whose time depends on columns alone."""
        return self.phase in PHASES[2:]


def slowest_by_phase(
    oracle: EstimatedCosts, plan: ShardingPlan, task: ShardingTask
) -> tuple[PhaseCost, ...]:
    """Returns the slowest device of all phases together, then of each phase that takes time.

    Costs are those of the oracle's tables without copies, which are alike on all devices.
    Residuals of whole measured shards are left out: they say nothing about the shard without one of
    its pieces.
    """
    oracle.check(task)
    plan.check_places(task)
    if not plan.placements:
        return ()
    devices = _Devices(oracle, plan.placed(task), plan.columns_task(task))
    columns = {ALL_PHASES: slice(None)}
    columns |= {name: slice(number, number + 1) for number, name in enumerate(PHASES)}
    found = []
    for name, counted in columns.items():
        devices_ms = devices.phases_ms[:, counted].sum(1)
        if not devices_ms.any():
            continue
        slowest = int(devices_ms.argmax())
        ms = float(devices_ms[slowest])
        pieces = [
            PieceCost(piece, float(phases_ms[counted].sum()), float(phases_ms[counted].sum()) / ms)
            for piece, phases_ms in devices.marginal_ms(slowest)
        ]
        pieces.sort(key=lambda piece: -piece.ms)
        found.append(PhaseCost(name, slowest, ms, float(devices_ms.mean()), tuple(pieces)))
    return tuple(found)


def table_costs_ms(
    oracle: EstimatedCosts, plan: ShardingPlan, task: ShardingTask
) -> dict[str, float]:
    """Returns what each table adds to a step of one device, in ms: that where it adds most.

    It is the device's time minus its time without the table, and what the table adds on all devices
    alike, as copies do. All-to-alls are those that count. As in `PieceCost`, the sum over tables
    need not be the step.
    """
    common, options = oracle.common(task), plan.all_options()
    most = dict.fromkeys((table.name for table in task.tables), 0.0)
    if placed := plan.placed(task):
        added_ms = _Devices(oracle, placed, plan.columns_task(task)).added_ms()
        column_ms = StepPrice.of_plan(task, plan).column_ms()
        owners = (each.table for each in plan.placements for _ in each.devices)
        for owner, (piece, _), ms in zip(owners, placed, added_ms.tolist(), strict=True):
            most[owner] = max(most[owner], ms + column_ms * piece.exchanged_columns)
    return {
        name: ms + float(common.loads(name, option_of(options, name))[OWN_MS])
        for name, ms in most.items()
    }


class _Devices:
    """Phase times of devices, and of devices without one of their pieces."""

    def __init__(
        self,
        oracle: EstimatedCosts,
        placed: Sequence[tuple[Piece, int]],
        task: ShardingTask,
    ) -> None:
        self._oracle = oracle
        self._objective, count = task.objective, len(task.devices)
        self._pieces = [piece for piece, _ in placed]
        self._homes = np.array([home for _, home in placed])
        self._amounts = oracle.amounts(self._pieces)
        self._sums = sums_of_devices(self._amounts, self._homes, count)
        self._sums += oracle.of_devices(task.hardware)
        columns = [piece.exchanged_columns for piece in self._pieces]
        self._dims = np.bincount(self._homes, columns, count).astype(float)
        exchanges = self._exchange(self._dims)
        self.phases_ms = np.concatenate([self._compute_ms(self._sums), exchanges], 1)

    def marginal_ms(self, device: int) -> Iterator[tuple[Piece, Floats]]:
        """Yields each piece of a device and what it adds to the device's phases, [phases]."""
        numbers = np.flatnonzero(self._homes == device)
        compute = self._compute_ms(self._sums[device] - self._amounts[numbers])
        for number, compute_ms in zip(numbers, compute, strict=True):
            piece, dims = self._pieces[number], self._dims.copy()
            dims[device] -= piece.exchanged_columns
            # Without columns, too, a device may wait for others.
            without = np.concatenate([compute_ms, self._exchange(dims)[device]])
            yield piece, self.phases_ms[device] - without

    def added_ms(self) -> Floats:
        """Returns what each piece adds to the passes of its device, [pieces]."""
        without = self._compute_ms(self._sums[self._homes] - self._amounts)
        return np.asarray((self.phases_ms[self._homes, :2] - without).sum(1))

    def _compute_ms(self, sums: Tensor) -> Floats:
        costs = self._oracle.expectation().price(sums.float())[..., 0, :]
        return np.asarray(costs.double().numpy())

    def _exchange(self, dims: Floats) -> Floats:
        """Returns all-to-all times of devices [devices, 2]; 0 where they are unknown."""
        found = self._oracle.exchange(dims.tolist(), self._objective)
        return np.repeat(np.array(found or [0.0] * len(dims))[:, None], 2, axis=1)
