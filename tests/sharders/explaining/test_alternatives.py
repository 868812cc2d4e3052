"""What a step would take with tables whole, and with other resources."""

from dataclasses import replace

import pytest
from tasks import task_of

from autoshard.cost_model import EstimatedCosts, StepPredictor, load_model
from autoshard.cost_model.pricing.explanation import table_costs_ms
from autoshard.sharders import Policy, SharderContext, make_sharder
from autoshard.sharders.explaining.alternatives import (
    alternatives,
    in_parts,
    replanner,
    with_whole,
    without_options,
)
from autoshard.workload import (
    Device,
    EmbeddingTable,
    Link,
    Network,
    Objective,
    ShardingPlan,
    ShardingTask,
)
from autoshard.workload.plans.placements import Placement
from autoshard.workload.tasks.rules import Rule
from autoshard.workload.ways.option import DATA_PARALLEL

LINK = Link(1e9, 5e-5)
STEP = Objective("step", LINK)
TABLES = (
    EmbeddingTable("rows", 200_000, 64, 80.0),
    EmbeddingTable("slices", 100_000, 128, 20.0),
    EmbeddingTable("copy", 500, 16, 5.0),
    *(EmbeddingTable(f"t{n}", 20_000, 64, 10.0) for n in range(6)),
)


@pytest.fixture(scope="module")
def task() -> ShardingTask:
    return replace(task_of(TABLES, 4), objective=STEP)


@pytest.fixture(scope="module")
def costs(task: ShardingTask) -> EstimatedCosts:
    return EstimatedCosts(load_model("cpu").for_objective(STEP, 4), task.batch_size)


@pytest.fixture(scope="module")
def plan() -> ShardingPlan:
    slices = [Placement("slices", 0, 64, 1), Placement("slices", 64, 64, 2)]
    rest = [Placement(f"t{n}", 0, 64, n % 4) for n in range(6)]
    placed = (Placement("rows", 0, 64, 0, 4), *slices, *rest)
    return ShardingPlan(placed, 4, {"copy": DATA_PARALLEL})


def test_a_table_is_whole_where_that_is_cheapest(
    task: ShardingTask, costs: EstimatedCosts, plan: ShardingPlan
) -> None:
    assert sorted(in_parts(plan)) == ["copy", "rows", "slices"]
    ms = table_costs_ms(costs, plan, task)
    found = without_options(costs, task, plan, ms, 20)
    assert [each.expected_ms for each in found] == sorted(
        (each.expected_ms for each in found), reverse=True
    )
    predictor = StepPredictor(costs, task)
    assert {each.table for each in found} == set(in_parts(plan))
    for each in found:
        steps = [
            predictor.expected_of(with_whole(plan, task, each.table, home)) for home in range(4)
        ]
        assert each.expected_ms == pytest.approx(steps[each.device])
        assert each.expected_ms <= 1.005 * min(steps)  # chosen by mean costs
    assert found[0].table == "rows"
    (one,) = without_options(costs, task, plan, ms, 1)
    assert one == found[0]


def test_tables_that_cannot_be_whole_are_left_out(
    task: ShardingTask, costs: EstimatedCosts, plan: ShardingPlan
) -> None:
    ms = table_costs_ms(costs, plan, task)
    exact = tuple(Device(f"d{n}", size + 2**20) for n, size in enumerate(plan.device_bytes(task)))
    tight = replace(task, devices=exact)
    plan.check(tight)
    assert {each.table for each in without_options(costs, tight, plan, ms, 20)} == {"copy"}
    ruled = replace(task, rules=(Rule("row_wise", ("rows",)), Rule("copied", ("copy",))))
    assert {each.table for each in without_options(costs, ruled, plan, ms, 20)} == {"slices"}


def test_what_tables_cost_is_what_their_devices_would_save(
    task: ShardingTask, costs: EstimatedCosts, plan: ShardingPlan
) -> None:
    ms = table_costs_ms(costs, plan, task)
    assert all(cost > 0 for cost in ms.values())
    # Blocks of rows and slices share the work.
    whole = table_costs_ms(costs, with_whole(plan, task, "rows", 3), task)
    assert whole["rows"] > 2 * ms["rows"]
    alone = replace(task, tables=TABLES[-1:], devices=task.devices[:1], objective=Objective("step"))
    oracle = EstimatedCosts(load_model("cpu").for_objective(alone.objective), alone.batch_size)
    single = ShardingPlan((Placement("t5", 0, 64, 0),), 1)
    cost = oracle.plan_cost(single, alone)
    assert table_costs_ms(oracle, single, alone)["t5"] > cost.devices[0].compute_ms * 0.99


def test_other_resources_are_planned_for(
    task: ShardingTask, costs: EstimatedCosts, plan: ShardingPlan, policy: Policy
) -> None:
    context = SharderContext(costs, policy)
    now = StepPredictor(costs, task).of(plan).expected_ms
    again, memory, link, device = alternatives(task, plan, context)
    assert again.step is not None
    own = make_sharder("autoshard", context).shard(task)
    assert again.step.expected_ms == pytest.approx(StepPredictor(costs, task).expected_of(own))
    for each in (again, memory, link):
        assert each.step is not None
        assert each.step.expected_ms <= now
    assert link.step is not None
    assert link.step.expected_ms < again.step.expected_ms
    assert [each.what for each in (memory, link, device)] == [
        "twice the memory of each device", "twice the bandwidth of the link", "one device more",
    ]  # fmt: skip
    assert replanner(replace(context, policy=None)) == "cost_fused_search"


def test_nodes_are_added_whole_and_lacks_are_said(
    task: ShardingTask, costs: EstimatedCosts, policy: Policy
) -> None:
    network = Network(LINK, Link(1e8, 1e-4), 2)
    nodes = replace(task, objective=replace(STEP, link=network))
    oracle = costs.for_objective(nodes.objective, 4)
    plan = make_sharder("dim").shard(nodes)
    *_, link, more = alternatives(nodes, plan, SharderContext(oracle, policy))
    assert link.what == "twice the bandwidth of the link between nodes"
    assert more.what == "one node of 2 devices more"
    assert more.step is not None
    small = SharderContext(costs, Policy.untrained(max_devices=4))
    *_, more = alternatives(task, make_sharder("dim").shard(task), small)
    assert more.step is None
    assert "the policy serves up to 4 devices" in more.note
