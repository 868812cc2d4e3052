"""All sharders obey constraints, or say in one line which cannot be kept together."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autoshard.cost_model import CostModel, EstimatedCosts
from autoshard.experiments.evaluation.planners import plan_task, warm_up
from autoshard.sharders import SHARDERS, LocalSearch, Policy, SharderContext, make_sharder
from autoshard.workload import (
    Constraints,
    Device,
    EmbeddingTable,
    PlanError,
    Rule,
    Sharder,
    ShardingPlan,
    ShardingTask,
)
from autoshard.workload.packing.feasibility import any_plan
from autoshard.workload.packing.pack import does_not_fit, pack
from autoshard.workload.plans.sharded import Sharded

NAMES = tuple(name for name, spec in SHARDERS.items() if not spec.needs & {"pool", "torchrec"})
SPLITTING = ("autoshard", "cost_fused_search", "annealing")
MEMORY = 2**40


@pytest.fixture(scope="module")
def context(model: CostModel) -> SharderContext:
    return SharderContext(EstimatedCosts(model, 1024), Policy.untrained(), seconds=0.1)


def task_of(
    tables: tuple[EmbeddingTable, ...], devices: int, rules: tuple[Rule, ...], memory: int = MEMORY
) -> ShardingTask:
    return ShardingTask(tables, Device.uniform(devices, memory), 1024, rules=rules)


@st.composite
def rules_for(draw: st.DrawFn, names: list[str], devices: int) -> tuple[Rule, ...]:
    """A few rules, some of which contradict each other."""
    found = []
    for _ in range(draw(st.integers(1, 6))):
        kind = draw(
            st.sampled_from(
                ["together", "apart", "on", "not_on", "whole", "max_slices", "min_width"]
            )
        )
        least = 2 if kind in ("together", "apart") else 1
        chosen = draw(st.lists(st.sampled_from(names), min_size=least, max_size=4, unique=True))
        numbers: tuple[int, ...] = ()
        if kind in ("on", "not_on"):
            several = st.lists(st.integers(0, devices - 1), min_size=1, max_size=2, unique=True)
            numbers = tuple(draw(several))
        elif kind == "max_slices":
            numbers = (draw(st.integers(1, 3)),)
        elif kind == "min_width":
            numbers = (4 * draw(st.integers(1, 4)),)
        found.append(Rule(kind, tuple(chosen), numbers))
    return tuple(found)


def all_whole_plans(task: ShardingTask) -> Iterator[ShardingPlan]:
    for homes in itertools.product(range(len(task.devices)), repeat=len(task.tables)):
        yield ShardingPlan.table_wise(task, homes)


def plan_or_reason(sharder: Sharder, task: ShardingTask) -> tuple[ShardingPlan | None, str]:
    try:
        return sharder.shard(task), ""
    except PlanError as fault:
        return None, str(fault)


def is_valid(plan: ShardingPlan, task: ShardingTask) -> bool:
    try:
        plan.check(task)
    except PlanError:
        return False
    return True


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_sharder_keeps_every_rule(
    data: st.DataObject, context: SharderContext, tables: tuple[EmbeddingTable, ...]
) -> None:
    devices = data.draw(st.integers(1, 4))
    some = tables[: data.draw(st.integers(4, 12))]
    rules = data.draw(rules_for([table.name for table in some], devices))
    fill = data.draw(st.sampled_from([0.05, 0.7]))
    loose = task_of(some, devices, ())
    room = int(sum(map(loose.table_bytes, some)) / devices / fill) + 1
    task = task_of(some, devices, rules, room)
    for name in NAMES:
        plan, said = plan_or_reason(make_sharder(name, context), task)
        if plan is not None:
            plan.check(task)
        else:
            assert "\n" not in said
        if name in SPLITTING:  # they find a plan wherever there is one
            assert (plan is None) == (any_plan(task, split=True) is None), (name, said)


@settings(max_examples=40)
@given(data=st.data())
def test_there_is_a_plan_if_and_only_if_trying_all_finds_one(data: st.DataObject) -> None:
    count, devices = data.draw(st.integers(2, 5)), data.draw(st.integers(1, 3))
    rows = data.draw(st.lists(st.integers(1, 40), min_size=count, max_size=count))
    some = tuple(EmbeddingTable(f"t{n}", 1000 * r, 16, 1.0) for n, r in enumerate(rows))
    rules = data.draw(rules_for([table.name for table in some], devices))
    loose = task_of(some, devices, ())
    room = int(max(map(loose.table_bytes, some)) * data.draw(st.floats(0.9, 3.0)))
    task = task_of(some, devices, rules, room)
    found = any_plan(task, split=False)
    assert (found is not None) == any(is_valid(plan, task) for plan in all_whole_plans(task))
    if found is not None:
        ShardingPlan.of_pieces(task, found).check(task)
    split = any_plan(task, split=True)
    if found is not None:
        assert split is not None
    if split is not None:
        ShardingPlan.of_pieces(task, split).check(task)


@settings(max_examples=40)
@given(data=st.data())
def test_without_any_of_the_named_constraints_there_is_a_plan(data: st.DataObject) -> None:
    some = tuple(EmbeddingTable(f"t{n}", 1000 * (1 + n), 16, 1.0) for n in range(5))
    rules = data.draw(rules_for([table.name for table in some], 2))
    task = task_of(some, 2, tuple(dict.fromkeys(rules)), 500_000)
    if any_plan(task, split=False) is not None:
        return
    said = str(does_not_fit(task, split=False))
    named = [rule for rule in task.rules if repr(rule.name) in said]
    if not named:
        assert "memory" in said
        return
    # What is named alone admits no plan, and admits one without any one of it.
    memory = 500_000 if "memory" in said else MEMORY
    assert any_plan(task_of(some, 2, tuple(named), memory), split=False) is None
    for left_out in named:
        others = tuple(rule for rule in named if rule is not left_out)
        assert any_plan(task_of(some, 2, others, memory), split=False) is not None


def test_a_contradiction_is_reported_in_one_line(tables: tuple[EmbeddingTable, ...]) -> None:
    constraints = Constraints.of(
        {
            "groups": {"ads": ["t00", "t01", "t02"]},
            "tables": {
                "ads": {"together": True},
                "t00": {"on": [0]},
                "t02": {"not_on": [0, 1]},
                "t05": {"whole": True},
            },
        }
    )
    task = constraints.applied(task_of(tables[:10], 4, ()))
    with pytest.raises(PlanError) as raised:
        make_sharder("size").shard(task)
    assert str(raised.value) == (
        "the constraints 'ads: together' and 't00: on 0' and 't02: not_on 0, 1' cannot be kept "
        "together, with whole tables: drop or loosen one"
    )
    with pytest.raises(PlanError, match="cannot be kept together: drop"):
        pack(task, split=True)


def test_what_no_device_can_hold_names_its_constraint_and_memory(
    tables: tuple[EmbeddingTable, ...],
) -> None:
    sizes = [task_of(tables[:6], 1, ()).table_bytes(table) for table in tables[:6]]
    names = tuple(table.name for table in tables[:6])
    rules = (Rule("together", names, name="all: together"), Rule("whole", names[:1]))
    task = task_of(tables[:6], 3, rules, int(0.6 * sum(sizes)))
    with pytest.raises(PlanError, match=r"'all: together' cannot be kept within the memory of"):
        pack(task, split=True)


def test_a_search_leaves_what_is_together_together(
    context: SharderContext, tables: tuple[EmbeddingTable, ...]
) -> None:
    names = [table.name for table in tables[:30]]
    rules = (
        Rule("together", tuple(names[:3])),
        Rule("apart", tuple(names[3:6])),
        Rule("on", tuple(names[6:9]), (1,)),
        Rule("max_slices", tuple(names), (2,)),
        Rule("min_width", tuple(names), (8,)),
    )
    task = task_of(tables[:30], 4, rules)
    assert context.oracle is not None
    start = make_sharder("dim", context).shard(task)
    search = LocalSearch(context.oracle)
    for found in search.improve(task, [Sharded.of(start, task)]):
        found.plan(task).check(task)
    free = task_of(tables[:30], 4, ())
    bound = [context.oracle.plan_cost(p, t).step_ms for p, t in (
        (make_sharder("autoshard", context).shard(task), task),
        (make_sharder("autoshard", context).shard(free), free),
    )]  # fmt: skip
    assert bound[1] <= bound[0] * 1.02  # rules are no help


def test_reserved_memory_is_left_free(
    context: SharderContext, tables: tuple[EmbeddingTable, ...]
) -> None:
    loose = task_of(tables[:12], 2, ())
    total = sum(map(loose.table_bytes, loose.tables))
    task = task_of(tables[:12], 2, (), int(1.2 * total))
    reserved = Constraints.of(
        {"devices": {"0": {"reserve": "70%"}, "device1": {"reserve": "0 GB"}}}
    )
    bound = reserved.applied(task)
    assert bound.usable_bytes.tolist() == [
        device.memory_bytes - device.reserved_bytes for device in bound.devices
    ]
    assert bound.devices[0].reserved_bytes == int(0.7 * bound.devices[0].memory_bytes)
    for name in NAMES:
        plan = make_sharder(name, context).shard(bound)
        used = np.array(plan.device_bytes(bound))
        assert (used <= bound.usable_bytes).all()
    assert ShardingTask.from_json(bound.to_json()) == bound


def test_tasks_with_rules_are_compared_like_others(
    context: SharderContext, tables: tuple[EmbeddingTable, ...]
) -> None:
    rules = (Rule("together", tuple(table.name for table in tables[8:10])),)
    task = task_of(tables[:10], 2, rules)
    sharders = {name: make_sharder(name, context) for name in ("dim", "autoshard")}
    warm_up(sharders, task)  # with a few of the tables
    for found in plan_task(sharders, task).values():
        assert found.plan is not None
        found.plan.check(task)
