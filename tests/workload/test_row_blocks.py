"""Tables in even blocks of rows: what a plan, its memory, its moves and its task say of them."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.workload import (
    Device,
    EmbeddingTable,
    OperatorOptions,
    Placement,
    PlanError,
    ShardingPlan,
    ShardingTask,
    UserError,
)
from autoshard.workload.plans.moves import moved_bytes, moves_between, renumbered
from autoshard.workload.tables.row_access import CURVE_POINTS, RowAccess, block_rows
from autoshard.workload.tables.table import row_blocks, rows_of_block

RANKS = 4
TABLES = (
    EmbeddingTable("a", 103, 16, 5.0, zipf_alpha=0.9),
    EmbeddingTable("b", 40, 8, 2.0, features=2),
    EmbeddingTable("c", 9, 12, 3.0, weighted=True),
)
TASK = ShardingTask(TABLES, Device.uniform(RANKS, 2**30), 32, OperatorOptions(optimizer="sgd"))


@st.composite
def plans(draw: st.DrawFn) -> ShardingPlan:
    """Valid plans of whole tables, slices, and blocks of rows on all or on two of four devices."""
    placements: list[Placement] = []
    for table in TABLES:
        blocks = draw(st.sampled_from([1, 2, RANKS] if table.rows > 9 else [1, 2]))
        cuts = sorted({0, table.dim, *(4 * draw(st.integers(1, 2)) for _ in range(2))})
        if blocks == RANKS:
            cuts = [0, table.dim]
        for start, end in itertools.pairwise(cuts):
            device = draw(st.integers(0, RANKS // blocks - 1)) * blocks
            placements.append(Placement(table.name, start, end - start, device, blocks))
    return ShardingPlan(tuple(draw(st.permutations(placements))), RANKS)


def cells(plan: ShardingPlan) -> dict[tuple[str, int, int], int]:
    """The device of each number of each table, by row and column."""
    rows = {table.name: table.rows for table in TABLES}
    return {
        (p.table, row, column): p.device + row // rows_of_block(rows[p.table], p.row_blocks)
        for p in plan.placements
        for row in range(rows[p.table])
        for column in range(p.start, p.start + p.width)
    }


@given(plans())
def test_each_number_is_in_memory_once(plan: ShardingPlan) -> None:
    plan.check(TASK)
    held = np.bincount(list(cells(plan).values()), minlength=RANKS)
    assert [parts.weights for parts in plan.device_memory(TASK)] == (4 * held).tolist()
    assert ShardingPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


@given(plans(), plans())
def test_what_changes_its_device_moves_and_nothing_else(
    old: ShardingPlan, new: ShardingPlan
) -> None:
    places, moves = cells(old), moves_between(old, new, TASK)
    for move in moves:
        rows = move.rows or (0, next(t.rows for t in TABLES if t.name == move.table))
        assert move.bytes == 4 * (rows[1] - rows[0]) * move.width
        for row in range(*rows):
            for column in range(move.start, move.start + move.width):
                assert places[move.table, row, column] == move.source != move.target
                places[move.table, row, column] = move.target
    assert places == cells(new)
    changed = sum(places[cell] != device for cell, device in cells(old).items())
    assert moved_bytes(moves) == 4 * changed
    if new.row_wise:
        assert renumbered(new, old, TASK) == new


@given(plans())
def test_a_block_is_a_table_of_its_own_for_those_who_place_and_price(plan: ShardingPlan) -> None:
    task, placed = plan.columns_task(TASK), plan.placed(TASK)
    alone = ShardingPlan(
        tuple(Placement(p.table.name, p.start, p.width, d) for p, d in placed), RANKS
    )
    assert alone.placed(task) == placed
    assert alone.device_memory(task) == plan.device_memory(TASK)
    alone.check(task)  # with the rules that keep blocks where they are
    lookups = sum(table.pooling_factor for table in task.tables)
    assert lookups == pytest.approx(sum(table.pooling_factor for table in TABLES))


def test_blocks_have_all_pooled_outputs_and_their_share_of_others() -> None:
    pooled = EmbeddingTable("t", 4096, 16, 10.0, features=10)
    of_sums = row_blocks(pooled, 4, exchange_share=0.5)
    assert {(each.features, each.exchange_share) for each in of_sums} == {(10, 0.5)}
    of_lookups = row_blocks(replace(pooled, pooled=False), 4, exchange_share=0.5)
    assert {(each.features, each.exchange_share) for each in of_lookups} == {(3, 2.5 / 3)}


def test_blocks_have_the_lookups_that_fall_into_them() -> None:
    rows = 4096
    assert block_rows(rows) == 4
    blocks = np.zeros(1024)
    blocks[:256], blocks[256:] = 0.7 / 256, 0.3 / 768
    access = RowAccess(tuple(np.linspace(0, 1, CURVE_POINTS)), tuple(blocks), 1.0, 10**6, 100.0)
    known = EmbeddingTable("t", rows, 16, 10.0, access=access)
    unknown = replace(known, access=None)
    assert [block.pooling_factor for block in row_blocks(known, 4)] == pytest.approx([7, 1, 1, 1])
    assert [block.pooling_factor for block in row_blocks(unknown, 4)] == [2.5] * 4
    assert [block.name for block in row_blocks(known, 2)] == ["t[0:2048]", "t[2048:4096]"]
    assert len({block.access_digest for block in row_blocks(unknown, 4)}) == 1  # measured once


@pytest.mark.parametrize(
    ("placement", "says"),
    [
        (Placement("a", 0, 16, 0, 3), "table a is in 3 blocks of rows from device 0 on"),
        (Placement("a", 0, 16, 1, 2), "table a is in 2 blocks of rows from device 1 on"),
        (Placement("a", 0, 16, 2, 4), "table a is on device 5"),
        (Placement("a", 0, 16, 0, 0), "table a is in 0 blocks of rows"),
    ],
)
def test_blocks_elsewhere_are_refused(placement: Placement, says: str) -> None:
    others = (Placement("b", 0, 8, 0), Placement("c", 0, 12, 0))
    with pytest.raises(PlanError, match=says):
        ShardingPlan((placement, *others), RANKS).check(TASK)


def test_few_rows_and_mixed_blocks_are_refused() -> None:
    few = EmbeddingTable("a", 5, 16, 1.0)  # blocks of 2, 2, 1 and 0 rows
    task = replace(TASK, tables=(few,))
    with pytest.raises(PlanError, match="table a: 5 rows in 4 even blocks leave a device without"):
        ShardingPlan((Placement("a", 0, 16, 0, 4),), RANKS).check(task)
    sliced = (Placement("a", 0, 8, 0, 4), Placement("a", 8, 8, 0, 4))
    wide = replace(task, tables=(replace(few, rows=50),))
    with pytest.raises(PlanError, match="in blocks of rows on all devices and in slices"):
        ShardingPlan(sliced, RANKS).check(wide)
    mixed = (Placement("a", 0, 8, 0, 2), Placement("a", 8, 8, 2))
    with pytest.raises(PlanError, match="pieces of different row_blocks"):
        ShardingPlan(mixed, RANKS).check(task)


def test_uneven_rows_cannot_be_said_in_a_file() -> None:
    document = ShardingPlan((Placement("a", 0, 16, 0, 4),), RANKS).to_json()
    document["placements"][0]["rows"] = [0, 10]
    with pytest.raises(UserError, match=r"rows: is not a field of a placement: rows are in even"):
        ShardingPlan.from_json(document)
