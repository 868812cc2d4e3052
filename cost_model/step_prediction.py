"""Predicts the step time of plans where costs are uncertain: the expectation, and an interval.

`StepPrice.expected_ms` integrates over what is left for each shard when all is known of its tables;
for the interval it is drawn.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autoshard.cost_model.inputs import sums_of_devices
from autoshard.cost_model.oracle import EstimatedCosts
from autoshard.cost_model.table_residuals import ShardResidual
from autoshard.workload import Piece, Shard, ShardingPlan, ShardingTask
from autoshard.workload.step_price import StepPrice

Floats = npt.NDArray[np.float64]
Placed = Sequence[tuple[Piece, int]]  # slices and their devices

SCENARIOS = 128  # that plans are told of, and chosen, by
_LOW, _HIGH = 0.05, 0.95  # of what is drawn: the ends of a 90 % interval
_MIN_MS = 1e-12


@dataclass(frozen=True)
class StepPrediction:
    """What a step takes: expected, and in each scenario with what is left drawn as well."""

    expected_ms: float
    drawn_ms: Floats

    @property
    def interval_ms(self) -> tuple[float, float]:
        """That it lies in with 90 %."""
        low, high = np.quantile(self.drawn_ms, [_LOW, _HIGH])
        return float(low), float(high)

    def over(self, other: "StepPrediction") -> "Comparison":
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


class StepPredictor:
    """Tells of plans of one task, all in the same scenarios.

    Args:
        oracle: prices them.
        task: what is planned.
        seed: of the scenarios.
    """

    def __init__(self, oracle: EstimatedCosts, task: ShardingTask, seed: int = 0) -> None:
        self._oracle, self._task, self._seed = oracle, task, seed
        self._price = StepPrice.of_task(task)
        self._scenarios = oracle.scenarios(task.tables, SCENARIOS, seed)

    def expected_ms(self, placed: Placed) -> float:
        """Of a step: what all that plans by a cost model has little of."""
        costs, rests = self._costs(placed, self._shards(placed))
        return self._expected(costs, rests, self._columns(placed))

    def best_plan(self, found: Sequence[Placed]) -> ShardingPlan:
        """Of the plans that these slices are, the one by which a step is expected to take least.

        Slices of a table that meet on a device are one in a plan, which changes what they cost.
        """
        plans = (ShardingPlan.of_pieces(self._task, placed) for placed in found)
        return min(plans, key=lambda plan: self.expected_ms(plan.placed(self._task)))

    def of(self, plan: ShardingPlan) -> StepPrediction:
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
        doubt, columns = rests[:, None, None], self._columns(placed)
        drawn = (costs * np.exp(doubt * left - doubt**2 / 2)).swapaxes(0, 2)
        stages = self._price.stages_ms(drawn[:, 0], drawn[:, 1], columns)
        drawn_ms = np.asarray(sum(stage.max(-1) for stage in stages))
        return StepPrediction(self._expected(costs, rests, columns), drawn_ms)

    def _shards(self, placed: Placed) -> Sequence[Shard | None]:
        """Of the devices, as far as it matters: where none was measured, all are alike."""
        if not self._oracle.residuals.tables:
            return [None] * len(self._task.devices)
        return ShardingPlan.of_pieces(self._task, placed).shards(self._task)

    def _costs(self, placed: Placed, shards: Sequence[Shard | None]) -> tuple[Floats, Floats]:
        """Milliseconds of each device forward and backward in each scenario [devices, 2,
        scenarios], and what is left of each, relative.
        """
        pieces, homes = zip(*placed, strict=True)
        amounts = self._scenarios.amounts(pieces)
        sums = sums_of_devices(amounts, np.array(homes), len(self._task.devices))
        costs = np.moveaxis(self._scenarios.price(sums.float()).double().numpy(), -1, -2)
        residuals = self._oracle.residuals
        known = [
            ShardResidual() if shard is None else residuals.of_shard(shard) for shard in shards
        ]
        times, doubt = (
            np.array([getattr(left, name) for left in known])[:, None, None]
            for name in ("factor", "uncertainty")
        )
        # Of a shard that was measured neither its tables nor the networks leave much in doubt.
        means = np.maximum(costs.mean(2, keepdims=True), _MIN_MS)
        costs = means * times * (costs / means) ** doubt
        return costs, residuals.prior.rest * doubt[:, 0, 0]

    def _expected(self, costs_ms: Floats, rests: Floats, columns: Floats) -> float:
        """Returns the expected time of a step; `rests` are relative deviations of devices."""
        rest = float(np.sqrt(np.mean(np.square(rests))))
        forward, backward = costs_ms.swapaxes(0, 1)
        return float(self._price.expected_ms(forward, backward, columns, rest))

    def _columns(self, placed: Placed) -> Floats:
        """Returns the output columns of each device: [devices]."""
        columns = np.zeros(len(self._task.devices))
        for piece, home in placed:
            columns[home] += piece.output_width
        return columns
