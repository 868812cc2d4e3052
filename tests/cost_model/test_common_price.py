"""What all devices bear is the sum of what options bring, whichever way it is put together."""

from dataclasses import replace

import numpy as np
import pytest

from autoshard.cost_model import EstimatedCosts, load_model
from autoshard.cost_model.step.common_price import CommonPrice
from autoshard.workload import Device, Link, Network, Objective, Piece, ShardingTask, load_tables
from autoshard.workload.plans.sharded import Sharded
from autoshard.workload.tables.table import can_be_split, halves
from autoshard.workload.ways.option import (
    COLUMN_WISE,
    DATA_PARALLEL,
    ShardingOption,
    pinned_parts,
)

BATCH = 4096
NETWORK = Network(Link(2e10, 2e-5, 1e10, 3e-5), Link(5e9, 5e-5), 2)
LINKS = {"no_link": None, "link": Link(1e10, 3e-5, 6e9, 5e-5), "nodes": NETWORK}
TABLES = load_tables("synthetic:200:5")[:9]


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("name", ["step", "pipelined", "operators"])
def test_the_price_of_options_is_that_of_the_plan(name: str, link: str) -> None:
    devices = Device.uniform(4, 10**12)
    objective = Objective(name, LINKS[link], dense_ms=1.0)  # type: ignore[arg-type]
    task = ShardingTask(tuple(TABLES), devices, BATCH, objective=objective)
    oracle = EstimatedCosts(load_model("cpu").for_objective(objective, 4), BATCH)
    price = CommonPrice(oracle.model.counted_overhead, task)
    rng = np.random.default_rng(3)
    known = [ShardingOption(), ShardingOption(row_blocks=4), ShardingOption(cached_rows=8)]
    known.append(ShardingOption(row_blocks=4, hot_rows=0))
    if task.nodes > 1:
        known += [ShardingOption(row_blocks=2), ShardingOption(row_blocks=2, first=2)]
    if price.knows_copies:
        known += [DATA_PARALLEL, ShardingOption(hot_rows=9)]
        known += [replace(option, hot_rows=16) for option in known if option.row_blocks > 1]
    assert price.knows_copies == objective.in_training
    for some in [[option] for option in known] + 20 * [known]:
        options = {t.name: some[rng.integers(len(some))] for t in task.tables}
        placed = list[tuple[Piece, int]]()
        columns = [table for table in task.tables if options[table.name].by_columns]
        options = {name: option for name, option in options.items() if option != COLUMN_WISE}
        for table in task.tables:
            option = options.get(table.name, COLUMN_WISE)
            if option.by_columns:
                whole = option.held(table, BATCH).whole()
                pieces = halves(whole) if can_be_split(whole) and rng.random() < 0.5 else [whole]
                placed += [(piece, int(rng.integers(4))) for piece in pieces]
        plan = Sharded(placed, options).plan(task)
        plan.check(task)
        assert plan.all_options() == options
        assert Sharded.of(plan, task).plan(task) == plan
        parts = {(piece.table.name, device): piece.table.features for piece, device in placed}
        splits = sum(parts.values()) - sum(table.features for table in columns)
        whole, loads = price.loads_of({}), np.zeros(0)
        loads = whole + sum(
            price.loads(name, option) - price.loads(name, COLUMN_WISE)
            for name, option in options.items()
        )
        assert price.loads_of(options) == pytest.approx(loads, abs=1e-9)
        assert price.ms(loads, splits) == pytest.approx(
            oracle.common_ms(task, plan), rel=1e-9, abs=1e-12
        )


def test_rows_whose_lookups_are_not_pooled_are_exchanged_as_columns_are() -> None:
    task = ShardingTask(
        (*TABLES, replace(TABLES[0], name="history", features=10, pooled=False)),
        Device.uniform(4, 10**12), BATCH, objective=Objective("step"),
    )  # fmt: skip
    oracle = EstimatedCosts(load_model("cpu").for_objective(task.objective, 4), BATCH)
    price = CommonPrice(oracle.model.counted_overhead, task)
    rows = ShardingOption(row_blocks=4)
    assert price.loads("history", rows).tolist() == price.loads("history", COLUMN_WISE).tolist()
    assert 4 * task.block_share(task.tables[-1], 4) == 1  # all blocks together, as the whole table
    name = TABLES[0].name
    assert price.loads(name, rows).tolist() != price.loads(name, COLUMN_WISE).tolist()


def test_blocks_of_rows_have_the_devices_of_the_plan() -> None:
    task = ShardingTask(tuple(TABLES), Device.uniform(4, 10**12), BATCH)
    table, option = TABLES[0], ShardingOption(row_blocks=4)
    plan = Sharded([(t.whole(), 0) for t in TABLES[1:]], {table.name: option}).plan(task)
    blocks = pinned_parts(task, table, option)
    assert blocks == [pair for pair in plan.placed(task) if pair[0].table.name not in
                      {t.name for t in TABLES}]  # fmt: skip
    assert sum(block.table.rows for block, _ in blocks) == table.rows
    assert pinned_parts(task, table, DATA_PARALLEL) == []
