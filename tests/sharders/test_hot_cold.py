"""Hot rows of tables on all devices: where that is faster, and only if their ids are known."""

from dataclasses import replace

import numpy as np
import pytest
from tasks import task_of

from autoshard.cost_model import EstimatedCosts, StepPredictor, load_model
from autoshard.sharders import (
    Policy,
    SharderContext,
    make_sharder,
    next_steps,
)
from autoshard.workload import EmbeddingTable, Objective, ShardingPlan, ShardingTask
from autoshard.workload.packing.table_options import OptionResources
from autoshard.workload.tables.row_access import RowAccess, block_rows, curve_ranks
from autoshard.workload.tasks.rules import Rule

STEP = Objective("step")
ROWS = 2_000_000


def sorted_by_use(alpha: float) -> RowAccess:
    """Statistics of a table whose ids are sorted by use, by a Zipf law."""
    popularity = np.arange(1, ROWS + 1) ** -alpha
    shares = popularity / popularity.sum()
    curve = np.cumsum(shares)[curve_ranks(ROWS) - 1]
    blocks = np.add.reduceat(shares, np.arange(0, ROWS, block_rows(ROWS)))
    return RowAccess(tuple(curve), tuple(blocks), 1.0, 10**8, 0.0)


HEAVY = EmbeddingTable("heavy", ROWS, 16, 200.0, zipf_alpha=0.9, access=sorted_by_use(0.9))
OTHERS = tuple(EmbeddingTable(f"other{n}", 50_000 + n, 32, 4.0) for n in range(12))


@pytest.fixture(scope="module")
def task() -> ShardingTask:
    """A table by rows, of which the first device would serve most lookups."""
    base = task_of((HEAVY, *OTHERS), 4, 0.1)
    return replace(base, objective=STEP, rules=(Rule("row_wise", ("heavy",)),))


def context_of(policy: Policy, **num_hot_ids: int) -> SharderContext:
    costs = EstimatedCosts(load_model("cpu").for_objective(STEP), 1024)
    return SharderContext(costs, policy, resources=OptionResources(num_hot_ids))


@pytest.mark.parametrize("name", ["policy", "autoshard", "cost_fused_search"])
def test_hot_rows_relieve_the_device_whose_block_is_used_most(
    name: str, policy: Policy, task: ShardingTask
) -> None:
    context = context_of(policy, heavy=ROWS // 20)
    plan = make_sharder(name, context).shard(task)
    plan.check(task)
    ((table, count),) = plan.hot_rows.items()
    assert table == "heavy"
    assert 1 <= count <= ROWS // 20
    assert plan.row_wise["heavy"] == 4
    without = make_sharder(name, context_of(policy)).shard(task)
    assert without.hot_rows == {}
    predictor = StepPredictor(context.costs, task)
    assert predictor.expected_of(plan) < 0.9 * predictor.expected_of(without)
    low, high = predictor.of(plan).interval_ms
    assert low < predictor.expected_of(plan) < high
    assert context.costs.plan_cost(plan, task).step_ms == pytest.approx(
        context.costs.step_ms(plan, task), rel=1e-4
    )
    for step in next_steps(context.costs, task, plan):
        step.plan.check(task)
        assert step.plan.hot_rows == plan.hot_rows


def test_small_tables_whose_cold_rows_cannot_be_in_even_blocks_are_planned(policy: Policy) -> None:
    """96 rows and 64 of them have 32 even blocks, but of 80 the last ones would have no rows."""
    tables = tuple(EmbeddingTable(f"t{n}", 96, 8, 50.0 + n, zipf_alpha=1.2) for n in range(40))
    task = replace(task_of(tables, 32, 0.1), objective=STEP)
    context = context_of(policy, **dict.fromkeys([table.name for table in tables], 32))
    make_sharder("cost_fused_search", context).shard(task).check(task)


def test_what_a_rule_forbids_or_does_not_pay_is_not_done(
    policy: Policy, task: ShardingTask
) -> None:
    context = context_of(policy, heavy=ROWS // 20, other1=100)
    forbidden = replace(task, rules=(*task.rules, Rule("not_copied", ("heavy",))))
    assert make_sharder("autoshard", context).shard(forbidden).hot_rows == {}
    alike = replace(task, tables=(replace(HEAVY, access=None, zipf_alpha=None), *OTHERS))
    assert make_sharder("autoshard", context).shard(alike).hot_rows == {}
    named = replace(task, tables=(*task.tables, replace(OTHERS[0], name="heavy_hot")))
    assert make_sharder("autoshard", context).shard(named).hot_rows == {}


def test_hot_rows_are_chosen_within_a_time_limit_too(policy: Policy, task: ShardingTask) -> None:
    context = replace(context_of(policy, heavy=ROWS // 20), seconds=0.5)
    assert make_sharder("autoshard", context).shard(task).hot_rows


@pytest.mark.parametrize("name", ["policy", "autoshard"])
def test_hashed_ids_even_out_blocks_without_copies(
    name: str, policy: Policy, task: ShardingTask
) -> None:
    context = context_of(policy)
    before = make_sharder(name, context).shard(task)
    plan = make_sharder(name, replace(context, resources=OptionResources(hash_ids=True))).shard(
        task
    )
    plan.check(task)
    assert plan.hot_rows["heavy"] == 0
    assert plan.copied == before.copied
    heaviest = [
        max(block.pooling_factor for block in p.blocks(task)[HEAVY.name]) for p in (before, plan)
    ]
    assert heaviest[1] == pytest.approx(HEAVY.pooling_factor / 4)
    assert heaviest[0] > 2 * heaviest[1]
    predictor = StepPredictor(context.costs, task)
    assert predictor.expected_of(plan) < 0.9 * predictor.expected_of(before)
    low, high = predictor.of(plan).interval_ms
    assert low < predictor.expected_of(plan) < high
    assert ShardingPlan.from_json(plan.to_json()) == plan
    for step in next_steps(context.costs, task, plan):
        step.plan.check(task)
        assert step.plan.hot_rows == plan.hot_rows
