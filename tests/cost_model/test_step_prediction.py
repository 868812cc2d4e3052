"""Plans where costs are not sure: scenarios, what a step is expected to take, and comparisons."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch

from autoshard.cost_model import EstimatedCosts, StepPrediction, StepPredictor
from autoshard.cost_model.pricing.prediction import SCENARIOS
from autoshard.workload import (
    Device,
    EmbeddingTable,
    Link,
    Objective,
    Piece,
    Shard,
    ShardingPlan,
    ShardingTask,
    synthetic_tables,
)
from autoshard.workload.plans.step_price import StepPrice, expected_slowest, norm_power

KNOWN = synthetic_tables(16, seed=11, profile="small")
OUTSIDE = tuple(
    EmbeddingTable(f"s{n}", 3_000_000 + 10**6 * n, 64, 20.0, zipf_alpha=0.1) for n in range(4)
)
TABLES = (*KNOWN, *OUTSIDE)
TASK = ShardingTask(TABLES, Device.uniform(4, 2**40), 1024)
# One out-of-distribution table each, and known ones in turn.
PLAN = ShardingPlan.table_wise(TASK, [*(n % 4 for n in range(16)), 0, 1, 2, 3])


pytestmark = pytest.mark.filterwarnings("ignore:.*outside of the cost model.s training data")


def costs_of(
    oracle: EstimatedCosts, shards: list[Shard], count: int = 64
) -> npt.NDArray[np.float32]:
    """Forward and backward together in each scenario: [shards, scenarios]."""
    return directions_of(oracle, shards, count).sum(-1)


def directions_of(
    oracle: EstimatedCosts, shards: list[Shard], count: int = 64
) -> npt.NDArray[np.float32]:
    """Forward and backward in each scenario: [shards, scenarios, 2]."""
    scenarios = oracle.scenarios(TABLES, count)
    sums = [scenarios.amounts(shard.pieces).sum(0) for shard in shards]
    return np.asarray(scenarios.price(torch.stack(sums)).numpy())


def test_the_mean_over_scenarios_is_the_estimate(oracle: EstimatedCosts) -> None:
    shards = [Shard.of_tables(TABLES[n : n + 5]) for n in range(0, 20, 5)]
    means = costs_of(oracle, shards, 256).mean(1)
    prices = oracle.prices(shards)
    # But for what fusion makes of more in one table and less in another.
    assert means == pytest.approx(prices.total_ms.numpy(), rel=0.08)
    each = directions_of(oracle, shards, 256).mean(1)
    assert each[:, 0] == pytest.approx(prices.forward_ms.numpy(), rel=0.08)
    assert each[:, 1] == pytest.approx(prices.backward_ms.numpy(), rel=0.08)
    (expected,) = oracle.expectation().price(
        torch.stack([oracle.amounts(shards[0].pieces).sum(0)])
    ).tolist()  # fmt: skip
    assert expected == [pytest.approx([float(prices.forward_ms[0]), float(prices.backward_ms[0])])]


def test_a_table_has_one_factor_for_all_of_its_slices(oracle: EstimatedCosts) -> None:
    table = OUTSIDE[0]
    left, right = Piece(table, 0, 32), Piece(table, 32, 32)
    halves = costs_of(oracle, [Shard((left,)), Shard((right,)), Shard.of_tables(KNOWN[:1])])
    assert halves[0] == pytest.approx(halves[1], rel=1e-6)
    assert np.corrcoef(halves[0], halves[2])[0, 1] < 0.99


def test_out_of_distribution_costs_vary_and_known_ones_hardly(oracle: EstimatedCosts) -> None:
    known, outside = costs_of(oracle, [Shard.of_tables(KNOWN[:4]), Shard.of_tables(OUTSIDE[:1])])
    assert known.std() / known.mean() < 0.15
    assert outside.std() / outside.mean() > 2 * known.std() / known.mean()


def test_shared_uncertainty_cancels_in_a_comparison(oracle: EstimatedCosts) -> None:
    """Two plans that differ in known tables alone: which is faster is surer than how fast."""
    places = [*(n % 4 for n in range(16)), 0, 1, 2, 3]
    crowded = ShardingPlan.table_wise(
        TASK, [3 if n < 8 else place for n, place in enumerate(places)]
    )
    predictor = StepPredictor(oracle, TASK)
    even, uneven = predictor.of(PLAN), predictor.of(crowded)
    low, high = even.interval_ms
    than = even.over(uneven)
    assert low < even.expected_ms < high
    assert than.ratio < 1
    assert than.probability > 0.9
    assert than.high - than.low < 0.5 * (high - low) / even.expected_ms


def test_a_plan_is_as_good_as_itself_whatever_its_devices_are_called(
    oracle: EstimatedCosts,
) -> None:
    turned = ShardingPlan.table_wise(TASK, [(n + 1) % 4 for n in range(16)] + [1, 2, 3, 0])
    predictor = StepPredictor(oracle, TASK)
    than = predictor.of(PLAN).over(predictor.of(turned))
    assert (than.ratio, than.low, than.high) == pytest.approx((1, 1, 1))
    assert than.probability == pytest.approx(0.5)
    assert StepPredictor(oracle, TASK).of(PLAN).expected_ms == predictor.of(PLAN).expected_ms


def test_the_norm_is_the_expected_maximum() -> None:
    """As drawing what is left, by the law of the largest of many, would find."""
    costs = np.array([[10.0], [9.5], [9.9], [4.0]])
    for rest in (0.02, 0.05, 0.1):
        power = norm_power(rest)
        rng = np.random.default_rng(0)
        left = np.exp(rng.gumbel(0, 1 / power, (4, 200_000)))
        drawn = (costs * left / left.mean()).max(0).mean()
        assert expected_slowest(costs, power) == pytest.approx(drawn, rel=2e-3)
        assert left.std() / left.mean() == pytest.approx(rest, rel=0.2)


def test_devices_that_hold_nothing_cost_nothing(oracle: EstimatedCosts) -> None:
    alone = ShardingPlan.table_wise(TASK, [0] * 20)
    predictor = StepPredictor(oracle, TASK).of(alone)
    (cost,) = oracle.prices([Shard.of_tables(TABLES)]).total_ms.tolist()
    assert predictor.expected_ms == pytest.approx(cost, rel=0.1)


def test_waits_add_up_and_the_all_to_alls_come_on_top(oracle: EstimatedCosts) -> None:
    def predicted(objective: Objective) -> StepPrediction:
        return StepPredictor(oracle, replace(TASK, objective=objective)).of(PLAN)

    link = Link(1e9, 1e-4)
    together, apart = predicted(Objective("compute")), predicted(Objective("operators"))
    shards = [shard for shard in PLAN.shards(TASK) if shard is not None]
    costs = directions_of(oracle, shards, SCENARIOS).astype(float)
    power = norm_power(oracle.residuals.prior.rest)
    waits = [float(expected_slowest(costs[..., direction], power)) for direction in (0, 1)]
    assert apart.expected_ms == pytest.approx(sum(waits))
    assert together.expected_ms == pytest.approx(float(expected_slowest(costs.sum(-1), power)))
    assert (apart.drawn_ms >= together.drawn_ms * (1 - 1e-9)).all()
    columns = np.array([s.total_dim if s else 0 for s in PLAN.shards(TASK)], float)
    price = StepPrice.of(Objective("operators", link), 1024, len(columns), columns.sum())
    exchanges = price.exchange_stage(columns).max()
    for name, without in (("pipelined", apart), ("operators", apart)):
        found = predicted(Objective(name, link))  # type: ignore[arg-type]
        assert found.expected_ms == pytest.approx(without.expected_ms + exchanges)
        assert found.drawn_ms == pytest.approx(without.drawn_ms + exchanges)
    assert predicted(Objective("compute", link)).expected_ms == together.expected_ms
