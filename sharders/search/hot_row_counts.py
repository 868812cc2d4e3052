"""How many hot rows of a table each device may have a copy of.

A copy of hot rows serves each device's own samples, so that their ids need not be exchanged, and
cold rows are spread evenly over blocks of rows, whatever the order of ids. In return hot and cold
lookups are told apart, their outputs are added, and all devices update all hot rows. How many rows
are worth that follows from each table's own prices; whether a table's hot rows are copied is up to
the search.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from torch import Tensor

from autoshard.cost_model import EstimatedCosts
from autoshard.workload import EmbeddingTable, ShardingTask
from autoshard.workload.access.hot_rows import hot_and_cold
from autoshard.workload.arrays import Floats
from autoshard.workload.plans.step_price import StepPrice
from autoshard.workload.tables.table import can_be_blocks, row_blocks

_LEAST, _STEP = 16, 4  # hot rows that are tried: these, and so many times as many each time


def hot_row_counts(
    oracle: EstimatedCosts, task: ShardingTask, num_known: Mapping[str, int]
) -> dict[str, int]:
    """Returns how many hot rows may pay, by table; tables of which none may pay are left out.

    Args:
        oracle: Prices plans of the task.
        task: The task.
        num_known: Tables whose most used rows are known, and how many of these.
    """
    known = [t for t in task.tables if t.rows > 1 and num_known.get(t.name, 0) > 0]
    if not known or len(task.devices) == 1 or oracle.copies is None:
        return {}
    whole = oracle.amounts([table.whole() for table in task.tables]).sum(0)
    found = {}
    for table in known:
        counts = [*_counts_up_to(min(num_known[table.name], table.rows - 1))]
        gains_ms = _gains_ms(oracle, task, table, counts, whole)
        if gains_ms.max() > 0:
            found[table.name] = counts[int(gains_ms.argmax())]
    return found


def _gains_ms(
    oracle: EstimatedCosts,
    task: ShardingTask,
    table: EmbeddingTable,
    counts: Sequence[int],
    whole: Tensor,
) -> Floats:
    """Returns by how much so many hot rows shorten a step: [counts].

    Either way of sharding the cold rows may pay: spread over even devices with all other
    tables, or in blocks of rows. `whole` is the sum of amounts of all tables.
    """
    ranks = len(task.devices)
    overhead = oracle.model.counted_overhead
    assert overhead is not None
    assert overhead.copies is not None
    parts = [hot_and_cold(table, count, task.batch_size) for count in counts]
    hot, cold = [each[0] for each in parts], [each[1] for each in parts]
    added_ms = overhead.copies.each_ms(task, hot) + overhead.hot_rows.ms(task, {table.name: 1})
    saved_ms = overhead.common_ms_of([table], task) - overhead.common_ms_of(cold, task)
    amounts = oracle.amounts([each.whole() for each in (table, *cold)])
    spread_ms = oracle.price(whole - amounts[0] + amounts).total_ms.double().numpy() / ranks
    gains_ms = np.asarray(spread_ms[0] - spread_ms[1:])
    column_ms = StepPrice.of_task(task).column_ms() / ranks
    mean_ms = spread_ms[0] + column_ms * task.exchanged_columns
    # Only a block that takes longer than the mean device holds others up.
    if float(oracle.price(amounts[:1]).total_ms) > mean_ms and all(
        can_be_blocks(each.rows, ranks) for each in (table, *cold)
    ):
        blocks = [block.whole() for each in (table, *cold) for block in row_blocks(each, ranks)]
        alone_ms = oracle.alone_ms(blocks).reshape(-1, ranks).max(1)
        if alone_ms[0] > mean_ms:
            gains_ms = np.maximum(gains_ms, alone_ms[0] - np.maximum(alone_ms[1:], mean_ms))
    return np.asarray(gains_ms + saved_ms - added_ms)


def _counts_up_to(limit: int) -> Iterator[int]:
    """Yields numbers of hot rows."""
    count = _LEAST
    while count < limit:
        yield count
        count *= _STEP
    yield limit
