"""Files of constraints: what they say, and what is said of those that are off."""

from dataclasses import replace
from pathlib import Path

import pytest

from autoshard.workload import (
    Constraints,
    Device,
    EmbeddingTable,
    FieldError,
    Placement,
    PlanError,
    Rule,
    ShardingPlan,
    ShardingTask,
    UserError,
)
from autoshard.workload.ways.option import DATA_PARALLEL

TABLES = tuple(EmbeddingTable(name, 1000, 32, 2.0) for name in ("ads_a", "ads_b", "user", "item"))
TASK = ShardingTask(TABLES, Device.uniform(3, 2**30), 64)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_file_says_what_is_demanded(tmp_path: Path) -> None:
    file = write(
        tmp_path / "constraints.yaml",
        """
groups:
  ads: ["ads_*"]
tables:
  ads: {together: true, not_on: device2}
  user: {pinned: 1}
  "*": {max_slices: 2, min_width: 16, whole: false}
  item: {on: [0, device2]}
devices:
  all: {reserve: 10%}
  2: {reserve: 0.5 GB}
""",
    )
    task = Constraints.read(file).applied(TASK)
    everyone = tuple(table.name for table in TABLES)
    assert task.rules == (
        Rule("together", ("ads_a", "ads_b"), (), "ads: together"),
        Rule("not_on", ("ads_a", "ads_b"), (2,), "ads: not_on device2"),
        Rule("on", ("user",), (1,), "user: pinned 1"),
        Rule("max_slices", everyone, (2,), "*: max_slices 2"),
        Rule("min_width", everyone, (16,), "*: min_width 16"),
        Rule("on", ("item",), (0, 2), "item: on 0, device2"),
    )
    assert [device.reserved_bytes for device in task.devices] == [2**30 // 10] * 2 + [2**29]
    assert ShardingTask.from_json(task.to_json()) == task


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tables: {nobody: {whole: true}}", "'nobody' is no table of this task, nor a group"),
        ("groups: {g: [x*]}\ntables: {g: {whole: true}}", r"groups, g: 'x\*' is no table"),
        ("tables: {user: {hole: true}}", "tables, user: hole: is not one of together, apart"),
        ("tables: {user: {whole: 3}}", "tables, user: whole: must be true or false, got 3"),
        ("tables: {user: {together: true}}", "together: needs two tables or more, got user"),
        ("tables: {user: {on: [7]}}", "7 is no device of this task: they are numbered 0 to 2"),
        ("tables: {user: {on: []}}", "on: needs devices"),
        ("tables: {user: {pinned: [0, 1]}}", "pinned: names one device, got 0, 1"),
        ("tables: {user: {max_slices: 0}}", "max_slices: must be a whole number from 1 up"),
        ("tables: {user: {max_slices: two}}", "max_slices: must be a whole number, got 'two'"),
        ("tables: {user: {min_width: 6}}", "min_width: must be a multiple of 4, got 6"),
        ("tables: {user: {ways: [rowwise]}}", "ways: must be some of table_wise, .*rowwise"),
        ("tables: {user: {ways: []}}", "ways: leaves no way"),
        ("tables: {user: {ways: column_wise}}", "ways: must include table_wise"),
        ("tables: {user: {ways: [row_wise, data_parallel]}}", "ways: must include table_wise"),
        ("tables: {user: whole}", "tables, user: needs demands"),
        ("tables: [user]", "tables: needs a name and a colon"),
        ("table: {user: {whole: true}}", "table: is not one of the sections groups, tables"),
        ("groups: {g: user}", "groups, g: needs a list of tables"),
        ("devices: {all: {reserve: lots}}", "reserve: must be a share as in 10%"),
        ("devices: {all: {reserve: 100%}}", "100% leaves nothing of 1.000 GiB"),
        ("devices: {all: {keep: 10%}}", "is not reserve"),
        ("devices: {gpu9: {reserve: 10%}}", "'gpu9' is no device of this task"),
        ("- user", "constraints have sections: groups, tables, devices"),
        ("tables: {user: {whole: true}\n", "line 2"),
        ("tables: {user: {whole: true}, user: {on: 0}}", "'user' occurs twice"),
        ("tables: {{user}: {whole: true}}", "line 1: a name is missing before a colon"),
    ],
)
def test_what_is_off_is_reported_in_one_line(tmp_path: Path, text: str, says: str) -> None:
    file = write(tmp_path / "constraints.yaml", text)
    with pytest.raises(UserError, match=says) as raised:
        Constraints.read(file).applied(TASK)
    assert "\n" not in str(raised.value)


def test_what_is_said_of_one_device_counts_more_than_what_is_said_of_all() -> None:
    for order in (("1", "all"), ("all", "1")):
        reserves = {"1": {"reserve": "0.5 GB"}, "all": {"reserve": "10%"}}
        task = Constraints.of({"devices": {name: reserves[name] for name in order}}).applied(TASK)
        assert [device.reserved_bytes for device in task.devices] == [
            2**30 // 10, 2**29, 2**30 // 10
        ]  # fmt: skip


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none.yaml: cannot be read"):
        Constraints.read(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("rule", "devices", "says"),
    [
        (Rule("together", ("ads_a", "ads_b")), [0, 1, 0, 0], "ads_a is on device 0, ads_b on dev"),
        (Rule("apart", ("ads_a", "user")), [0, 1, 0, 0], "ads_a and user are both on device 0"),
        (Rule("on", ("item",), (1, 2)), [0, 0, 0, 0], "item is on device 0"),
        (Rule("not_on", ("item",), (0,)), [0, 0, 0, 0], "item is on device 0"),
    ],
)
def test_a_plan_that_breaks_a_rule_is_refused(rule: Rule, devices: list[int], says: str) -> None:
    task = ShardingTask(TABLES, TASK.devices, 64, rules=(rule,))
    with pytest.raises(PlanError, match=f"breaks the constraint '.*': {says}"):
        ShardingPlan.table_wise(task, devices).check(task)


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (Rule("whole", ("user",)), "user is split over 2 devices"),
        (Rule("max_slices", ("user",), (1,)), "user is split over 2 devices"),
        (Rule("min_width", ("user",), (24,)), "user has 12 columns on a device"),
    ],
)
def test_slices_are_held_to_their_rules(rule: Rule, says: str) -> None:
    task = ShardingTask(TABLES, TASK.devices, 64, rules=(rule,))
    user = TABLES[2].whole()
    placed = [(table.whole(), 0) for table in TABLES if table.name != "user"]
    first, second = (type(user)(user.table, start, width) for start, width in ((0, 20), (20, 12)))
    plan = ShardingPlan.of_pieces(task, [*placed, (first, 0), (second, 1)])
    with pytest.raises(PlanError, match=says):
        plan.check(task)
    # Two slices on one device are one.
    ShardingPlan.of_pieces(task, [*placed, (first, 1), (second, 1)]).check(task)


def test_rules_are_of_the_tasks_tables_and_devices() -> None:
    with pytest.raises(FieldError, match="other is no table of the task"):
        ShardingTask(TABLES, TASK.devices, 64, rules=(Rule("whole", ("other",)),))
    with pytest.raises(FieldError, match="there are 3 devices"):
        ShardingTask(TABLES, TASK.devices, 64, rules=(Rule("on", ("user",), (3,)),))


@pytest.mark.parametrize(
    ("ways", "kinds"),
    [
        ("table_wise", ["whole", "not_row_wise", "not_copied"]),
        ("[table_wise, column_wise]", ["not_row_wise", "not_copied"]),
        ("[table_wise, row_wise]", ["min_width", "not_copied"]),
        ("[table_wise, data_parallel]", ["whole", "not_row_wise"]),
        ("[table_wise, column_wise, data_parallel]", ["not_row_wise"]),
        ("[table_wise, column_wise, row_wise, data_parallel]", []),
        ("data_parallel", ["copied"]),
        ("row_wise", ["row_wise"]),
    ],
)
def test_ways_become_rules(tmp_path: Path, ways: str, kinds: list[str]) -> None:
    text = f"tables: {{user: {{ways: {ways}}}}}"
    task = Constraints.read(write(tmp_path / "ways.yaml", text)).applied(TASK)
    assert [rule.kind for rule in task.rules] == kinds


def test_rows_are_held_to_their_rules() -> None:
    first, *others = TASK.tables
    placed = tuple(Placement(t.name, 0, t.dim, 0) for t in others)
    row_wise = ShardingPlan((Placement(first.name, 0, first.dim, 0, 3), *placed), 3)
    whole = ShardingPlan.table_wise(TASK, [0] * len(TASK.tables))
    names = (first.name,)
    for rule, plan, says in (
        (Rule("not_row_wise", names), row_wise, f"{first.name} is in blocks of rows"),
        (Rule("whole", names), row_wise, f"{first.name} is in blocks of rows"),
        (Rule("on", names, (0, 1, 2)), row_wise, f"{first.name} is in blocks of rows"),
        (Rule("max_slices", names, (3,)), row_wise, f"{first.name} is in blocks of rows"),
        (Rule("apart", (first.name, others[0].name)), row_wise, "is in blocks of rows"),
        (Rule("copied", names), row_wise, f"{first.name} is not copied to all devices"),
        (Rule("row_wise", names), whole, f"{first.name} is not in blocks of rows"),
    ):
        with pytest.raises(PlanError, match=says):
            plan.check(replace(TASK, rules=(rule,)))
    for rule in (
        Rule("row_wise", names),
        Rule("not_copied", names),
        Rule("min_width", names, (2**15,)),
    ):
        row_wise.check(replace(TASK, rules=(rule,)))
    whole.check(replace(TASK, rules=(Rule("not_row_wise", names),)))


def test_copies_are_held_to_their_rules() -> None:
    first, *others = (table.name for table in TASK.tables)
    placed = tuple(Placement(t.name, 0, t.dim, 0) for t in TASK.tables[1:])
    copying = ShardingPlan(placed, 3, {first: DATA_PARALLEL})
    whole = ShardingPlan.table_wise(TASK, [0] * len(TASK.tables))
    for rule, plan, says in (
        (Rule("not_copied", (first,)), copying, f"{first} is copied to all devices"),
        (Rule("on", (first,), (0,)), copying, f"{first} is copied to all devices"),
        (Rule("apart", (first, others[0])), copying, f"{first} is copied to all devices"),
        (Rule("copied", (first,)), whole, f"{first} is not copied to all devices"),
        (Rule("whole", (first,)), copying, None),
        (Rule("max_slices", (first,), (1,)), copying, None),
        (Rule("not_copied", (first,)), whole, None),
        (Rule("copied", (first,)), copying, None),
    ):
        task = replace(TASK, rules=(rule,))
        if says is None:
            plan.check(task)
        else:
            with pytest.raises(PlanError, match=says):
                plan.check(task)
