"""Sharders that go by a cost model, on one that knows a formula."""

from dataclasses import replace

import pytest

from autoshard.cost_model import EstimatedCosts
from autoshard.sharders import (
    AloneGreedySharder,
    FusedGreedySharder,
    LocalSearchSharder,
    NeuroShardSharder,
    make_sharder,
)
from autoshard.workload import (
    Device,
    EmbeddingTable,
    Link,
    Objective,
    PlanError,
    Sharder,
    ShardingTask,
)

BY_COST = (AloneGreedySharder, FusedGreedySharder, LocalSearchSharder, NeuroShardSharder)


def task_of(tables: tuple[EmbeddingTable, ...], devices: int, memory: int = 2**40) -> ShardingTask:
    return ShardingTask(tables, Device.uniform(devices, memory), 1024)


@pytest.mark.parametrize("make", BY_COST)
def test_plans_are_valid_within_the_memory_there_is(
    make: type, oracle: EstimatedCosts, tables: tuple[EmbeddingTable, ...]
) -> None:
    sharder: Sharder = make(oracle)
    loose = task_of(tables[:30], 4)
    total = sum(loose.table_bytes(table) for table in loose.tables)
    tight = task_of(tables[:30], 4, int(total / 4 * 1.25))
    for task in (loose, tight, task_of(tables[:2], 4), task_of(tables[:5], 1)):
        plan = sharder.shard(task)
        plan.check(task)
        assert plan == sharder.shard(task)
    with pytest.raises(PlanError, match="add devices or memory"):
        sharder.shard(task_of(tables[:30], 2, 10_000))


def test_a_search_finds_better_plans_than_it_starts_from(
    oracle: EstimatedCosts, tables: tuple[EmbeddingTable, ...]
) -> None:
    task = task_of(tables[:40], 4)
    cost = {
        make.__name__: oracle.plan_cost(make(oracle).shard(task), task).step_ms for make in BY_COST
    }
    assert cost["LocalSearchSharder"] <= 1.01 * cost["FusedGreedySharder"]
    assert cost["LocalSearchSharder"] <= 1.01 * cost["AloneGreedySharder"]
    heuristic = oracle.plan_cost(make_sharder("size").shard(task), task).step_ms
    assert cost["AloneGreedySharder"] < heuristic


def test_a_table_too_costly_for_one_device_is_split(
    oracle: EstimatedCosts, tables: tuple[EmbeddingTable, ...]
) -> None:
    giant = EmbeddingTable("giant", 100_000, 256, 150.0, zipf_alpha=0.8)
    task = task_of((giant, *tables[:10]), 4)
    whole = LocalSearchSharder(oracle, split=False).shard(task)
    split = LocalSearchSharder(oracle).shard(task)
    split.check(task)
    pieces = [placement for placement in split.placements if placement.table == "giant"]
    assert len(pieces) > 1
    assert len({placement.device for placement in pieces}) == len(pieces)
    assert len([p for p in whole.placements if p.table == "giant"]) == 1
    costs = [oracle.plan_cost(plan, task).step_ms for plan in (split, whole)]
    assert costs[0] < 0.8 * costs[1]


@pytest.mark.parametrize("make", [AloneGreedySharder, FusedGreedySharder])
def test_a_greedy_balances_all_that_counts_of_a_step(
    make: type, oracle: EstimatedCosts, tables: tuple[EmbeddingTable, ...]
) -> None:
    task = task_of(tables[:40], 4)

    def max_columns(objective: Objective) -> int:
        asked = replace(task, objective=objective)
        shards = make(oracle).shard(asked).shards(asked)
        return max(shard.total_dim for shard in shards if shard is not None)

    slow = Link(1e6)  # all-to-alls are all that matters
    even = sum(table.dim for table in task.tables) / 4
    assert max_columns(Objective("operators", slow)) < 1.05 * even
    assert max_columns(Objective("compute", slow)) > 1.05 * even
    assert max_columns(Objective("operators")) == max_columns(Objective("compute"))
