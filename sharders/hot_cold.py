"""Hot rows of tables on all devices; another sharder places the cold ones.

A copy of hot rows serves each device's own samples, so that their ids need not be exchanged, and
cold rows are spread evenly over blocks of rows, whatever the order of ids. In return hot and cold
lookups are told apart, their outputs are added, and all devices update all hot rows. How many rows
are worth that follows from each table's own prices; whether the plan gains is decided by planning
with hot rows and without.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

import numpy as np
from torch import Tensor

from autoshard.cost_model import EstimatedCosts
from autoshard.cost_model.threads import one_thread
from autoshard.workload import EmbeddingTable, PlanError, Sharder, ShardingPlan, ShardingTask
from autoshard.workload.arrays import Floats
from autoshard.workload.errors import FieldError
from autoshard.workload.hot_rows import hot_and_cold
from autoshard.workload.step_price import StepPrice
from autoshard.workload.tables import can_be_blocks, hot_name, row_blocks

_MIN_GAIN = 0.01  # of the step: less is not worth a model with more tables
_LEAST, _STEP = 16, 4  # hot rows that are tried: these, and so many times as many each time


class HotColdSharder:
    """Copies the hot rows of tables where that is faster.

    Args:
        sharder: Plans for hot and cold rows as for tables of their own.
        oracle: Prices plans.
        num_known: Tables whose most used rows are known, and how many of these.
    """

    def __init__(
        self, sharder: Sharder, oracle: EstimatedCosts, num_known: Mapping[str, int]
    ) -> None:
        self._sharder, self._oracle, self._num_known = sharder, oracle, num_known

    @one_thread()
    def shard(self, task: ShardingTask) -> ShardingPlan:
        """Returns a valid plan; raises PlanError if none is found."""
        plan, oracle = self._sharder.shard(task), self._oracle
        if len(task.devices) == 1 or oracle.copies is None:
            return plan
        counts = self._counts(task, plan)
        if not counts:
            return plan
        with suppress(PlanError, FieldError):  # such as no memory
            hot = self._sharder.shard(task.with_hot_rows(counts)).with_hot_rows(counts)
            if oracle.step_ms(hot, task) < (1 - _MIN_GAIN) * oracle.step_ms(plan, task):
                return hot
        return plan

    def _counts(self, task: ShardingTask, plan: ShardingPlan) -> dict[str, int]:
        """Returns how many hot rows may pay, by table."""
        names = {table.name for table in task.tables}
        kept = {name for rule in task.rules if not rule.allows_hot_rows for name in rule.tables}
        kept |= {table.name for table in task.tables if hot_name(table.name) in names}
        whole = self._oracle.amounts([table.whole() for table in task.tables]).sum(0)
        found = {}
        for table in task.tables:
            limit = min(self._num_known.get(table.name, 0), table.rows - 1)
            if limit < 1 or table.name in kept or table.name in plan.copied:
                continue
            counts = [*_counts_up_to(limit)]
            gains_ms = self._gains_ms(table, counts, task, whole)
            if gains_ms.max() > 0:
                found[table.name] = counts[int(gains_ms.argmax())]
        return found

    def _gains_ms(
        self, table: EmbeddingTable, counts: Sequence[int], task: ShardingTask, whole: Tensor
    ) -> Floats:
        """Returns by how much so many hot rows shorten a step: [counts].

        Either way of sharding the cold rows may pay: spread over even devices with all other
        tables, or in blocks of rows. `whole` is the sum of amounts of all tables.
        """
        oracle, ranks = self._oracle, len(task.devices)
        overhead = oracle.model.counted_overhead
        assert overhead is not None
        assert overhead.copies is not None
        parts = [hot_and_cold(table, count, task.batch_size) for count in counts]
        hot, cold = [each[0] for each in parts], [each[1] for each in parts]
        added_ms = overhead.copies.each_ms(task, hot) + overhead.hot_rows.ms(task, [table.name])
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
