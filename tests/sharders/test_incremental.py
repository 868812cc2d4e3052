"""Plans near to one in use: better, and no more moves than were allowed."""

import pytest

from autoshard.cost_model import EstimatedCosts, StepPredictor
from autoshard.sharders import IncrementalSharder, SharderContext, make_sharder
from autoshard.workload import (
    Device,
    EmbeddingTable,
    Piece,
    PlanError,
    Rule,
    ShardingPlan,
    ShardingTask,
)
from autoshard.workload.plans.moves import moved_bytes, moves_between


def task_of(tables: tuple[EmbeddingTable, ...], *rules: Rule) -> ShardingTask:
    giant = EmbeddingTable("giant", 100_000, 256, 60.0, zipf_alpha=0.8)
    return ShardingTask((giant, *tables[:25]), Device.uniform(4, 2**40), 1024, rules=rules)


def test_the_more_may_move_the_better_the_plan(
    oracle: EstimatedCosts, tables: tuple[EmbeddingTable, ...]
) -> None:
    task = task_of(tables)
    old = make_sharder("size", SharderContext()).shard(task)
    predictor = StepPredictor(oracle, task)
    everything = sum(task.operator.stored_bytes(t.rows, t.dim) for t in task.tables)
    expected = []
    for budget in (0, int(0.55 * everything), everything):
        plan = IncrementalSharder(oracle, old, budget).shard(task)
        plan.check(task)
        assert moved_bytes(moves_between(old, plan, task)) <= budget
        expected.append(predictor.of(plan).expected_ms)
    assert IncrementalSharder(oracle, old, 0).shard(task) == old
    assert expected[2] <= expected[1] < 0.9 * expected[0]
    # Nearly all of what a plan from nothing gains.
    free = predictor.of(
        make_sharder("cost_fused_search", SharderContext(oracle)).shard(task)
    ).expected_ms
    assert expected[0] - expected[2] > 0.8 * (expected[0] - free)


def test_a_plan_with_pieces_keeps_the_columns_that_do_not_move(
    oracle: EstimatedCosts, tables: tuple[EmbeddingTable, ...]
) -> None:
    task = task_of(tables, Rule("on", (tables[0].name,), (2,)), Rule("whole", (tables[1].name,)))
    giant, others = task.tables[0].whole(), task.tables[1:]
    placed = [(Piece(giant.table, start, 128), start // 128) for start in (0, 128)]
    placed += [(table.whole(), 2 if n == 0 else n % 2) for n, table in enumerate(others)]
    old = ShardingPlan.of_placed(placed, 4)
    budget = giant.table.rows * 64 * 4
    plan = IncrementalSharder(oracle, old, budget).shard(task)
    plan.check(task)
    moves = moves_between(old, plan, task)
    assert 0 < moved_bytes(moves) <= budget


def test_a_plan_that_breaks_what_is_demanded_now_is_refused(
    oracle: EstimatedCosts, tables: tuple[EmbeddingTable, ...]
) -> None:
    old = make_sharder("size", SharderContext()).shard(task_of(tables))
    home = next(p.device for p in old.placements if p.table == "giant")
    task = task_of(tables, Rule("not_on", ("giant",), (home,)))
    with pytest.raises(PlanError, match="no plan for this task: the plan breaks the constraint"):
        IncrementalSharder(oracle, old, 10**12).shard(task)
