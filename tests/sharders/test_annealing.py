"""Simulated annealing: valid plans, never worse than where it starts, by all of the objective."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from autoshard.cost_model import EstimatedCosts
from autoshard.sharders import AnnealingSharder, FusedGreedySharder, LocalSearchSharder
from autoshard.sharders.search.column_plan import ColumnPlan
from autoshard.sharders.search.proposing import Proposer
from autoshard.workload import (
    Device,
    EmbeddingTable,
    Link,
    Objective,
    PlanError,
    Rule,
    ShardingPlan,
    ShardingTask,
)

SLOW = Objective("operators", Link(2e8, 1e-5))
OBJECTIVES = (Objective(), Objective("compute"), SLOW)


def task_of(
    tables: tuple[EmbeddingTable, ...],
    devices: int = 4,
    objective: Objective = SLOW,
    rules: tuple[Rule, ...] = (),
    fill: float = 0.1,
) -> ShardingTask:
    loose = ShardingTask(tables, Device.uniform(devices, 2**40), 1024)
    room = int(sum(map(loose.table_bytes, tables)) / devices / fill) + 1
    return ShardingTask(
        tables, Device.uniform(devices, room), 1024, rules=rules, objective=objective
    )


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_what_it_goes_by_is_what_the_plan_costs(
    objective: Objective, oracle: EstimatedCosts, tables: tuple[EmbeddingTable, ...]
) -> None:
    """However often it was changed: sums, memory and columns are those of the plan."""
    task = task_of(tables[:12], objective=objective, fill=0.5)
    start = FusedGreedySharder(oracle).shard(task)
    plan = ColumnPlan(oracle, task, start.placed(task))
    assert plan.plan_ms() == pytest.approx(oracle.step_ms(start, task), rel=1e-5)
    rng = np.random.default_rng(0)
    proposer, kinds = Proposer(plan, rng), set()
    for _ in range(60):
        changes = proposer.draw(24, np.ones(4))
        after = plan.price(changes)
        admitted = np.flatnonzero(plan.admitted(changes, after))
        if len(admitted):
            plan.apply(changes, after, int(admitted[0]))
            kinds.add((changes.other[admitted[0]] >= 0, changes.keeps[admitted[0]] > 0))
        # What was priced first is what has come of it.
        made = ShardingPlan.of_pieces(task, plan.placed(plan.widths))
        made.check(task)
        assert plan.state.free[0].tolist() == (task.usable_bytes - made.device_bytes(task)).tolist()
        assert plan.plan_ms() == pytest.approx(oracle.step_ms(made, task), rel=1e-4)
    assert kinds == {(True, False), (False, True), (False, False)}


@pytest.mark.parametrize("fill", [0.1, 0.9])
def test_it_is_no_worse_than_what_it_starts_from_and_obeys(
    fill: float, oracle: EstimatedCosts, tables: tuple[EmbeddingTable, ...]
) -> None:
    names = tuple(table.name for table in tables[:24])
    rules = (
        Rule("together", names[:2]),
        Rule("apart", names[3:6]),
        Rule("not_on", names[6:8], (1,)),
        Rule("max_slices", names, (2,)),
        Rule("min_width", names, (8,)),
    )
    for some in ((), rules):
        task = task_of(tables[:24], rules=some, fill=fill)
        sharder = AnnealingSharder(oracle, 600.0, proposals=6_000, seed=1)
        plan = sharder.shard(task)
        plan.check(task)
        assert plan == sharder.shard(task)
        found = oracle.step_ms(plan, task)
        for other in (FusedGreedySharder(oracle), LocalSearchSharder(oracle)):
            try:
                theirs = other.shard(task)
            except PlanError:
                continue
            assert found <= oracle.step_ms(theirs, task) * (1 + 1e-6)


def test_few_tables_are_placed_as_trying_all_places_them(
    oracle: EstimatedCosts, tables: tuple[EmbeddingTable, ...]
) -> None:
    names = tuple(table.name for table in tables[:7])
    task = task_of(tables[:7], devices=2, rules=(Rule("whole", names),))
    plan = AnnealingSharder(oracle, 600.0, proposals=20_000).shard(task)
    least = min(
        oracle.step_ms(ShardingPlan.table_wise(task, homes), task)
        for homes in itertools.product(range(2), repeat=7)
    )
    assert oracle.step_ms(plan, task) == pytest.approx(least)


def test_all_to_alls_count_as_the_link_says(
    oracle: EstimatedCosts, tables: tuple[EmbeddingTable, ...]
) -> None:
    """Over a slow link columns are evened out, whatever that costs in compute."""

    def max_columns(link: Link | None) -> int:
        task = task_of(tables[:16], objective=Objective(link=link))
        plan = AnnealingSharder(oracle, 600.0, proposals=15_000).shard(task)
        return max(0 if shard is None else shard.total_dim for shard in plan.shards(task))

    equal = -(-sum(table.dim for table in tables[:16]) // 4)
    assert max_columns(Link(1e6)) <= 1.05 * equal < max_columns(None)


def test_where_no_greedy_finds_a_plan_a_packing_is_annealed(oracle: EstimatedCosts) -> None:
    giant = EmbeddingTable("giant", 100_000, 256, 20.0)
    some = (giant, *(EmbeddingTable(f"t{n}", 1000, 16, 4.0) for n in range(6)))
    task = task_of(some, fill=0.9)
    with pytest.raises(PlanError):
        FusedGreedySharder(oracle).shard(task)
    plan = AnnealingSharder(oracle, 600.0, proposals=2_000).shard(task)
    plan.check(task)
    with pytest.raises(PlanError, match="add devices or memory"):
        AnnealingSharder(oracle).shard(replace(task, devices=Device.uniform(4, 10_000)))


def test_time_ends_it(oracle: EstimatedCosts, tables: tuple[EmbeddingTable, ...]) -> None:
    ticks = itertools.count()
    sharder = AnnealingSharder(oracle, 30.0, clock=lambda: float(next(ticks)))
    task = task_of(tables[:12])
    sharder.shard(task).check(task)
    assert next(ticks) == 31  # when it began, and once before each batch of changes
    one = task_of(tables[:4], devices=1)
    sharder.shard(one).check(one)
    assert next(ticks) == 32  # where there is one device there is nothing to be tried
