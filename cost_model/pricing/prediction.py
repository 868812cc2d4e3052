"""Predicts the step time of plans under uncertain costs: the expectation and an interval.

The residual of each shard, which remains if all is known of its tables, is integrated by
`StepPrice.expected_ms`; for the interval it is sampled.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from autoshard.cost_model.networks.inputs import sums_of_devices
from autoshard.cost_model.pricing.oracle import EstimatedCosts
from autoshard.cost_model.step.common_price import CommonPrice
from autoshard.cost_model.step.overhead import SplitCost, loads_of, splits_of
from autoshard.cost_model.uncertainty.residuals import ShardResidual
from autoshard.workload import Piece, Shard, ShardingPlan, ShardingTask
from autoshard.workload.arrays import Floats
from autoshard.workload.plans.step_price import StepPrice
from autoshard.workload.ways.option import tables_of_parts

Placed = Sequence[tuple[Piece, int]]  # pieces and their devices

SCENARIOS = 128
_OF_COMMON = 1  # seeds the error of what all devices bear
_LOW, _HIGH = 0.05, 0.95  # quantiles: the ends of a 90 % interval
_MIN_MS = 1e-12


@dataclass(frozen=True)
class StepPrediction:
    """Expected step time, and samples of it: one per scenario, with sampled residuals."""

    expected_ms: float
    drawn_ms: Floats

    @property
    def interval_ms(self) -> tuple[float, float]:
        """The 90 % interval of the step time."""
        low, high = np.quantile(self.drawn_ms, [_LOW, _HIGH])
        return float(low), float(high)

    def over(self, other: "StepPrediction") -> "Comparison":
        """Compares the step time with another plan's, of the same task and scenarios."""
        ratios = self.drawn_ms / other.drawn_ms
        low, high = np.quantile(ratios, [_LOW, _HIGH])
        better = float((ratios < 1).mean() + (ratios == 1).mean() / 2)
        return Comparison(self.expected_ms / other.expected_ms, float(low), float(high), better)


@dataclass(frozen=True)
class Comparison:
    """Ratio of expected step times of two plans, its 90 % interval, and P(first is faster)."""

    ratio: float
    low: float
    high: float
    probability: float


class StepPredictor:
    """Predicts step times of plans of one task, all in the same scenarios.

    Args:
        oracle: Cost oracle.
        task: Task of the plans.
        seed: Seed of the scenarios.
    """

    def __init__(self, oracle: EstimatedCosts, task: ShardingTask, seed: int = 0) -> None:
        self._oracle, self._task, self._seed = oracle, task, seed
        self._price = StepPrice.of_task(task)
        self._whole_ms = oracle.common_ms(task)
        self._split_cost = oracle.split_cost(task.columns_in_order, len(task.devices))
        self._scenarios = oracle.scenarios(task.tables, SCENARIOS, seed)
        overhead = oracle.model.counted_overhead
        self._overheads = () if overhead is None else (overhead, *overhead.members)

    def _alone(self, plan: ShardingPlan) -> "StepPredictor":
        """Returns the predictor of what each device holds alone by a plan, in the same scenarios:
        blocks of rows and cold rows are tables.
        """
        alone = copy(self)
        alone._task = plan.columns_task(self._task)
        parts = tables_of_parts(self._task, plan.all_options())
        alone._scenarios = self._scenarios.with_parts(parts)
        alone._price = StepPrice.of_plan(self._task, plan)
        # With all splits of this plan.
        alone._whole_ms = self._oracle.common_ms(self._task, plan)
        alone._split_cost = SplitCost()
        return alone

    def expected_ms(self, placed: Placed) -> float:
        """Returns the expected step time, which sharders minimise."""
        costs, rests = self._costs(placed, self._shards(placed))
        expected_ms = self._expected(costs, rests, self._columns(placed))
        return expected_ms + self._on_all_devices_ms(placed)

    def expected_of(self, plan: ShardingPlan) -> float:
        """Returns the expected step time of a plan, which may have copies and blocks of rows."""
        alone = self if plan.is_plain else self._alone(plan)
        return alone.expected_ms(plan.placed(self._task)) if plan.placements else alone._whole_ms

    def best_plan(self, found: Sequence[Placed]) -> ShardingPlan:
        """Returns the plan with the least expected step time.

        Column slices of a table that meet on a device are merged in a plan, which changes their
        cost.
        """
        plans = (ShardingPlan.of_pieces(self._task, placed) for placed in found)
        return min(plans, key=lambda plan: self.expected_ms(plan.placed(self._task)))

    def of(self, plan: ShardingPlan) -> StepPrediction:
        """Predicts a plan's step time: the expectation and one sample per scenario.

        Residuals are seeded by shard, so plans that share a shard share its residual.
        """
        alone = self if plan.is_plain else self._alone(plan)
        found = alone._of_shards(plan.placed(self._task), plan.shards(self._task))
        drawn_ms = found.drawn_ms + self._members_ms(plan)
        if plan.has_copies:
            normal = np.random.default_rng([self._seed, _OF_COMMON]).standard_normal(SCENARIOS)
            drawn_ms = drawn_ms + self._oracle.common(self._task).error_ms(plan, normal)
        return replace(found, drawn_ms=drawn_ms)

    def _of_shards(self, placed: Placed, shards: Sequence[Shard | None]) -> StepPrediction:
        if not placed:
            return StepPrediction(self._whole_ms, np.full(SCENARIOS, self._whole_ms))
        costs, rests = self._costs(placed, shards)
        normals = np.zeros((len(costs), 1, costs.shape[-1]))
        for device, shard in enumerate(shards):
            if shard is not None:
                rng = np.random.default_rng([self._seed, int(shard.digest[:15], 16)])
                normals[device] = rng.standard_normal(normals.shape[1:])
        spread, columns = rests[:, None, None], self._columns(placed)
        drawn = (costs * np.exp(spread * normals - spread**2 / 2)).swapaxes(0, 2)
        drawn = drawn + self._members_passes_ms(placed)
        common_ms = self._on_all_devices_ms(placed)
        drawn_ms = self._price.step_ms(drawn[:, 0], drawn[:, 1], columns) + common_ms
        return StepPrediction(self._expected(costs, rests, columns) + common_ms, drawn_ms)

    def _members_passes_ms(self, placed: Placed) -> Floats | float:
        """Returns what passes take more by members of the overhead of each device's kind,
        [scenarios, 2, devices].
        """
        kinds = self._oracle.of_kinds()
        overheads = {name: kind.model.counted_overhead for name, kind in kinds.items()}
        if not any(overhead is not None and overhead.members for overhead in overheads.values()):
            return 0.0
        named = self._task.hardware if len(kinds) > 1 else ()
        hardware = np.array(named or [next(iter(kinds))] * len(self._task.devices))
        held: list[list[Piece]] = [[] for _ in self._task.devices]
        for piece, home in placed:
            held[home].append(piece)
        loads = np.stack([loads_of(pieces, self._task.batch_size) for pieces in held])
        found = np.zeros((SCENARIOS, 2, len(held)))
        for name, overhead in overheads.items():
            if overhead is None or not overhead.members:
                continue
            on = hardware == name
            more = [each.rates - overhead.rates for each in overhead.members]
            found[..., on] = self._of_scenarios(
                [(loads[on] @ rates[:, 1:].T).T for rates in more], kinds[name]
            )
        return found

    def _members_ms(self, plan: ShardingPlan) -> Floats | float:
        """Returns what all devices bear, and exchanges take, more by members of the overhead,
        [scenarios].
        """
        if len(self._overheads) < 2:
            return 0.0
        common, columns = self._common_prices[0], np.array(plan.exchanged_columns(self._task))
        exchanges_ms = common.exchanges_ms(plan)
        if columns.any():
            price = StepPrice.of_plan(self._task, plan)
            exchanges_ms += float(price.exchange_stage(columns.astype(float)).max())
        usual, *members = (
            price.plan_ms(plan) + overhead.exchange_factor * exchanges_ms
            for overhead, price in zip(self._overheads, self._common_prices, strict=True)
        )
        return self._of_scenarios([member - usual for member in members], self._oracle)

    @cached_property
    def _common_prices(self) -> list[CommonPrice]:
        """Prices of what all devices have in common, by the overhead and by each of its members."""
        return [CommonPrice(overhead, self._task) for overhead in self._overheads]

    def _of_scenarios(self, members: Sequence[Floats | float], kind: EstimatedCosts) -> Floats:
        """Returns the member of each scenario: each is drawn beside every network of its kind."""
        networks = kind.model.compute.ensemble.members
        return np.stack(members)[np.arange(SCENARIOS) // networks % len(members)]

    def _shards(self, placed: Placed) -> Sequence[Shard | None]:
        """Returns the shards of devices; None where no table was measured, as all are alike."""
        if not self._oracle.residuals.tables:
            return [None] * len(self._task.devices)
        return ShardingPlan.of_pieces(self._task, placed).shards(self._task)

    def _costs(self, placed: Placed, shards: Sequence[Shard | None]) -> tuple[Floats, Floats]:
        """Returns costs [devices, 2, scenarios] and relative deviations of residuals [devices]."""
        amounts = self._scenarios.amounts([piece for piece, _ in placed])
        homes = np.array([home for _, home in placed], np.int64)
        sums = sums_of_devices(amounts, homes, len(self._task.devices))
        sums = sums + self._scenarios.of_devices(self._task.hardware)
        operators = self._scenarios.operators_ms(sums.float()).double()
        costs = np.moveaxis(operators.numpy(), -1, -2)
        residuals = self._oracle.residuals
        known = [
            ShardResidual() if shard is None else residuals.of_shard(shard) for shard in shards
        ]
        factors = np.array([residual.factor for residual in known])[:, None, None]
        uncertainty = np.array([residual.uncertainty for residual in known])[:, None, None]
        # Measuring a shard reduces the uncertainty of its tables and of the networks, too.
        means = np.maximum(costs.mean(2, keepdims=True), _MIN_MS)
        costs = means * factors * (costs / means) ** uncertainty
        rests = residuals.prior.rest_of(means.sum((1, 2))) * uncertainty[:, 0, 0]
        if self._scenarios.overhead is None:
            return costs, rests
        # What training takes beside operators is as good as known.
        both = torch.from_numpy(np.moveaxis(costs, -1, -2))
        passes = np.moveaxis(self._scenarios.in_training(both, sums).numpy(), -1, -2)
        factors = self._scenarios.overhead.factors.double().numpy()
        uncertain = (costs.mean(2) * factors).sum(1)
        return passes, rests * uncertain / np.maximum(passes.mean(2).sum(1), _MIN_MS)

    def _expected(self, costs_ms: Floats, rests: Floats, columns: Floats) -> float:
        """Returns the expected step time without what is the same on all devices.

        `rests` are relative deviations of residuals.
        """
        weights = np.square(costs_ms.mean((1, 2)))  # of small devices, little depends
        rest = float(np.sqrt(np.average(np.square(rests), weights=weights)))
        forward, backward = costs_ms.swapaxes(0, 1)
        return float(self._price.expected_ms(forward, backward, columns, rest))

    def _on_all_devices_ms(self, placed: Placed) -> float:
        return self._whole_ms + self._split_cost.ms(splits_of(placed))

    def _columns(self, placed: Placed) -> Floats:
        """Returns the output columns of each device, [devices]."""
        columns = np.zeros(len(self._task.devices))
        for piece, home in placed:
            columns[home] += piece.exchanged_columns
        return columns
