"""Copies of tables: where they are faster, where constraints say so, and where memory allows."""

from dataclasses import replace

import pytest
from tasks import task_of

from autoshard.cost_model import CostModel, EstimatedCosts, StepPredictor, load_model
from autoshard.cost_model.step.option_overheads import CopyOverhead
from autoshard.sharders import (
    FusedGreedySharder,
    Policy,
    SharderContext,
    make_sharder,
)
from autoshard.workload import (
    EmbeddingTable,
    Objective,
    PlanError,
    ShardingPlan,
    ShardingTask,
    load_tables,
)
from autoshard.workload.tasks.rules import Rule
from autoshard.workload.ways.option import DATA_PARALLEL, columns_task

STEP = Objective("step")
COPIES = CopyOverhead(0.5, 2.0, 0.05, 0.3, 2.0)
COPYING = ("policy", "autoshard", "cost_fused_search")
LARGE = EmbeddingTable("large", 2_000_000, 64, 20.0, zipf_alpha=1.0)
SMALL = tuple(EmbeddingTable(f"small{n}", 200 + n, 64, 120.0) for n in range(10))


def model_with(copies: CopyOverhead | None) -> CostModel:
    model = load_model("cpu")
    assert model.overhead is not None
    return replace(model, overhead=replace(model.overhead, copies=copies)).for_objective(STEP)


def context_of(copies: CopyOverhead | None, policy: Policy) -> SharderContext:
    return SharderContext(EstimatedCosts(model_with(copies), 1024), policy)


def step_task(
    tables: tuple[EmbeddingTable, ...], devices: int = 4, fill: float = 0.1
) -> ShardingTask:
    return replace(task_of(tables, devices, fill), objective=STEP)


@pytest.mark.parametrize("name", COPYING)
def test_small_tables_with_many_lookups_are_copied_and_large_ones_are_not(
    name: str, policy: Policy
) -> None:
    task, context = step_task((LARGE, *SMALL)), context_of(COPIES, policy)
    plan = make_sharder(name, context).shard(task)
    plan.check(task)
    assert len(plan.copied) >= 5
    assert LARGE.name not in plan.copied
    without = make_sharder(name, context_of(None, policy)).shard(task)
    assert without.copied == ()
    predictor = StepPredictor(context.costs, task)
    assert predictor.expected_of(plan) < predictor.expected_of(without)


def test_all_tables_may_be_copied(policy: Policy) -> None:
    task = step_task(SMALL)
    plan = make_sharder("autoshard", context_of(COPIES, policy)).shard(task)
    assert plan == ShardingPlan((), 4, {table.name: DATA_PARALLEL for table in SMALL})
    plan.check(task)


@pytest.mark.parametrize(
    "dear",
    [
        CopyOverhead(1e4, 5.0, 0.2, 1.0, 2.0),
        CopyOverhead(1.0, 5.0, 0.2, 1.0, 1e6),
    ],
)
def test_nothing_is_copied_where_that_is_slower(policy: Policy, dear: CopyOverhead) -> None:
    task = step_task((LARGE, *SMALL))
    context = context_of(dear, policy)
    plan = make_sharder("autoshard", context).shard(task)
    assert plan == make_sharder("autoshard", context_of(None, policy)).shard(task)


def test_one_device_needs_no_copies(policy: Policy) -> None:
    task = step_task(SMALL, devices=1)
    assert make_sharder("autoshard", context_of(COPIES, policy)).shard(task).copied == ()


def test_published_sharders_and_heuristics_do_not_copy_by_themselves(policy: Policy) -> None:
    task, context = step_task(SMALL), context_of(COPIES, policy)
    for name in ("size_lookup", "cost", "cost_fused", "neuroshard"):
        assert make_sharder(name, context).shard(task).copied == ()


def test_every_sharder_copies_what_it_has_to_and_nothing_that_it_must_not(policy: Policy) -> None:
    names = [table.name for table in SMALL]
    rules = (
        Rule("copied", (names[0], names[5])),
        Rule("not_copied", tuple(names[1:3])),
        Rule("on", (names[3],), (1,)),
        Rule("together", (names[4], names[6])),
    )
    task = replace(step_task((LARGE, *SMALL)), rules=rules)
    context = context_of(COPIES, policy)
    for name in ("size_lookup", "cost_fused", "neuroshard", *COPYING):
        plan = make_sharder(name, context).shard(task)
        plan.check(task)
        assert {names[0], names[5]} <= set(plan.copied)
        assert not {*names[1:3], names[3], names[4], names[6]} & set(plan.copied)


def test_memory_limits_copies(policy: Policy) -> None:
    """Copies of all tables would take four times the memory that there is."""
    tables = tuple(EmbeddingTable(f"t{n}", 60_000 + n, 32, 40.0) for n in range(8))
    cheap = CopyOverhead(0.1, 0.5, 0.02, 0.1, 0.0)
    loose, tight = step_task(tables, fill=0.02), step_task(tables, fill=0.6)
    context = context_of(cheap, policy)
    sharder = make_sharder("autoshard", context)
    assert len(sharder.shard(loose).copied) == len(tables)
    plan = sharder.shard(tight)
    plan.check(tight)
    assert len(plan.copied) < len(tables)


def test_too_little_memory_for_required_copies_is_one_line(policy: Policy) -> None:
    tables = (*SMALL, LARGE)
    task = replace(step_task(tables, fill=0.5), rules=(Rule("copied", (LARGE.name,)),))
    with pytest.raises(
        PlanError, match=r"copies of 1 tables, or of their hot rows, take .* on each device"
    ):
        make_sharder("autoshard", context_of(COPIES, policy)).shard(task)


def test_copies_are_chosen_by_the_steps_of_plans(policy: Policy) -> None:
    """The plan is not slower than that of the greedy with or without all copies that gain."""
    for seed in range(4):
        tables = load_tables(f"synthetic:20:{seed}:small")
        task = step_task(tables)
        oracle = context_of(COPIES, policy).costs
        greedy = FusedGreedySharder(oracle)
        plan = make_sharder("cost_fused_search", SharderContext(oracle)).shard(task)
        step_ms = oracle.step_ms(plan, task)
        assert step_ms <= oracle.step_ms(greedy.shard(task), task)
        if plan.copied:  # half of the copies are not better
            half = dict.fromkeys(plan.copied[::2], DATA_PARALLEL)
            fewer = ShardingPlan(greedy.shard(columns_task(task, half)).placements, 4, half)
            assert step_ms <= oracle.step_ms(fewer, task) * 1.02


def test_a_task_of_operators_gets_no_copies(policy: Policy) -> None:
    task = replace(step_task(SMALL), objective=Objective())
    model = replace(model_with(COPIES), in_training=False)
    context = SharderContext(EstimatedCosts(model, 1024), policy)
    assert make_sharder("autoshard", context).shard(task).copied == ()


def test_the_rest_is_a_task_with_its_rules_and_less_memory() -> None:
    task = replace(step_task(SMALL), rules=(Rule("whole", ("small0", "small1")),))
    rest = columns_task(task, {"small0": DATA_PARALLEL})
    assert [rule.tables for rule in rest.rules] == [("small1",)]
    assert columns_task(task, {}) is task
