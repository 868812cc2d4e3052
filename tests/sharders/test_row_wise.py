"""Tables in blocks of rows: where they are faster, where nothing else fits, and by constraints."""

from dataclasses import replace

import numpy as np
import pytest
from tasks import task_of

from autoshard.cost_model import EstimatedCosts, StepPredictor, load_model
from autoshard.cost_model.step.option_overheads import RowOverhead
from autoshard.sharders import IncrementalSharder, Policy, SharderContext, make_sharder
from autoshard.sharders.search.steps import next_steps
from autoshard.workload import (
    Device,
    EmbeddingTable,
    Link,
    Objective,
    Placement,
    PlanError,
    ShardingPlan,
    ShardingTask,
    load_tables,
)
from autoshard.workload.tables.row_access import CURVE_POINTS, RowAccess, block_rows
from autoshard.workload.tasks.rules import Rule

STEP = Objective("step")
CHOOSING = ("policy", "autoshard", "cost_fused_search")
HEAVY = EmbeddingTable("heavy", 2_000_000, 16, 200.0, zipf_alpha=0.6)
OTHERS = tuple(EmbeddingTable(f"other{n}", 50_000 + n, 32, 4.0) for n in range(12))


def context_of(policy: Policy, rows: RowOverhead | None = None) -> SharderContext:
    model = load_model("cpu")
    assert model.overhead is not None
    overhead = replace(model.overhead, copies=None, rows=rows or RowOverhead(0.5, 0.0))
    return SharderContext(
        EstimatedCosts(replace(model, overhead=overhead, overheads={}).for_objective(STEP), 1024),
        policy,
    )


def step_task(
    tables: tuple[EmbeddingTable, ...], devices: int = 4, fill: float = 0.1
) -> ShardingTask:
    return replace(task_of(tables, devices, fill), objective=STEP)


@pytest.mark.parametrize("name", CHOOSING)
def test_a_table_that_is_too_much_for_one_device_and_has_few_columns_is_by_rows(
    name: str, policy: Policy
) -> None:
    task, context = step_task((HEAVY, *OTHERS)), context_of(policy)
    plan = make_sharder(name, context).shard(task)
    plan.check(task)
    assert plan.row_wise == {"heavy": 4}
    forbidden = replace(task, rules=(Rule("not_row_wise", ("heavy",)),))
    by_columns = make_sharder(name, context).shard(forbidden)
    assert by_columns.row_wise == {}
    predictor = StepPredictor(context.costs, task)
    assert predictor.expected_of(plan) < 0.9 * predictor.expected_of(by_columns)


def test_rows_that_take_long_are_not_chosen(policy: Policy) -> None:
    task = step_task((HEAVY, *OTHERS))
    plan = make_sharder("autoshard", context_of(policy, RowOverhead(1e3, 0.0))).shard(task)
    assert plan.row_wise == {}


def test_no_table_is_by_rows_where_all_are_alike_or_outputs_take_long(policy: Policy) -> None:
    context = context_of(policy)
    alike = step_task(load_tables("synthetic:40:3:small"))
    assert make_sharder("autoshard", context).shard(alike).row_wise == {}
    wide = EmbeddingTable("wide", 100_000, 256, 4.0)
    slow = replace(step_task((wide, *OTHERS)), objective=Objective("step", Link(1e9)))
    plan = make_sharder("autoshard", context).shard(slow)
    assert plan.row_wise == {}


@pytest.mark.parametrize("objective", ["step", "operators"])
def test_a_giant_that_fits_on_no_device_in_slices_is_by_rows(
    objective: str, policy: Policy
) -> None:
    """In slices of four columns, a state for each row is as large as the slice."""
    giant = EmbeddingTable("giant", 3_000_000, 8, 3.0)
    base = task_of((giant, *OTHERS), 4)
    least = base.operator.stored_bytes(giant.rows, 4)
    task = replace(
        base,
        devices=Device.uniform(4, int(0.9 * least)),
        objective=Objective(objective),  # type: ignore[arg-type]
    )
    context = context_of(policy)
    if objective == "operators":
        context = SharderContext(EstimatedCosts(load_model("cpu"), 1024), policy)
    plan = make_sharder("autoshard", context).shard(task)
    plan.check(task)
    assert plan.row_wise["giant"] == 4
    alone = replace(task, rules=(Rule("not_row_wise", tuple(table.name for table in OTHERS)),))
    only = make_sharder("autoshard", context).shard(alone)
    assert only.row_wise == {"giant": 4}
    predictor = StepPredictor(context.costs, task)
    assert predictor.expected_of(plan) <= predictor.expected_of(only) * 1.001
    with pytest.raises(PlanError, match="giant"):
        make_sharder("size_lookup").shard(task)
    tiny = replace(task, devices=Device.uniform(4, least // 8))
    with pytest.raises(PlanError, match="memory are missing"):
        make_sharder("autoshard", context).shard(tiny)


def test_every_sharder_keeps_to_rules_about_rows(policy: Policy) -> None:
    tables = load_tables("synthetic:16:1:small")
    names = [table.name for table in tables]
    rules = (
        Rule("row_wise", tuple(names[:2])),
        Rule("not_row_wise", (names[2],)),
        Rule("together", (names[3], names[4])),
        Rule("on", (names[5],), (1,)),
        Rule("not_on", (names[6],), (0, 2)),
    )
    task = replace(step_task(tables, 3, 0.5), rules=rules)
    for name in ("random", "size_lookup", "cost", "cost_fused", "neuroshard", *CHOOSING):
        plan = make_sharder(name, context_of(policy)).shard(task)
        plan.check(task)
        required = {*names[:2]}
        assert required <= {*plan.row_wise}
        assert names[2] not in plan.row_wise
        assert name in CHOOSING or {*plan.row_wise} == required
    small = EmbeddingTable("small", 2, 16, 1.0)
    few = replace(step_task((small, *OTHERS), 3), rules=(Rule("row_wise", ("small",)),))
    with pytest.raises(PlanError, match=r"table small: 2 rows in 3 even blocks leave a device"):
        make_sharder("size_lookup").shard(few)
    both = (*rules, Rule("copied", (names[0],)))
    with pytest.raises(PlanError, match=r"cannot be kept together for table"):
        make_sharder("size_lookup").shard(replace(task, rules=both))


def test_rows_go_with_copies_that_have_to_be(policy: Policy) -> None:
    tiny = EmbeddingTable("tiny", 200, 16, 2.0)
    task = replace(step_task((tiny, HEAVY, *OTHERS)), rules=(Rule("copied", ("tiny",)),))
    model = load_model("cpu")
    assert model.overhead is not None
    known = replace(model, overhead=replace(model.overhead, rows=RowOverhead(0.5, 0.0)))
    costs = EstimatedCosts(replace(known, overheads={}).for_objective(STEP), 1024)
    plan = make_sharder("autoshard", SharderContext(costs, policy)).shard(task)
    plan.check(task)
    assert (plan.copied, plan.row_wise) == (("tiny",), {"heavy": 4})


def test_rows_of_a_node_stay_where_they_are(policy: Policy) -> None:
    costs = context_of(policy).costs
    task = step_task((HEAVY, *OTHERS))
    others = make_sharder("random", SharderContext(seed=1)).shard(replace(task, tables=OTHERS))
    node = Placement("heavy", 0, HEAVY.dim, 2, 2)
    plan = ShardingPlan((node, *others.placements), 4)
    plan.check(task)
    assert costs.step_ms(plan, task) == pytest.approx(costs.plan_cost(plan, task).step_ms)
    steps = next_steps(costs, task, plan)
    near = IncrementalSharder(costs, plan, 2**40).shard(task)
    assert steps
    for better in (near, *(step.plan for step in steps)):
        better.check(task)
        assert node in better.placements
    now_ms = StepPredictor(costs, task).expected_of(plan)
    assert all(step.expected_ms < now_ms for step in steps)
    halves = (replace(node, width=8), replace(node, start=8, width=8, device=0))
    grid = ShardingPlan((*halves, *others.placements), 4)
    grid.check(task)
    assert next_steps(costs, task, grid) == []
    assert IncrementalSharder(costs, grid, 2**40).shard(task) == grid


def test_a_table_that_must_not_be_split_is_by_rows_where_it_would_be_whole(policy: Policy) -> None:
    """In slices it would cost less, but `ways` forbids them."""
    wide = EmbeddingTable("wide", 1_000_000, 128, 60.0)
    context = context_of(policy)
    free, bound = step_task((wide, *OTHERS)), (Rule("min_width", ("wide",), (2**15,)),)
    assert make_sharder("autoshard", context).shard(replace(free, rules=bound)).row_wise


def test_a_block_that_is_used_more_costs_more_and_others_make_room(policy: Policy) -> None:
    blocks = np.zeros(-(-HEAVY.rows // block_rows(HEAVY.rows)))
    first = len(blocks) // 4
    blocks[:first], blocks[first:] = 0.55 / first, 0.45 / (len(blocks) - first)
    curve = tuple(np.linspace(0, 1, CURVE_POINTS))
    skewed = replace(HEAVY, access=RowAccess(curve, tuple(blocks), 1.0, 10**6, 1000.0))
    context = context_of(policy)
    even, uneven = (step_task((table, *OTHERS)) for table in (HEAVY, skewed))
    plan = make_sharder("autoshard", context).shard(
        replace(even, rules=(Rule("row_wise", ("heavy",)),))
    )
    assert context.costs.step_ms(plan, uneven) > 1.2 * context.costs.step_ms(plan, even)
    aware = make_sharder("autoshard", context).shard(
        replace(uneven, rules=(Rule("row_wise", ("heavy",)),))
    )
    assert context.costs.step_ms(aware, uneven) < 0.97 * context.costs.step_ms(plan, uneven)
    on_first = [p for p in aware.placements if p.device == 0 and p.table != "heavy"]
    assert len(on_first) < len(OTHERS) / 4


def test_improvements_leave_rows_where_they_are(policy: Policy) -> None:
    context = context_of(policy)
    rules = (Rule("row_wise", ("heavy",)),)
    task = replace(step_task((HEAVY, *OTHERS)), rules=rules)
    worse = make_sharder("random", SharderContext(seed=3)).shard(task)
    steps = next_steps(context.costs, task, worse)
    assert steps
    for step in steps:
        step.plan.check(task)
        assert step.plan.row_wise == {"heavy": 4}
        predictor = StepPredictor(context.costs, task)
        assert step.expected_ms == pytest.approx(predictor.expected_of(step.plan), rel=1e-3)
