"""What plans send over both links, against what collectives of small plans move by hand."""

from dataclasses import replace

import pytest

from autoshard.workload import (
    Device,
    EmbeddingTable,
    Link,
    Network,
    Objective,
    Placement,
    ShardingPlan,
    ShardingTask,
)
from autoshard.workload.plans.traffic import Traffic, step_traffic
from autoshard.workload.ways.option import DATA_PARALLEL

BATCH, COLUMNS = 64, 16
TABLE = EmbeddingTable("a", 400, COLUMNS, 5.0, features=2)
TASK = ShardingTask(
    (TABLE,),
    Device.uniform(4, 2**30),
    BATCH,
    objective=Objective("step", Network(Link(1e9), Link(1e8), 2)),
)
SUMS = 2 * 4 * BATCH * COLUMNS * 2  # both ways, 4 bytes, two features
INPUTS = BATCH * (8 * 5.0 + 8 * 2)


def test_a_whole_table_sends_each_device_its_samples() -> None:
    plan = ShardingPlan((Placement("a", 0, COLUMNS, 1),), 4)
    assert step_traffic(plan, TASK) == [
        Traffic("ids and lengths", INPUTS / 4, INPUTS / 2),
        Traffic("outputs and gradients", SUMS / 4, SUMS / 2),
    ]


def test_rows_on_all_devices_go_around_a_ring_that_crosses_twice() -> None:
    plan = ShardingPlan((Placement("a", 0, COLUMNS, 0, 4),), 4)
    inputs, sums = step_traffic(plan, TASK)
    assert sums == Traffic("partial sums of rows", 3 * SUMS / 2, 3 * SUMS / 2)
    ids = BATCH * 8 * (5.0 + 4 * 2)  # lengths go to each of four blocks
    assert inputs == Traffic("ids and lengths", ids / 4, ids / 2)


def test_rows_of_a_node_leave_it_once() -> None:
    plan = ShardingPlan((Placement("a", 0, COLUMNS, 2, 2),), 4)
    _, sums = step_traffic(plan, TASK)
    assert sums == Traffic("partial sums of rows", SUMS, SUMS / 2)


def test_copies_send_gradients_alone_and_one_node_has_no_other() -> None:
    plan, weights = ShardingPlan((), 4, {"a": DATA_PARALLEL}), 4 * 400 * COLUMNS
    (gradients,) = step_traffic(plan, TASK)
    assert gradients == Traffic("gradients of copies", 3 * weights, 3 * weights)
    one_node = replace(TASK, objective=Objective("step", Link(1e9)))
    (gradients,) = step_traffic(plan, one_node)
    assert gradients == pytest.approx(("gradients of copies", 6 * weights, 0.0))
