import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.workload import (
    Device,
    EmbeddingTable,
    FieldError,
    OperatorOptions,
    Placement,
    PlanError,
    ShardingPlan,
    ShardingTask,
    UserError,
)
from autoshard.workload.packing.pack import pack
from autoshard.workload.tables.operators import MemoryParts
from autoshard.workload.ways.option import DATA_PARALLEL, ShardingOption


@st.composite
def tasks(draw: st.DrawFn) -> ShardingTask:
    tables = tuple(
        EmbeddingTable(
            f"t{number}",
            rows=draw(st.integers(1, 10**6)),
            dim=4 * draw(st.integers(1, 64)),
            pooling_factor=draw(st.floats(0, 100)),
            zipf_alpha=draw(st.none() | st.floats(0, 2)),
        )
        for number in range(draw(st.integers(1, 8)))
    )
    weights, optimizer = draw(
        st.sampled_from([("fp32", "rowwise_adagrad"), ("fp16", "adagrad"), ("fp32", "sgd")])
    )
    devices = Device.uniform(draw(st.integers(1, 5)), 2**50)
    return ShardingTask(tables, devices, 128, OperatorOptions(weights, optimizer))


@st.composite
def plans_of(draw: st.DrawFn, task: ShardingTask) -> ShardingPlan:
    """A valid plan that cuts the task's tables anywhere."""
    placements = []
    for table in task.tables:
        steps = st.integers(0, table.dim // 4)
        cuts = sorted({0, table.dim // 4, *draw(st.lists(steps, max_size=3))})
        for start, end in itertools.pairwise(cuts):
            device = draw(st.integers(0, len(task.devices) - 1))
            placements.append(Placement(table.name, 4 * start, 4 * (end - start), device))
    return ShardingPlan(tuple(draw(st.permutations(placements))), len(task.devices))


def column_plans() -> st.SearchStrategy[tuple[ShardingTask, ShardingPlan]]:
    """A task and a plan of it."""
    return tasks().flatmap(lambda task: st.tuples(st.just(task), plans_of(task)))


@given(column_plans())
def test_a_plan_that_covers_every_column_once_is_valid(
    case: tuple[ShardingTask, ShardingPlan],
) -> None:
    task, plan = case
    plan.check(task)
    assert sum(shard.total_dim for shard in plan.shards(task) if shard) == sum(
        table.dim for table in task.tables
    )
    for used, shard in zip(plan.device_bytes(task), plan.shards(task), strict=True):
        pieces = shard.pieces if shard else ()
        assert used == task.operator.memory(pieces, task.batch_size).total


@given(column_plans(), st.data())
def test_a_plan_with_a_piece_missing_twice_or_elsewhere_is_not(
    case: tuple[ShardingTask, ShardingPlan], data: st.DataObject
) -> None:
    task, plan = case
    victim = data.draw(st.sampled_from(plan.placements))
    others = tuple(p for p in plan.placements if p != victim)
    for broken in (
        others,
        (*plan.placements, victim),
        (*others, replace(victim, device=len(task.devices))),
        (*others, replace(victim, start=victim.start + 4)),
        (*others, replace(victim, width=victim.width + 4)),
        (*plan.placements, replace(victim, table="unknown")),
    ):
        with pytest.raises(UserError):
            ShardingPlan(broken, plan.num_devices).check(task)


@given(column_plans())
def test_plans_and_tasks_survive_json(case: tuple[ShardingTask, ShardingPlan]) -> None:
    task, plan = case
    assert ShardingTask.from_json(json.loads(json.dumps(task.to_json()))) == task
    assert ShardingPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def small_task(memory_bytes: int = 10**6) -> ShardingTask:
    tables = (EmbeddingTable("a", 100, 8, 1.0), EmbeddingTable("b", 50, 16, 1.0))
    return ShardingTask(tables, Device.uniform(2, memory_bytes), 16)


def test_memory_is_counted_part_by_part_and_checked() -> None:
    # Rows of a: 8 numbers and one of the optimizer; of a batch: 16 lookups and 16 offsets of eight
    # bytes, 16 outputs of 8 numbers and as many gradients.
    a = MemoryParts(100 * 8 * 4, 100 * 4, 32 * 8, 2 * 16 * 8 * 4)
    b = MemoryParts(50 * 16 * 4, 50 * 4, 32 * 8, 2 * 16 * 16 * 4)
    task = small_task(memory_bytes=b.total)
    assert b.total > a.total
    apart = ShardingPlan.table_wise(task, [0, 1])
    apart.check(task)
    assert apart.device_memory(task) == (a, b)
    with pytest.raises(PlanError) as caught:
        ShardingPlan.table_wise(task, [0, 0]).check(task)
    assert str(caught.value) == (
        "device 0 (device0) would hold 10,584 bytes (weights 6,400 bytes, outputs 3,072 bytes, "
        "optimizer 600 bytes, inputs 512 bytes), 4,880 bytes more than its 5,704 bytes"
    )
    with pytest.raises(PlanError, match="; device 0 880 bytes too much"):
        apart.check(replace(task, devices=Device.uniform(2, 4000)))


def test_what_is_missing_is_reported_by_parts() -> None:
    with pytest.raises(PlanError) as caught:
        pack(small_task(memory_bytes=5000), split=True)
    assert str(caught.value) == (
        "the tables need 10,584 bytes (weights 6,400 bytes, outputs 3,072 bytes, optimizer 600 "
        "bytes, inputs 512 bytes) and the 2 devices have 10,000 bytes: 584 bytes of memory are "
        "missing; the largest tables are b (5,704 bytes), a (4,880 bytes): add devices or memory, "
        "or make batches smaller"
    )
    for memory, mend in ((3400, "add devices or memory"), (3600, "or make batches smaller")):
        with pytest.raises(PlanError, match=f"{mend}$"):
            pack(small_task(memory_bytes=memory), split=True)
    with pytest.raises(PlanError, match="b needs weights 3,200 bytes, outputs 2,048 bytes, input"):
        pack(small_task(memory_bytes=5700), split=False)


def test_a_plan_for_other_devices_is_refused() -> None:
    task = small_task()
    plan = ShardingPlan.table_wise(task, [0, 1])
    with pytest.raises(PlanError, match="2 devices, the task has 3"):
        plan.check(replace(task, devices=Device.uniform(3, 10**6)))
    with pytest.raises(PlanError):
        ShardingPlan.table_wise(task, [0])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "line 1, column 1"),
        ("[]", "schema"),
        ('{"schema": "autoshard.task", "version": 1}', "autoshard.plan"),
        ('{"schema": "autoshard.plan", "version": 9}', "version 9"),
        ('{"schema": "autoshard.plan", "version": 4}', "placements"),
        ('{"schema": "autoshard.plan", "version": 4, "placements": 3}', "wrong kind"),
    ],
)
def test_a_broken_plan_file_is_reported_in_one_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        ShardingPlan.load(path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_round_trip(tmp_path: Path) -> None:
    task = small_task()
    plan = ShardingPlan.table_wise(task, [1, 0])
    task.save(tmp_path / "task.json")
    plan.save(tmp_path / "new" / "plan.json")
    assert ShardingTask.load(tmp_path / "task.json") == task
    assert ShardingPlan.load(tmp_path / "new" / "plan.json") == plan
    with pytest.raises(UserError, match="cannot be read"):
        ShardingPlan.load(tmp_path / "nowhere.json")


@pytest.mark.parametrize(
    "change",
    [
        {"tables": ()},
        {"devices": ()},
        {"batch_size": 0},
        {"tables": (EmbeddingTable("a", 1, 4, 1.0),) * 2},
    ],
)
def test_a_task_needs_tables_devices_and_a_batch(change: dict[str, object]) -> None:
    with pytest.raises(UserError):
        replace(small_task(), **change)
    with pytest.raises(UserError):
        Device("d", 0)
    with pytest.raises(UserError):
        Device.uniform(0, 1)


def copying_task() -> ShardingTask:
    tables = (EmbeddingTable("a", 100, 16, 2.0), EmbeddingTable("b", 50, 8, 1.0, features=2))
    operator = OperatorOptions(optimizer="adagrad")
    return ShardingTask(tables, Device.uniform(2, 2**30), 64, operator)


def test_copies_take_memory_on_each_device() -> None:
    task = copying_task()
    plan = ShardingPlan((Placement("a", 0, 16, 0),), 2, {"b": DATA_PARALLEL})
    plan.check(task)
    numbers = 50 * 8
    copy = MemoryParts(
        weights=4 * numbers,
        optimizer=4 * numbers,
        inputs=32 * 8 + 2 * 32 * 8,  # lookups and offsets of the device's own samples
        outputs=2 * 2 * 32 * 8 * 4,
        gradients=2 * 4 * numbers,  # with the buffer of the all-reduce
    )
    alone = task.operator.memory([task.tables[0].whole()], 64)
    assert plan.device_memory(task) == (alone.plus(copy), copy)
    rest = plan.columns_task(task)
    assert [table.name for table in rest.tables] == ["a"]
    assert rest.devices == task.devices
    assert (plan.columns_task(task, reserve=True).usable_bytes == 2**30 - copy.total).all()
    tight = replace(task, devices=Device.uniform(2, copy.total))
    with pytest.raises(FieldError, match="on each device, and device 0 has"):
        plan.columns_task(tight, reserve=True)
    with pytest.raises(PlanError, match=r"device 0 .* would hold .*gradients"):
        plan.check(tight)


def test_a_table_is_copied_or_placed_but_not_both() -> None:
    task = copying_task()
    a, b = Placement("a", 0, 16, 0), Placement("b", 0, 8, 1)
    ShardingPlan((), 2, {"b": DATA_PARALLEL, "a": DATA_PARALLEL}).check(task)
    with pytest.raises(PlanError, match="table b is copied to all devices, and columns of it"):
        ShardingPlan((a, b), 2, {"b": DATA_PARALLEL}).check(task)
    with pytest.raises(PlanError, match="table c of the plan is not among the 2 tables"):
        ShardingPlan((a, b), 2, {"c": DATA_PARALLEL}).check(task)
    with pytest.raises(PlanError, match="columns 0 to 16 of table a are nowhere"):
        ShardingPlan((), 2, {"b": DATA_PARALLEL}).check(task)


def test_plans_of_other_versions_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan = ShardingPlan((Placement("a", 0, 16, 0),), 2, {"c": DATA_PARALLEL, "b": DATA_PARALLEL})
    plan.save(path)
    assert ShardingPlan.load(path) == plan
    for version in (3, 5):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"version": version}))
        says = rf"has version {version} of autoshard.plan, .*reads version 4"
        with pytest.raises(UserError, match=says):
            ShardingPlan.load(path)


@pytest.mark.parametrize("copied", ["a", 3, None, False])
def test_a_table_is_copied_or_it_is_left_out(tmp_path: Path, copied: object) -> None:
    path = tmp_path / "plan.json"
    ShardingPlan((), 2, {"a": DATA_PARALLEL}).save(path)
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"options": {"a": {"copied": copied}}})
    )
    with pytest.raises(UserError, match=r"plan.json: .*copied of table a must be true, got"):
        ShardingPlan.load(path)


A = {"table": "a", "start": 0, "width": 16, "device": 0}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"copied": ["a"]}, "copied: is not a field of a plan"),
        ({"options": {"a": {}}}, "say nothing of table a"),
        ({"options": {"a": {"row_blocks": 2}}}, "row_blocks of table a is none of copied"),
        ({"options": {"a": {"hot_rows": 2.0}}}, "hot_rows of table a must be a whole number"),
        ({"placements": [{**A, "width": 16.5}]}, "width: of table a must be a whole number"),
        ({"placements": [{**A, "device": True}]}, "device: of table a must be a whole number"),
        ({"num_devices": 2.5}, "num_devices: must be a whole number"),
        ({"replicas": [1]}, "replicas: must be an object of num_devices, group_size"),
    ],
)
def test_fields_that_say_something_else_are_named(changes: dict[str, object], line: str) -> None:
    document = ShardingPlan((Placement("a", 0, 16, 0),), 2).to_json()
    with pytest.raises(UserError, match=line):
        ShardingPlan.from_json(document | changes)


@pytest.mark.parametrize(
    ("option", "line"),
    [
        (ShardingOption(hot_rows=50), "table b: hot_rows must lie between 0 and 49, got 50"),
        (ShardingOption(hot_rows=-1), "table b: hot_rows must lie between 0 and 49, got -1"),
        (ShardingOption(cached_rows=51), "table b: cached_rows must lie between 0 and 50, got 51"),
        (ShardingOption(copied=True, hot_rows=3), "table b is copied to all devices, and has"),
    ],
)
def test_tables_cannot_have_any_option(option: ShardingOption, line: str) -> None:
    placed = (Placement("a", 0, 16, 0), *([] if option.copied else [Placement("b", 0, 8, 1)]))
    with pytest.raises(PlanError, match=line):
        ShardingPlan(placed, 2, {"b": option}).check(copying_task())


def test_options_take_the_place_of_columns_on_single_devices() -> None:
    task = copying_task()
    plan = ShardingPlan.table_wise(task, [0, 0])
    assert plan.num_tables() == (2, 0)
    copied = plan.with_options(task, {"b": DATA_PARALLEL})
    assert copied == ShardingPlan(plan.placements[:1], 2, {"b": DATA_PARALLEL})
    assert copied.num_tables() == (2, 1)
    by_rows = plan.with_options(task, {"b": ShardingOption(row_blocks=2)})
    assert by_rows.row_wise == {"b": 2}
    assert by_rows.num_tables() == (2, 1)
    cached = plan.with_options(task, {"b": ShardingOption(cached_rows=1)})
    assert cached.placements == plan.placements
    assert cached.cached_rows == {"b": 1}
