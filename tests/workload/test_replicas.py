"""Replica groups: their layout on nodes, the task of a group, and the price of averaging copies."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autoshard.cost_model.step.option_overheads import CopyOverhead
from autoshard.workload import (
    Device,
    EmbeddingTable,
    FieldError,
    Link,
    Network,
    Objective,
    OperatorOptions,
    Placement,
    Rule,
    ShardingPlan,
    ShardingTask,
    UserError,
)
from autoshard.workload.plans.replicas import ReplicaGroups, group_sizes, layouts
from autoshard.workload.ways.option import DATA_PARALLEL

INSIDE, BETWEEN = Link(400e9, 5e-6), Link(50e9, 20e-6)
TABLES = (EmbeddingTable("a", 1000, 16, 2.0), EmbeddingTable("b", 400, 8, 3.0))


def task_of(devices: int, of_node: int | None = 8) -> ShardingTask:
    link = INSIDE if of_node is None else Network(INSIDE, BETWEEN, of_node)
    objective = Objective("operators", link)
    return ShardingTask(TABLES, Device.uniform(devices, 2**30), 1024, objective=objective)


def test_groups_are_consecutive_or_their_shards_holders_are() -> None:
    apart = ReplicaGroups(8, 4)
    assert [list(apart.ranks(n)) for n in range(2)] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert [list(apart.holders(n)) for n in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    near = replace(apart, consecutive=True)
    assert [list(near.ranks(n)) for n in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [list(near.holders(n)) for n in range(4)] == [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize(
    ("size", "consecutive", "of_groups", "of_holders"),
    [
        (8, True, INSIDE, Network(INSIDE, BETWEEN, 1)),
        (8, False, Network(INSIDE, BETWEEN, 2), INSIDE),
        (4, True, INSIDE, Network(INSIDE, BETWEEN, 2)),
        (16, True, Network(INSIDE, BETWEEN, 8), Network(INSIDE, BETWEEN, 1)),
        (16, False, Network(INSIDE, BETWEEN, 4), INSIDE),
        (2, False, Network(INSIDE, BETWEEN, 1), Network(INSIDE, BETWEEN, 8)),
    ],
)
def test_networks_of_a_layout(
    size: int, consecutive: bool, of_groups: Network, of_holders: Network
) -> None:
    groups, network = ReplicaGroups(32, size, consecutive), Network(INSIDE, BETWEEN, 8)
    assert groups.of_groups(network) == of_groups
    assert groups.of_holders(network) == of_holders


def test_a_group_has_its_share_of_a_batch_and_the_least_memory() -> None:
    whole = task_of(4, 2)
    small = replace(whole.devices[1], memory_bytes=2**20)
    whole = replace(whole, devices=(whole.devices[0], small, *whole.devices[2:]))
    groups = ReplicaGroups(4, 2)
    own = groups.task(whole)
    assert [device.memory_bytes for device in own.devices] == [2**20, 2**30]
    assert own.batch_size == 512
    assert own.objective.link == Network(INSIDE, BETWEEN, 1)
    assert Objective.from_json(json.loads(json.dumps(own.objective.to_json()))) == own.objective
    with pytest.raises(UserError, match="do not fit the task's 2: "):
        groups.task(own)
    ruled = replace(whole, rules=(Rule("on", ("a",), (3,)),))
    with pytest.raises(FieldError, match="there are 2 devices"):
        groups.task(ruled)


def test_averages_move_weights_and_state_of_the_fullest_rank() -> None:
    whole = replace(task_of(16), operator=OperatorOptions(optimizer="adagrad"))
    groups = ReplicaGroups(16, 8, consecutive=True)
    link, own = whole.objective.link, groups.task(whole)
    assert link is not None
    plan = ShardingPlan((Placement("a", 0, 16, 1), Placement("b", 0, 8, 0)), 8)
    held = 1000 * 16 * 4 * 2  # weights, and as much state
    assert groups.sync_ms(plan, own, link) == pytest.approx(
        1e3 * (2 * 20e-6 + 2 * 0.5 * held / 50e9)
    )
    copied = ShardingPlan((Placement("b", 0, 8, 0),), 8, {"a": DATA_PARALLEL})
    held = 400 * 8 * 4 * 2
    assert groups.sync_ms(copied, own, link) == pytest.approx(
        1e3 * (2 * 20e-6 + 2 * 0.5 * held / 50e9)
    )
    sgd = replace(own, operator=OperatorOptions(optimizer="sgd"))
    assert groups.sync_ms(copied, sgd, link) == pytest.approx(1e3 * (20e-6 + held / 2 / 50e9))
    assert ReplicaGroups(16, 16).sync_ms(plan, own, link) == 0


def test_copied_tables_are_reduced_over_all_ranks() -> None:
    whole = task_of(16)
    own = ReplicaGroups(16, 4, consecutive=True).task(whole)
    overhead = CopyOverhead(0.0, 0.0, 0.0, 0.0, 0.0)
    assert overhead.ms(own, own.tables[:1]) == pytest.approx(overhead.ms(whole, own.tables[:1]))


def test_layouts_of_a_price_are_named_once() -> None:
    assert layouts(task_of(16, None), 4) == [ReplicaGroups(16, 4)]
    assert [g.consecutive for g in layouts(task_of(16), 4)] == [False, True]
    assert [g.node_size for g in layouts(task_of(16), 8)] == [4, 8]
    assert layouts(task_of(24), 12)[0].node_size == 4  # half of three nodes
    assert len(layouts(task_of(24), 12)) == 1
    with pytest.raises(UserError, match="groups of 4 of 36 devices are spread unevenly"):
        layouts(task_of(36, 6), 4)


def test_sizes_divide() -> None:
    assert group_sizes(12) == [1, 2, 3, 4, 6, 12]
    with pytest.raises(FieldError, match="12 devices are no groups of 5: take one of 1, 2, 3, 4"):
        ReplicaGroups(12, 5)
    with pytest.raises(FieldError, match="sync_interval: must be a whole number of at least 1"):
        ReplicaGroups(12, 4, sync_interval=0)


def test_plans_carry_their_groups(tmp_path: Path) -> None:
    placements = (Placement("a", 0, 16, 1), Placement("b", 0, 8, 0))
    plan = ShardingPlan(placements, 2, replicas=ReplicaGroups(8, 2, True, 10))
    plan.save(tmp_path / "plan.json")
    assert ShardingPlan.load(tmp_path / "plan.json") == plan
    document = plan.to_json()
    document["replicas"]["group_size"] = 3
    with pytest.raises(FieldError, match="group_size: 8 devices are no groups of 3"):
        ShardingPlan.from_json(document)
