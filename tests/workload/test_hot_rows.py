"""Hot and cold rows: what each part is used for, plans with them, and files of ids."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autoshard.workload import (
    Device,
    EmbeddingTable,
    Placement,
    PlanError,
    ShardingPlan,
    ShardingTask,
    UserError,
    load_hot_ids,
    save_hot_ids,
    table_lookups,
)
from autoshard.workload.access.hot_ids import check_hot_ids
from autoshard.workload.access.hot_rows import hot_and_cold, hot_share
from autoshard.workload.access.lookups import lookups_in
from autoshard.workload.plans.moves import moved_bytes, moves_between
from autoshard.workload.tables.row_access import RowAccess, block_rows, curve_ranks
from autoshard.workload.tasks.rules import Rule
from autoshard.workload.ways.option import ShardingOption

BATCH = 4096
ZIPF = EmbeddingTable("zipf", 20_000, 16, 10.0, zipf_alpha=1.1)
OTHER = EmbeddingTable("other", 500, 8, 2.0)


def access_of(shares: np.ndarray) -> RowAccess:
    """Statistics of rows that get these shares of lookups, in the order of their ids."""
    rows, ranked = len(shares), np.cumsum(np.sort(shares)[::-1])
    starts = np.arange(0, rows, block_rows(rows))
    curve = ranked[curve_ranks(rows) - 1]
    return RowAccess(tuple(curve), tuple(np.add.reduceat(shares, starts)), 1.0, 10**6, 0.0)


def task_of(*tables: EmbeddingTable, memory: int = 2**30) -> ShardingTask:
    return ShardingTask(tables or (ZIPF, OTHER), Device.uniform(2, memory), BATCH)


def plan_of(hot_rows: dict[str, int]) -> ShardingPlan:
    placements = (
        Placement("zipf", 0, 8, 0),
        Placement("zipf", 8, 8, 1),
        Placement("other", 0, 8, 1),
    )
    return ShardingPlan(
        placements, 2, {name: ShardingOption(hot_rows=n) for name, n in hot_rows.items()}
    )


@pytest.mark.parametrize("count", [1, 20, 400, 5_000])
def test_shares_of_hot_rows_are_those_of_what_is_known(count: int) -> None:
    popularity = np.arange(1, ZIPF.rows + 1) ** -1.1
    shares = popularity / popularity.sum()
    expected = shares[:count].sum()
    assert hot_share(ZIPF, count, BATCH) == pytest.approx(expected, rel=0.01)
    profiled = replace(ZIPF, zipf_alpha=None, access=access_of(shares))
    assert hot_share(profiled, count, BATCH) == pytest.approx(expected, rel=0.03)
    uniform = replace(ZIPF, zipf_alpha=None)
    assert hot_share(uniform, count, BATCH) == pytest.approx(count / ZIPF.rows)


def test_shares_by_reuse_bins_are_those_of_rows_that_are_used_often() -> None:
    bins = tuple(lookups_in([ZIPF], BATCH).bins[0].tolist())
    binned = replace(ZIPF, zipf_alpha=None, reuse=bins)
    assert hot_share(binned, 100, BATCH) == pytest.approx(hot_share(ZIPF, 100, BATCH), rel=0.05)
    once = replace(ZIPF, zipf_alpha=None, reuse=(1.0, *[0.0] * 16), pooling_factor=1.0)
    assert hot_share(once, 100, BATCH) == pytest.approx(100 / ZIPF.rows)


def test_both_parts_look_up_what_the_table_does() -> None:
    hot, cold = hot_and_cold(ZIPF, 300, BATCH)
    assert (hot.rows, cold.rows) == (300, ZIPF.rows - 300)
    assert (hot.name, cold.name) == ("zipf_hot", "zipf")
    assert hot.pooling_factor + cold.pooling_factor == pytest.approx(ZIPF.pooling_factor)
    assert hot.pooling_factor / ZIPF.pooling_factor == pytest.approx(hot_share(ZIPF, 300, BATCH))
    # As in a batch of which the rows that are used most were taken out.
    rows, _ = table_lookups(ZIPF, BATCH)
    _, uses = np.unique(rows, return_counts=True)
    kept = np.sort(uses)[::-1][300:]
    found = lookups_in([cold], BATCH)
    assert found.distinct_rows[0] == pytest.approx(len(kept), rel=0.1)
    assert found.lookups[0] == pytest.approx(kept.sum(), rel=0.1)


@pytest.mark.parametrize("count", [0, 20_000])
def test_hot_rows_are_some_of_the_rows(count: int) -> None:
    with pytest.raises(UserError, match="of table zipf must lie between 1 and 19999"):
        hot_and_cold(ZIPF, count, BATCH)


def test_a_plan_with_hot_rows_is_one_of_two_tables() -> None:
    plan, task = plan_of({"zipf": 300}), task_of()
    plan.check(task)
    assert not plan.is_plain
    hot, _ = hot_and_cold(ZIPF, 300, BATCH)
    copies = task.operator.copies_memory([hot], BATCH, 2)
    ids = 4 * ZIPF.rows  # on each device, to tell hot from cold
    for parts, held in zip(plan.device_memory(task), plan.pieces(task), strict=True):
        alone = task.operator.memory(held, BATCH).plus(copies)
        assert parts == alone._replace(inputs=alone.inputs + ids)
    whole = replace(plan, options={}).device_memory(task)
    assert all(m.total > w.total for m, w in zip(plan.device_memory(task), whole, strict=True))
    rest = plan.columns_task(task, reserve=True)
    assert [d.reserved_bytes for d in rest.devices] == [copies.total + ids] * 2
    assert [table.name for table in rest.tables] == ["zipf", "other"]
    assert {piece.table.rows for piece, _ in plan.placed(task)} == {ZIPF.rows - 300, OTHER.rows}


def test_hot_rows_are_saved(tmp_path: Path) -> None:
    plan = plan_of({"zipf": 300})
    plan.save(tmp_path / "plan.json")
    assert ShardingPlan.load(tmp_path / "plan.json") == plan
    document = plan.to_json()
    for wrong in ([1], {"zipf": 3}, {"zipf": {"hot_rows": True}}, {"zipf": {"warm_rows": 3}}):
        with pytest.raises(UserError, match=r"options|hot_rows|warm_rows"):
            ShardingPlan.from_json(document | {"options": wrong})


def test_plans_keep_to_rules_about_copies_of_hot_rows() -> None:
    plan = plan_of({"zipf": 300})
    for kind in ("not_copied", "on"):
        rule = Rule(kind, ("zipf",), (0,) if kind == "on" else ())  # type: ignore[arg-type]
        with pytest.raises(PlanError, match="hot rows of zipf are copied"):
            plan.check(replace(task_of(), rules=(rule,)))
    plan.check(replace(task_of(), rules=(Rule("min_width", ("zipf",), (8,)),)))
    with pytest.raises(PlanError, match="split over 2"):
        plan.check(replace(task_of(), rules=(Rule("whole", ("zipf",)),)))
    with pytest.raises(PlanError, match="table absent of the plan is not among"):
        plan_of({"absent": 3}).check(task_of())
    with pytest.raises(PlanError, match="more than its"):
        plan.check(task_of(memory=2**20))
    twice = replace(task_of(), tables=(ZIPF, OTHER, replace(OTHER, name="zipf_hot")))
    twice_placed = replace(plan, placements=(*plan.placements, Placement("zipf_hot", 0, 8, 0)))
    with pytest.raises(UserError, match="of table zipf would be table zipf_hot, which there is"):
        twice_placed.check(twice)


def test_blocks_of_cold_rows_are_numbered_anew_where_hot_rows_change() -> None:
    by_rows = ShardingPlan((Placement("zipf", 0, 16, 0, 2),), 2)
    hot, task = replace(by_rows, options={"zipf": ShardingOption(hot_rows=300)}), task_of(ZIPF)
    moves = moves_between(by_rows, hot, task)
    half = task.operator.stored_bytes(ZIPF.rows, 16) // 2
    assert moved_bytes(moves) == pytest.approx(half, rel=0.01)
    assert moves_between(hot, hot, task) == ()
    columns = plan_of({})
    assert moves_between(columns, plan_of({"zipf": 300}), task_of()) == ()


def test_files_of_ids_are_read_back_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "ids.npz"
    ids = {"zipf": np.array([7, 3, 9]), "file": np.array([], np.int64), "a/b": np.array([1])}
    save_hot_ids(ids, path)
    found = load_hot_ids(path)
    assert {name: some.tolist() for name, some in found.items()} == {
        name: some.tolist() for name, some in ids.items()
    }
    check_hot_ids(found, (ZIPF, OTHER))
    with pytest.raises(UserError, match="hot id 20000 of table zipf is none of its 20000 rows"):
        check_hot_ids({"zipf": np.array([20_000, 3])}, (ZIPF,))
    with pytest.raises(UserError, match="name a row twice"):
        check_hot_ids({"zipf": np.array([3, 3])}, (ZIPF,))
    save_hot_ids({}, tmp_path / "new" / "none.npz")
    assert load_hot_ids(tmp_path / "new" / "none.npz") == {}
    with pytest.raises(UserError, match=r"none\.npz: cannot be written"):
        save_hot_ids({}, tmp_path / "new" / "none.npz" / "none.npz")
    np.save(tmp_path / "array.npy", np.zeros(3))
    with pytest.raises(UserError, match=r"array\.npy: is no file of hot ids"):
        load_hot_ids(tmp_path / "array.npy")
    path.write_text("no archive")
    with pytest.raises(UserError, match=r"ids\.npz: is no file of hot ids"):
        load_hot_ids(path)
    np.savez(path, other=np.zeros(3))
    with pytest.raises(UserError, match=r"ids\.npz: is no file of hot ids"):
        load_hot_ids(path)
    with pytest.raises(UserError, match=r"none\.npz: cannot be read: No such file"):
        load_hot_ids(tmp_path / "none.npz")


def test_hot_rows_do_not_move_with_the_others() -> None:
    task = task_of()
    old = plan_of({"zipf": 300})
    new = replace(old, placements=(Placement("zipf", 0, 16, 0), *old.placements[2:]))
    moved = task.operator.stored_bytes(ZIPF.rows - 300, 8)
    assert moved_bytes(moves_between(old, new, task)) == moved
