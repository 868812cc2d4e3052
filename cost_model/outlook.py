"""What a plan is worth where costs are not sure: how long a step is expected to take, and how sure
that is.

A step takes what its waits take, each as long as its slowest device, by the task's objective. What
is left for each shard, when all is known of its tables, need not be drawn to find the
expectation. With deviations distributed as the largest of many (Frechet's law, for a few percent
near the normal one) the expected maximum over devices is exactly a norm of their costs; waits add
up, and all-to-alls are the same in all scenarios.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from autoshard.cost_model.device_sums import DeviceSums
from autoshard.cost_model.device_waits import Waits
from autoshard.cost_model.oracle import EstimatedCosts
from autoshard.cost_model.table_factors import Left
from autoshard.workload import Shard, ShardingPlan, ShardingTask, TableSlice

Floats = npt.NDArray[np.float64]
Placed = Sequence[tuple[TableSlice, int]]  # slices and their devices

SCENARIOS = 128  # that plans are told of, and chosen, by
_LOW, _HIGH = 0.05, 0.95  # of what is drawn: the ends of a 90 % interval
_LEAST_REST = 0.01  # a norm of a higher power than that is a maximum
_LEAST_MS = 1e-12


def sharpness(rest: float) -> float:
    """The power of the norm that is the expected maximum, where each device's cost has this
    relative deviation.
    """
    return math.pi / (math.sqrt(6) * max(rest, _LEAST_REST))


def expected_max(costs_ms: Floats, power: float) -> Floats:
    """What a wait takes [...]: the expected maximum of costs [..., devices, scenarios]."""
    most = np.maximum(costs_ms.max(-2, keepdims=True), 1e-12)
    norms = most[..., 0, :] * np.power(costs_ms / most, power).sum(-2) ** (1 / power)
    return np.asarray(norms.mean(-1))


@dataclass(frozen=True)
class Outlook:
    """What a step takes: expected, and in each scenario with what is left drawn as well."""

    expected_ms: float
    drawn_ms: Floats

    @property
    def interval_ms(self) -> tuple[float, float]:
        """That it lies in with 90 %."""
        low, high = np.quantile(self.drawn_ms, [_LOW, _HIGH])
        return float(low), float(high)

    def over(self, other: "Outlook") -> "Comparison":
        """This plan's step over the other's, of the same task and scenarios."""
        ratios = self.drawn_ms / other.drawn_ms
        low, high = np.quantile(ratios, [_LOW, _HIGH])
        better = float((ratios < 1).mean() + (ratios == 1).mean() / 2)
        return Comparison(self.expected_ms / other.expected_ms, float(low), float(high), better)


@dataclass(frozen=True)
class Comparison:
    """Of two plans: the ratio of what steps are expected to take, its 90 % interval, and the
    probability that the first is faster.
    """

    ratio: float
    low: float
    high: float
    probability: float


class TaskOutlook:
    """Tells of plans of one task, all in the same scenarios.

    Args:
        oracle: prices them.
        task: what is planned.
        seed: of the scenarios.
    """

    def __init__(self, oracle: EstimatedCosts, task: ShardingTask, seed: int = 0) -> None:
        self._oracle, self._task, self._seed = oracle, task, seed
        self._waits = Waits(task)
        self._scenarios = oracle.scenarios(task.tables, SCENARIOS, seed)

    def expected_ms(self, placed: Placed) -> float:
        """Of a step: what all that plans by a cost model has little of."""
        costs, rests = self._costs(placed, self._shards(placed))
        return self._expected(costs, rests, placed)

    def best_plan(self, found: Sequence[Placed]) -> ShardingPlan:
        """Of the plans that these slices are, the one by which a step is expected to take least.

        Slices of a table that meet on a device are one in a plan, which changes what they cost.
        """
        plans = (ShardingPlan.of_slices(self._task, placed) for placed in found)
        return min(plans, key=lambda plan: self.expected_ms(plan.placed(self._task)))

    def of(self, plan: ShardingPlan) -> Outlook:
        """All that is told of a plan.

        What is left is drawn by the shard: one that stands in two plans is the same in both.
        """
        shards, placed = plan.shards(self._task), plan.placed(self._task)
        costs, rests = self._costs(placed, shards)
        left = np.zeros((len(costs), 1, costs.shape[-1]))
        for device, shard in enumerate(shards):
            if shard is not None:
                rng = np.random.default_rng([self._seed, int(shard.digest[:15], 16)])
                left[device] = rng.standard_normal(left.shape[1:])
        doubt = rests[:, None, None]
        drawn = (costs * np.exp(doubt * left - doubt**2 / 2)).max(0).sum(0)
        return Outlook(self._expected(costs, rests, placed), drawn + self._exchange_ms(placed))

    def _shards(self, placed: Placed) -> Sequence[Shard | None]:
        """Of the devices, as far as it matters: where none was measured, all are alike."""
        if not self._oracle.factors.tables:
            return [None] * len(self._task.devices)
        return ShardingPlan.of_slices(self._task, placed).shards(self._task)

    def _costs(self, placed: Placed, shards: Sequence[Shard | None]) -> tuple[Floats, Floats]:
        """Milliseconds of each device before each wait of the computation in each scenario
        [devices, waits, scenarios], and what is left of each, relative.
        """
        pieces, homes = zip(*placed, strict=True)
        amounts = self._scenarios.amounts(pieces)
        devices = DeviceSums(self._scenarios, amounts, len(self._task.devices))
        devices.fill(torch.tensor(homes))
        costs = self._waits.computing(devices.prices())
        factors = self._oracle.factors
        known = [Left() if shard is None else factors.left(shard) for shard in shards]
        times, doubt = (
            np.array([getattr(left, name) for left in known])[:, None, None]
            for name in ("times", "doubt")
        )
        # Of a shard that was measured neither its tables nor the networks leave much in doubt.
        means = np.maximum(costs.mean(2, keepdims=True), _LEAST_MS)
        costs = means * times * (costs / means) ** doubt
        return costs, factors.prior.rest * doubt[:, 0, 0]

    def _expected(self, costs_ms: Floats, rests: Floats, placed: Placed) -> float:
        """Of a step, where devices' costs are left with such deviations."""
        rest = float(np.sqrt(np.mean(np.square(rests))))
        waits = expected_max(costs_ms.swapaxes(0, 1), sharpness(rest))
        return float(waits.sum()) + self._exchange_ms(placed)

    def _exchange_ms(self, placed: Placed) -> float:
        """All all-to-alls that count."""
        columns = np.zeros(len(self._task.devices))
        for piece, home in placed:
            columns[home] += piece.output_width
        return self._waits.exchange_ms(columns)
