"""NeuroShard's search, by a cost model that knows a formula."""

from dataclasses import replace

import numpy as np
import pytest

from autoshard.cost_model import EstimatedCosts
from autoshard.sharders import FusedGreedySharder, NeuroShardSharder
from autoshard.sharders.heuristics.grid_greedy import GridGreedy
from autoshard.workload import (
    Device,
    EmbeddingTable,
    Link,
    Objective,
    PlanError,
    Rule,
    Shard,
    ShardingPlan,
    ShardingTask,
)
from autoshard.workload.packing.admission import RuleMasks
from autoshard.workload.plans.step_price import StepPrice, stages_of_phases, step_ms

SLOW = Link(2e7, 1e-4)
OBJECTIVES = (Objective(), Objective("operators", SLOW), Objective("compute"))  # fmt: skip
GIANT = EmbeddingTable("giant", 100_000, 256, 150.0, zipf_alpha=0.8)


def task_of(
    tables: tuple[EmbeddingTable, ...],
    devices: int = 4,
    objective: Objective = OBJECTIVES[1],
    memory: int = 2**40,
    rules: tuple[Rule, ...] = (),
) -> ShardingTask:
    uniform = Device.uniform(devices, memory)
    return ShardingTask(tables, uniform, 1024, rules=rules, objective=objective)


def cost_ms(oracle: EstimatedCosts, task: ShardingTask, plan: ShardingPlan) -> float:
    """By the task's objective, one device after the other."""
    phases = np.zeros((len(task.devices), 4))
    columns = np.zeros(len(task.devices))
    for device, shard in enumerate(plan.shards(task)):
        if shard is not None:
            prices = oracle.prices([shard])
            phases[device, :2] = float(prices.forward_ms), float(prices.backward_ms)
            columns[device] = shard.total_dim
    phases[:, 2:] = StepPrice.of_task(task).exchange_ms(columns)[:, None]
    return float(step_ms(stages_of_phases(task.objective, phases)))


def columns_of(task: ShardingTask, plan: ShardingPlan) -> list[int]:
    return [0 if shard is None else shard.total_dim for shard in plan.shards(task)]


def grid(oracle: EstimatedCosts, task: ShardingTask, *shares: float) -> ShardingPlan:
    (found,) = GridGreedy(oracle, task, shares).best([RuleMasks(task).units])
    plan = ShardingPlan.of_pieces(task, found.placed())
    assert found.cost_ms == pytest.approx(cost_ms(oracle, task, plan))
    return plan


def held_together(plan: ShardingPlan) -> list[list[tuple[str, int]]]:
    """What lies on each device, whichever it is: the last bit decides between two that are alike,
    and how many devices are priced at once decides the last bit.
    """
    devices: dict[int, list[tuple[str, int]]] = {}
    for placement in plan.placements:
        devices.setdefault(placement.device, []).append((placement.table, placement.width))
    return sorted(sorted(held) for held in devices.values())


def test_without_limits_the_greedy_is_that_of_device_and_table(
    oracle: EstimatedCosts, tables: tuple[EmbeddingTable, ...]
) -> None:
    apart = Rule("apart", tuple(table.name for table in tables[:3]))
    near = Rule("together", tuple(table.name for table in tables[3:6]))
    for rules in ((), (apart,), (apart, near, Rule("not_on", (tables[7].name,), (0, 1)))):
        loose = task_of(tables[:30], objective=Objective("compute"))
        room = int(sum(map(loose.table_bytes, loose.tables)) / 4 * 1.3)
        task = replace(loose, devices=Device.uniform(4, room), rules=rules)
        plan = FusedGreedySharder(oracle).shard(task)
        assert held_together(grid(oracle, task, np.inf)) == held_together(plan)


def test_limits_balance_columns_and_the_best_limit_counts(
    oracle: EstimatedCosts, tables: tuple[EmbeddingTable, ...]
) -> None:
    twice = EmbeddingTable("twice", 1000, 32, 4.0, features=2)
    task = task_of((twice, *tables[:40]))
    free, even = grid(oracle, task, np.inf), grid(oracle, task, 1.05)
    most = 1.05 * sum(columns_of(task, free)) / 4
    assert max(columns_of(task, even)) <= most < max(columns_of(task, free))
    assert cost_ms(oracle, task, even) < cost_ms(oracle, task, free)
    assert grid(oracle, task, np.inf, 1.05, 2.0) == even
    (infeasible,) = GridGreedy(oracle, task, (0.5,)).best([RuleMasks(task).units])
    assert infeasible.cost_ms == np.inf
    left = [t for t, home in zip(task.tables, infeasible.homes, strict=True) if home < 0]
    assert 0 < infeasible.lack == sum(float(task.table_bytes(table)) ** 2 for table in left)


def test_many_cuts_at_once_are_as_each_of_them(
    oracle: EstimatedCosts, many_tables: tuple[EmbeddingTable, ...]
) -> None:
    """Devices that hold the same in several placements are priced once."""
    task = task_of(many_tables[:20])
    whole = RuleMasks(task).units
    cuts = [[*whole[:n], *whole[n + 1 :], *whole[n].halves()] for n in range(0, 20, 3)]
    greedy = GridGreedy(oracle, task, (1.0, 1.1, 1.3, np.inf))
    for cut, found in zip(cuts, greedy.best(cuts), strict=True):
        (alone,) = greedy.best([cut])
        assert found.rank == pytest.approx(alone.rank)
        of_many, of_one = (ShardingPlan.of_pieces(task, each.placed()) for each in (found, alone))
        assert held_together(of_many) == held_together(of_one)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_it_is_never_worse_than_its_greedy(
    oracle: EstimatedCosts, many_tables: tuple[EmbeddingTable, ...], objective: Objective
) -> None:
    shares = (*np.linspace(1.0, 1.5, 11).tolist(), np.inf)
    for first in (0, 12):
        task = task_of(many_tables[first : first + 12], 3, objective)
        plan = NeuroShardSharder(oracle).shard(task)
        plan.check(task)
        mine = cost_ms(oracle, task, plan)
        assert mine <= cost_ms(oracle, task, grid(oracle, task, *shares)) * (1 + 1e-6)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_tables_that_hold_up_a_device_are_split(
    oracle: EstimatedCosts, tables: tuple[EmbeddingTable, ...], objective: Objective
) -> None:
    task = task_of((GIANT, *tables[:8]), objective=objective)
    plan = NeuroShardSharder(oracle).shard(task)
    plan.check(task)
    assert len({p.device for p in plan.placements if p.table == "giant"}) > 1
    whole = FusedGreedySharder(oracle).shard(task)
    assert cost_ms(oracle, task, plan) < 0.8 * cost_ms(oracle, task, whole)


def test_splits_are_within_the_rules(
    oracle: EstimatedCosts, tables: tuple[EmbeddingTable, ...]
) -> None:
    for rule, most in ((Rule("max_slices", ("giant",), (2,)), 2), (Rule("whole", ("giant",)), 1)):
        task = task_of((GIANT, *tables[:12]), rules=(rule,))
        plan = NeuroShardSharder(oracle).shard(task)
        plan.check(task)
        assert len([p for p in plan.placements if p.table == "giant"]) == most


def test_what_fits_on_no_device_whole_is_split_until_it_fits(
    oracle: EstimatedCosts, tables: tuple[EmbeddingTable, ...]
) -> None:
    loose = task_of((GIANT, *tables[:4]))
    task = task_of(loose.tables, memory=int(loose.table_bytes(GIANT) * 0.4))
    with pytest.raises(PlanError):
        FusedGreedySharder(oracle).shard(task)
    plan = NeuroShardSharder(oracle).shard(task)
    plan.check(task)
    assert len(Shard(tuple(s for s, _ in plan.placed(task) if s.table == GIANT))) >= 3
