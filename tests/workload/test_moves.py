"""What moves where a plan takes another's place."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_plans import plans_of, tasks

from autoshard.workload import (
    Device,
    EmbeddingTable,
    OperatorOptions,
    Placement,
    PlanError,
    ShardingPlan,
    ShardingTask,
)
from autoshard.workload.plans.moves import Move, moved_bytes, moves_between, renumbered, traffic_of
from autoshard.workload.ways.option import DATA_PARALLEL

Pair = tuple[ShardingTask, ShardingPlan, ShardingPlan]


def two_plans() -> st.SearchStrategy[Pair]:
    """A task and two plans of it."""
    return tasks().flatmap(lambda t: st.tuples(st.just(t), plans_of(t), plans_of(t)))


def plans_of_two_worlds() -> st.SearchStrategy[Pair]:
    """A task, a plan of its tables for perhaps another number of devices, and a plan of it."""

    def pairs(task: ShardingTask, devices: int) -> st.SearchStrategy[Pair]:
        other = replace(task, devices=Device.uniform(devices, 2**50))
        return st.tuples(st.just(task), plans_of(other), plans_of(task))

    return st.tuples(tasks(), st.integers(1, 5)).flatmap(lambda both: pairs(*both))


def columns(plan: ShardingPlan) -> dict[tuple[str, int], int]:
    """The device of each column of each table."""
    return {
        (p.table, column): p.device
        for p in plan.placements
        for column in range(p.start, p.start + p.width)
    }


def plan_of(*placements: tuple[str, int, int, int]) -> ShardingPlan:
    return ShardingPlan(tuple(Placement(*each) for each in placements), 3)


TASK = ShardingTask(
    (EmbeddingTable("a", 100, 16, 1.0), EmbeddingTable("b", 50, 8, 1.0)),
    Device.uniform(3, 2**30),
    16,
)


def test_moves_by_hand() -> None:
    old = plan_of(("a", 0, 16, 0), ("b", 0, 4, 1), ("b", 4, 4, 0))
    new = plan_of(("a", 0, 4, 0), ("a", 4, 4, 2), ("a", 8, 8, 2), ("b", 0, 8, 1))
    moves = moves_between(old, new, TASK)
    # Weights of four bytes a column and row, and a number a row for the optimizer: once for
    # columns that leave and arrive together, however they are cut.
    assert moves == (
        Move("a", 4, 12, 0, 2, 100 * (12 + 1) * 4),
        Move("b", 4, 4, 0, 1, 50 * (4 + 1) * 4),
    )
    assert moved_bytes(moves) == 5200 + 1000
    traffic = traffic_of(moves, 3)
    assert traffic == ((6200, 0), (0, 1000), (0, 5200))
    assert [each.most for each in traffic] == [6200, 1000, 5200]
    halved = replace(TASK, operator=OperatorOptions("fp16", "sgd"))
    assert moved_bytes(moves_between(old, new, halved)) == 2 * (100 * 12 + 50 * 4)


@given(plans_of_two_worlds())
def test_all_columns_that_change_their_device_move_and_no_others(case: Pair) -> None:
    task, old, new = case
    moves = moves_between(old, new, task)
    places = columns(old)
    for move in moves:
        for column in range(move.start, move.start + move.width):
            assert places[move.table, column] == move.source != move.target
            places[move.table, column] = move.target
    assert places == columns(new)
    assert (moved_bytes(moves) == 0) == (columns(old) == columns(new))


@given(two_plans())
def test_the_way_back_moves_the_same(case: Pair) -> None:
    task, old, new = case
    there, back = moves_between(old, new, task), moves_between(new, old, task)
    assert tuple(replace(m, source=m.target, target=m.source) for m in back) == there


@given(two_plans())
def test_what_is_sent_arrives(case: Pair) -> None:
    task, old, new = case
    moves = moves_between(old, new, task)
    traffic = traffic_of(moves, len(task.devices))
    assert sum(each.out for each in traffic) == moved_bytes(moves)
    assert sum(each.into for each in traffic) == moved_bytes(moves)
    sgd = replace(task, operator=OperatorOptions("fp32", "sgd"))  # states are not of columns
    traffic = traffic_of(moves_between(old, new, sgd), len(task.devices))
    before, after = old.device_memory(sgd), new.device_memory(sgd)
    for each, had, has in zip(traffic, before, after, strict=True):
        assert had.weights - each.out + each.into == has.weights


@given(plans_of_two_worlds())
def test_a_plan_is_renumbered_to_move_no_more(case: Pair) -> None:
    task, old, new = case
    sgd = replace(task, operator=OperatorOptions("fp32", "sgd"))
    near = renumbered(new, old, sgd)
    moved = moved_bytes(moves_between(old, near, sgd))
    assert moved <= moved_bytes(moves_between(old, new, sgd))
    assert sorted(near.device_bytes(sgd)) == sorted(new.device_bytes(sgd))
    if old.num_devices != new.num_devices:
        return
    assert renumbered(old, old, sgd) == old
    assert columns(renumbered(old, near, sgd)).keys() == columns(old).keys()


def test_only_devices_of_equal_memory_take_each_other_s_numbers() -> None:
    old = plan_of(("a", 0, 16, 0), ("b", 0, 8, 1))
    new = plan_of(("a", 0, 16, 2), ("b", 0, 8, 0))
    assert renumbered(new, old, TASK) == old
    devices = (*Device.uniform(2, 2**30), Device("larger", 2**31))
    uneven = replace(TASK, devices=devices)
    assert renumbered(new, old, uneven) == plan_of(("a", 0, 16, 2), ("b", 0, 8, 1))


def test_plans_of_other_tasks_are_reported_in_one_line() -> None:
    plan = plan_of(("a", 0, 16, 0), ("b", 0, 8, 1))
    for old, new, says in (
        (plan_of(("a", 0, 16, 0)), plan, "the old plan is not of this task: columns 0 to 8 of tab"),
        (
            plan,
            plan_of(("c", 0, 16, 0)),
            "the new plan is not of this task: table c of the pl",
        ),
        (plan, replace(plan, num_devices=2), "the plan is for 2 devices, the task has 3"),
    ):
        with pytest.raises(PlanError, match=says):
            moves_between(old, new, TASK)


def test_copies_come_from_where_the_table_was_and_leave_without_a_move() -> None:
    sharded = plan_of(("a", 0, 16, 0), ("b", 0, 8, 1))
    copied = replace(plan_of(("b", 0, 8, 1)), options={"a": DATA_PARALLEL})
    row = (16 + 1) * 4
    assert moves_between(sharded, copied, TASK) == (
        Move("a", 0, 16, 0, 1, 100 * row),
        Move("a", 0, 16, 0, 2, 100 * row),
    )
    assert moves_between(copied, sharded, TASK) == ()
    assert moves_between(copied, copied, TASK) == ()
    assert renumbered(copied, sharded, TASK) == copied


def test_devices_that_are_new_get_copies_in_turn_and_parts_of_what_was_copied() -> None:
    old = replace(plan_of(("b", 0, 8, 1)), num_devices=2, options={"a": DATA_PARALLEL})
    copied = replace(plan_of(("b", 0, 8, 1)), options={"a": DATA_PARALLEL})
    weights = 100 * 16 * 4
    # The state of a copy's optimizer is as large as its weights.
    assert moves_between(old, copied, TASK) == (Move("a", 0, 16, 0, 2, 2 * weights),)
    sgd = replace(TASK, operator=OperatorOptions("fp32", "sgd"))
    assert moved_bytes(moves_between(old, copied, sgd)) == weights
    sharded = plan_of(("a", 0, 4, 0), ("a", 4, 12, 2), ("b", 0, 8, 1))
    assert moves_between(old, sharded, TASK) == (Move("a", 4, 12, 0, 2, 100 * (12 + 1) * 4),)
    assert moves_between(copied, replace(old, num_devices=3), TASK) == ()
