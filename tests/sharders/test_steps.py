"""What one more step would bring to a plan."""

from dataclasses import replace

import pytest
from test_by_cost import task_of

from autoshard.cost_model import EstimatedCosts, StepPredictor
from autoshard.sharders import make_sharder, next_steps
from autoshard.workload import Device, EmbeddingTable, ShardingPlan
from autoshard.workload.plans.moves import moves_between

Tables = tuple[EmbeddingTable, ...]


def test_steps_are_valid_plans_that_are_as_good_as_reported(
    oracle: EstimatedCosts, tables: Tables
) -> None:
    task = task_of(tables[:30], 4)
    plan = make_sharder("dim").shard(task)
    predictor = StepPredictor(oracle, task)
    now = predictor.expected_ms(plan.placed(task))
    steps = next_steps(oracle, task, plan, 20)
    assert {step.kind for step in steps} == {"move", "swap", "split"}
    assert [step.expected_ms for step in steps] == sorted(step.expected_ms for step in steps)
    assert len({(step.kind, step.moved[0][0]) for step in steps}) == len(steps)
    for step in steps:
        step.plan.check(task)
        assert predictor.expected_ms(step.plan.placed(task)) == pytest.approx(step.expected_ms)
        assert step.expected_ms < now
        moves = {(m.table, m.start, m.width, m.source, m.target)
                 for m in moves_between(plan, step.plan, task)}  # fmt: skip
        assert moves == {(p.table.name, p.start, p.width, s, t) for p, s, t in step.moved}
    assert steps[:3] == next_steps(oracle, task, plan, 20)[:3]
    assert len(next_steps(oracle, task, plan, 2)) == 2


def test_no_move_is_better_than_the_best_that_is_reported(
    oracle: EstimatedCosts, tables: Tables
) -> None:
    task = task_of(tables[:6], 3)
    plan = ShardingPlan.table_wise(task, [0, 0, 0, 0, 0, 1])
    predictor = StepPredictor(oracle, task)
    best = next_steps(oracle, task, plan)[0].expected_ms
    for number in range(6):
        for device in range(3):
            devices = [0, 0, 0, 0, 0, 1]
            devices[number] = device
            moved = ShardingPlan.table_wise(task, devices)
            assert best <= predictor.expected_ms(moved.placed(task)) * (1 + 1e-6)


def test_steps_lead_to_a_plan_without_any(oracle: EstimatedCosts, tables: Tables) -> None:
    task = task_of(tables[:8], 3)
    plan = ShardingPlan.table_wise(task, [0] * 8)
    taken = []
    while steps := next_steps(oracle, task, plan, 1):
        taken.append(steps[0].expected_ms)
        plan = steps[0].plan
        plan.check(task)
    assert len(taken) > 1
    assert taken == sorted(taken, reverse=True)
    alone = task_of(tables[:8], 1)
    assert next_steps(oracle, alone, ShardingPlan.table_wise(alone, [0] * 8)) == []


def test_steps_keep_to_the_memory_there_is(oracle: EstimatedCosts, tables: Tables) -> None:
    loose = task_of(tables[:30], 4)
    plan = make_sharder("dim").shard(loose)
    full = tuple(
        Device(f"d{n}", int(1.1 * size)) for n, size in enumerate(plan.device_bytes(loose))
    )
    exact = replace(loose, devices=full)
    steps = next_steps(oracle, exact, plan, 20)
    assert steps
    for step in steps:
        step.plan.check(exact)
    wished = next_steps(oracle, loose, plan, 20)
    assert any((step.plan.device_bytes(loose) > exact.usable_bytes).any() for step in wished)
