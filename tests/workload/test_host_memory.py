"""Tables in host memory: memory, traffic over the link, sizes of caches, and plans of them."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from autoshard.workload import (
    Device,
    EmbeddingTable,
    OperatorOptions,
    PlanError,
    ShardingPlan,
    ShardingTask,
    UserError,
)
from autoshard.workload.access.caches import lfu_hit_rate
from autoshard.workload.plans.placements import Placement
from autoshard.workload.tables.table import row_blocks
from autoshard.workload.ways.cache_sizes import cached_rows, link_bytes
from autoshard.workload.ways.option import ShardingOption, columns_task

BATCH = 256
SKEWED = EmbeddingTable("skewed", 40_000, 16, 8.0, zipf_alpha=1.2)
EVEN = EmbeddingTable("even", 40_000, 32, 2.0)
SMALL = EmbeddingTable("small", 500, 8, 1.0)
OPTIMIZERS = ("rowwise_adagrad", "adagrad", "sgd")


def task_of(*tables: EmbeddingTable, optimizer: str = "rowwise_adagrad") -> ShardingTask:
    operator = OperatorOptions(optimizer=optimizer)  # type: ignore[arg-type]
    return ShardingTask(tables, Device.uniform(2, 2**24), BATCH, operator)


def moved(table: EmbeddingTable, cached: int, optimizer: str = "sgd") -> tuple[float, float]:
    operator = OperatorOptions(optimizer=optimizer)  # type: ignore[arg-type]
    return link_bytes(replace(table, cached_rows=cached).whole(), operator, BATCH)


def test_a_cache_fetches_what_it_lacks_and_writes_as_much_back() -> None:
    assert link_bytes(SKEWED.whole(), OperatorOptions(), BATCH) == (0, 0)  # in device memory
    lookups, rows = BATCH * 8, SKEWED.rows
    forward, backward = moved(SKEWED, 0)
    assert forward == lookups * 16 * 4
    distinct = backward / (2 * 16 * 4)  # each is read and written once
    assert 100 < distinct < lookups
    for cached in (100, 2_000, 30_000):
        missing = distinct * (1 - lfu_hit_rate(SKEWED, cached, BATCH))
        assert moved(SKEWED, cached) == pytest.approx((2 * missing * 16 * 4, 0))
    assert moved(SKEWED, rows) == pytest.approx((0, 0), abs=1e-6)
    # The state of each element lies beside the weights, that of each row on the device.
    assert moved(SKEWED, 100, "rowwise_adagrad") == moved(SKEWED, 100)
    more = np.subtract(moved(SKEWED, 100, "adagrad"), moved(SKEWED, 100))
    assert more == pytest.approx((0, 2 * distinct * 16 * 4))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_memory_is_that_of_the_cache_and_its_administration(optimizer: str) -> None:
    """Sizes of FBGEMM's buffers: 12 bytes for each row, and 8 for each that is cached."""
    task = task_of(EVEN, optimizer=optimizer)
    operator, table, rows = task.operator, EVEN, EVEN.rows
    state = {"rowwise_adagrad": 4 * rows}.get(optimizer, 0)
    for cached in (0, 5_000):
        piece = replace(table, cached_rows=cached).whole()
        parts = operator.memory((piece,), BATCH)
        kept = cached * (32 * 4 + 8) + (12 * rows if cached else 0)
        assert (parts.weights, parts.optimizer) == (kept, state)
        assert operator.bytes_of_each([piece, table.whole()], BATCH).tolist() == [
            parts.total,
            operator.memory((table.whole(),), BATCH).total,
        ]
        assert operator.host_bytes(piece) == operator.stored_bytes(rows, 32) - state
    assert operator.host_bytes(table.whole()) == 0


def test_blocks_of_rows_have_their_share_of_the_cache() -> None:
    blocks = row_blocks(replace(EVEN, cached_rows=1_000), 4)
    assert [block.cached_rows for block in blocks] == [250] * 4
    assert [block.cached_rows for block in row_blocks(EVEN, 4)] == [None] * 4


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("share", [0.2, 0.7])
def test_no_other_caches_within_the_budget_move_less(optimizer: str, share: float) -> None:
    """Against all combinations of sizes, apart from what is left because sizes are few."""
    task = task_of(SKEWED, EVEN, SMALL, optimizer=optimizer)
    whole = sum(map(task.table_bytes, task.tables))
    (found,) = cached_rows(task, [share * whole])
    assert found

    def costs(counts: dict[str, int]) -> tuple[float, int]:
        options = {name: ShardingOption(cached_rows=count) for name, count in counts.items()}
        tables = columns_task(task, options).tables
        traffic = sum(sum(link_bytes(t.whole(), task.operator, BATCH)) for t in tables)
        return traffic, sum(map(task.table_bytes, tables))

    traffic, memory = costs(found)
    assert memory <= share * whole
    steps = [None, *np.linspace(0, 1, 7)]
    others = []
    for shares in product(steps, repeat=3):
        named = zip(task.tables, shares, strict=True)
        others.append(costs({t.name: int(s * t.rows) for t, s in named if s is not None}))
    assert traffic <= 1.02 * min(moved for moved, held in others if held <= memory)


def test_without_lack_of_memory_no_table_is_cached() -> None:
    task = task_of(SKEWED, EVEN)
    assert [*cached_rows(task, [sum(map(task.table_bytes, task.tables))])] == [{}]


PLAN = ShardingPlan(
    (Placement("skewed", 0, 16, 0), Placement("even", 0, 16, 0), Placement("even", 16, 16, 1)),
    2,
    {"even": ShardingOption(cached_rows=4_000)},
)


def test_a_plan_with_caches_is_written_and_checked(tmp_path: Path) -> None:
    task = task_of(SKEWED, EVEN)
    PLAN.save(tmp_path / "plan.json")
    assert ShardingPlan.load(tmp_path / "plan.json") == PLAN
    PLAN.check(task)
    assert not PLAN.is_plain
    piece = replace(EVEN, cached_rows=4_000).whole()
    assert sum(PLAN.host_bytes(task)) == task.operator.host_bytes(piece)
    plain = replace(PLAN, options={})
    assert PLAN.device_bytes(task)[1] < plain.device_bytes(task)[1]
    tight = replace(task, devices=Device.uniform(2, max(PLAN.device_bytes(task))))
    PLAN.check(tight)
    with pytest.raises(PlanError, match="would hold"):
        plain.check(tight)


@pytest.mark.parametrize(
    ("plan", "problem"),
    [
        (
            replace(PLAN, options={"odd": ShardingOption(cached_rows=5)}),
            "table odd of the plan is not among the 2 tables",
        ),
        (
            replace(PLAN, options={"even": ShardingOption(cached_rows=40_001)}),
            "table even: cached_rows must lie between 0 and 400",
        ),
        (
            replace(
                PLAN,
                placements=PLAN.placements[:1],
                options={"even": ShardingOption(copied=True, cached_rows=4_000)},
            ),
            "table even is in host memory, and it is copied to all devices: take either out",
        ),
        (
            replace(PLAN, options={"even": ShardingOption(hot_rows=5, cached_rows=4_000)}),
            "table even is in host memory, and hot rows of it are copied to all devices",
        ),
    ],
)
def test_what_cannot_be_in_host_memory_is_refused(plan: ShardingPlan, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        plan.check(task_of(SKEWED, EVEN))


def test_numbers_of_rows_are_checked_when_a_plan_is_read() -> None:
    document = {**PLAN.to_json(), "options": {"even": {"cached_rows": "many"}}}
    with pytest.raises(
        UserError, match="cached_rows of table even must be a whole number, got 'many'"
    ):
        ShardingPlan.from_json(document)
