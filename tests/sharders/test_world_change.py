"""A plan in use on other numbers of devices: what has to move, and no more than was allowed."""

from dataclasses import replace

import numpy as np
import pytest

from autoshard.cost_model import EstimatedCosts, StepPredictor, load_model
from autoshard.sharders import IncrementalSharder
from autoshard.sharders.replanning.world_change import carried_over
from autoshard.workload import (
    Device,
    EmbeddingTable,
    Link,
    Objective,
    Placement,
    PlanError,
    Rule,
    ShardingPlan,
    ShardingTask,
    load_tables,
)
from autoshard.workload.plans.moves import Move, moved_bytes, moves_between
from autoshard.workload.tables.table import hot_name
from autoshard.workload.ways.option import DATA_PARALLEL, ShardingOption

ROWS, DIM, COPIED = 10_001, 16, (300, 8)
TABLES = (
    EmbeddingTable("rows", ROWS, DIM, 40.0),
    EmbeddingTable("copied", *COPIED, 1.0),
    EmbeddingTable("slices", 5_000, 64, 8.0),
    *load_tables("synthetic:20:5:small"),
)
WAYS = (Placement("rows", 0, DIM, 0, 4), *(Placement("slices", 16 * n, 16, n) for n in range(4)))
OLD = ShardingPlan(
    (*WAYS, *(Placement(t.name, 0, t.dim, n % 4) for n, t in enumerate(TABLES[3:]))),
    4,
    {"copied": DATA_PARALLEL},
)
WAYS_OF = {placement.table for placement in WAYS}
FIXED = {"rows", "copied"}  # what moves of these does not depend on the search


def task_of(devices: int, memory_bytes: int = 2**30, *rules: Rule) -> ShardingTask:
    objective = Objective("step", Link.parse("1GB/s,50us") if devices > 1 else None)
    return ShardingTask(
        TABLES, Device.uniform(devices, memory_bytes), 1024, rules=rules, objective=objective
    )


def oracle_of(task: ShardingTask) -> EstimatedCosts:
    model = load_model("cpu").for_objective(task.objective, len(task.devices))
    return EstimatedCosts(model, task.batch_size)


def rows_that_move(ranks: int) -> int:
    """Rows of the table by rows that are on another device than of four."""
    rows = np.arange(ROWS)
    return int((rows // -(-ROWS // 4) != rows // -(-ROWS // ranks)).sum())


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_without_a_budget_exactly_what_has_to_move_does(ranks: int) -> None:
    task = task_of(ranks)
    stored = task.operator.stored_bytes
    tables = {table.name: table for table in TABLES}
    has_to = [stored(rows_that_move(ranks), DIM)]
    has_to += [2 * 4 * COPIED[0] * COPIED[1]] * max(0, ranks - 4)
    has_to += [
        stored(tables[p.table].rows, p.width)
        for p in OLD.placements
        if p.row_blocks == 1 and p.device >= ranks
    ]
    plan = IncrementalSharder(oracle_of(task), OLD, 0).shard(task)
    plan.check(task)
    assert moved_bytes(moves_between(OLD, plan, task)) == sum(has_to)
    assert plan.copied == OLD.copied
    assert plan.row_wise == ({} if ranks == 1 else {"rows": ranks})
    moves = moves_between(OLD, plan, task)
    assert {m.source for m in moves if m.table not in FIXED} == set(range(ranks, 4))
    assert [(m.source, m.target) for m in moves if m.table == "copied"] == [
        (device % 4, device) for device in range(4, ranks)
    ]


@pytest.mark.parametrize("ranks", [3, 6])
def test_the_budget_is_for_what_moves_beside(ranks: int) -> None:
    task = task_of(ranks)
    oracle = oracle_of(task)
    predictor = StepPredictor(oracle, task)
    expected = []
    for budget in (0, 2**20, 2**30):
        sharder = IncrementalSharder(oracle, OLD, budget)
        start, plan = sharder.start(task), sharder.shard(task)
        plan.check(task)
        has_to, moved = (moved_bytes(moves_between(OLD, some, task)) for some in (start, plan))
        assert moved <= has_to + budget
        expected.append(predictor.of(plan).expected_ms)
    assert expected[2] < expected[1] < expected[0] <= predictor.of(start).expected_ms
    assert moved > has_to


def test_pieces_leave_devices_that_are_full_or_forbidden() -> None:
    """Blocks of rows grow where devices go, and batches do not."""
    task = task_of(3)
    needed = sum(carried_over(oracle_of(task), OLD, task).plan.device_bytes(task))
    tight = task_of(3, int(needed / 3 * 1.02))
    plan = carried_over(oracle_of(tight), OLD, tight).plan
    plan.check(tight)
    on_0 = next(p.table for p in OLD.placements if p.device == 0 and p.table not in WAYS_OF)
    ruled = task_of(3, 2**30, Rule("not_on", (on_0,), (0,)))
    plan = carried_over(oracle_of(ruled), OLD, ruled).plan
    assert next(p.device for p in plan.placements if p.table == on_0) != 0
    for memory, says in (
        (needed // 4, "has to move and needs"),
        (2**16, "copies of 1 tables, or of their hot rows, take"),
    ):
        small = task_of(3, memory)
        with pytest.raises(PlanError, match=says) as caught:
            carried_over(oracle_of(small), OLD, small)
        assert "\n" not in str(caught.value)


def test_a_table_that_has_too_few_rows_for_blocks_is_placed_as_a_whole() -> None:
    few = EmbeddingTable("rows", 5, DIM, 1.0)
    task = replace(task_of(4), tables=(few, *TABLES[1:]))
    plan = carried_over(oracle_of(task), replace(OLD, num_devices=5, placements=(
        Placement("rows", 0, DIM, 0, 5), *OLD.placements[1:])), task).plan  # fmt: skip
    assert [p.width for p in plan.by_table()["rows"]] == [DIM]
    plan.check(task)


def test_blocks_of_a_node_stay_on_one() -> None:
    """Nodes of two devices; a grid has slices on two nodes."""
    others = tuple(p for p in OLD.placements if p.table not in ("rows", "slices"))
    grid = tuple(Placement("slices", 32 * n, 32, 2 * n, 2) for n in (0, 1))
    for device in (0, 2):
        old = replace(OLD, placements=(Placement("rows", 0, DIM, device, 2), *grid, *others))
        for ranks, rows, slices in (
            (2, [(0, 2)], [(0, 2)]),
            (3, [(0, 3)], [(0, 3)]),
            (6, [(device, 2)], [(0, 2), (2, 2)]),
        ):
            task = task_of(ranks)
            plan = IncrementalSharder(oracle_of(task), old, 0).shard(task)
            plan.check(task)
            held = plan.by_table()
            assert [(p.device, p.row_blocks) for p in held["rows"]] == rows
            assert [(p.device, p.row_blocks) for p in held["slices"]] == slices
    eight = replace(old, num_devices=8, placements=(
        Placement("rows", 0, DIM, 6, 2), *(replace(p, device=p.device + 4) for p in grid), *others
    ))  # fmt: skip
    task = task_of(4)
    held = carried_over(oracle_of(task), eight, task).plan.by_table()
    assert held["rows"][0].row_blocks == 2
    assert {p.device for p in held["slices"]} == {0, 2}


def test_new_devices_get_copies_of_hot_rows() -> None:
    old = replace(OLD, options={**OLD.options, "slices": ShardingOption(hot_rows=100)})
    task = task_of(6)
    plan = IncrementalSharder(oracle_of(task), old, 0).shard(task)
    plan.check(task)
    assert plan.hot_rows == old.hot_rows
    moves = [m for m in moves_between(old, plan, task) if m.table == hot_name("slices")]
    size = 2 * 4 * 100 * 64
    assert moves == [Move(hot_name("slices"), 0, 64, device % 4, device, size) for device in (4, 5)]
