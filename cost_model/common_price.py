"""What a step takes on all devices alike, as the sum of what the options of tables bring.

Each option of a table adds loads, as each piece adds amounts to its device; the price of their sum
adds what is paid once: the start of a further exchange, the order of outputs. So a search prices
many changes of options at once. For a plan it is `EstimatedCosts.common_ms`.
"""

from collections.abc import Sequence

import numpy as np

from autoshard.cost_model.step_overhead import StepOverhead
from autoshard.cost_model.way_overheads import row_loads
from autoshard.workload import ShardingTask
from autoshard.workload.arrays import Floats, Ints
from autoshard.workload.options import COLUMN_WISE, Options, ShardingOption
from autoshard.workload.step_price import FurtherExchanges

# Loads of an option: which kind it is of, its own milliseconds, and its columns on each node.
_COLUMNS, _ROWS, _NODE_ROWS, _COPIES, _OWN_MS = range(5)
_NODES = 5


class CommonPrice:
    """Prices what all devices bear, by the options of a task's tables.

    Args:
        overhead: What training takes beside operators, if that counts.
        task: The task.
    """

    def __init__(self, overhead: StepOverhead | None, task: ShardingTask) -> None:
        self._task = task
        self._ranks, self._per_node = len(task.devices), len(task.devices) // task.nodes
        self._numbers = {table.name: number for number, table in enumerate(task.tables)}
        self._exchanges = FurtherExchanges.of(task)
        self._overhead = overhead
        self._sharded_ms = np.zeros(len(task.tables))
        self._copies_ms = np.full(len(task.tables), np.inf)
        if self._overhead is not None:
            self._sharded_ms = self._overhead.common_ms_of(task.tables, task)
            if self._overhead.copies is not None:
                self._copies_ms = self._overhead.copies.each_ms(task, task.tables)

    @property
    def knows_copies(self) -> bool:
        """Whether it is known what copies take."""
        return self._overhead is not None and self._overhead.copies is not None

    @property
    def counts_splits(self) -> bool:
        """Whether slices of outputs take time of their own."""
        return self._overhead is not None

    def num_sharded(self, loads: Floats) -> Floats:
        """Returns how many tables are not copied, of sums of loads [..., loads]."""
        return np.asarray(loads[..., :_COPIES].sum(-1))

    def loads(self, table: str, option: ShardingOption) -> Floats:
        """Returns what a table adds by an option: [loads]."""
        number, found = self._numbers[table], np.zeros(_NODES + self._task.nodes)
        if option.copied:
            found[_COPIES], found[_OWN_MS] = 1.0, self._copies_ms[number]
            return found
        found[_OWN_MS] = self._sharded_ms[number]
        if option.by_columns:
            found[_COLUMNS] = 1.0
            return found
        on_all = option.row_blocks == self._ranks
        found[_ROWS if on_all else _NODE_ROWS] = 1.0
        if not on_all:
            columns = self._task.tables[number].whole().output_width
            found[_NODES + option.first // self._per_node] = columns
        if self._overhead is not None:
            loads = row_loads(self._task, {table: option.row_blocks}, ())
            found[_OWN_MS] += float(loads[1:] @ self._overhead.of_rows.rates[1:])
        return found

    def loads_of(self, options: Options) -> Floats:
        """Returns the sum over all tables: [loads]."""
        found = np.zeros(_NODES + self._task.nodes)
        for table in self._numbers:
            found += self.loads(table, options.get(table, COLUMN_WISE))
        return found

    def ms(self, loads: Floats, splits: Ints | int = 0) -> Floats:
        """Returns milliseconds of a step with these sums of loads.

        Args:
            loads: Sums over all tables, [..., loads].
            splits: Slices of outputs that are more than one for a feature, [...], or a number.
        """
        columns, rows, node_rows, copies = np.moveaxis(loads[..., :_OWN_MS], -1, 0)
        found = loads[..., _OWN_MS] + np.zeros(np.shape(splits))
        found = found + self._exchanges.ms(
            columns > 0, rows > 0, node_rows > 0, loads[..., _NODES:]
        )
        if self._overhead is None:
            return np.asarray(found)
        in_blocks, shared = rows + node_rows > 0, self._overhead.shared_rates
        own = self._task.batch_size / self._ranks
        kinds = (columns > 0) + 1 * in_blocks + (copies > 0)
        in_order = (np.asarray(splits) > 0) | (kinds > 1)
        found += shared[-1] + self._task.objective.dense_ms
        found += own * self._task.columns_in_order * shared[3] * in_order + own * shared[4] * splits
        found += (self._overhead.input_latency_ms or 0.0) * (self.num_sharded(loads) > 0)
        found += self._overhead.of_rows.start_ms * (in_blocks & (columns > 0))
        if self._overhead.copies is not None:
            found += self._overhead.copies.start_ms * (copies > 0)
        return np.asarray(found)

    def copy_gains_ms(self, tables: Sequence[str]) -> Floats:
        """Returns by how much less all devices bear without a copy of each table, [tables].

        It is below 0 where copies take longer than a rank's own part of lookups elsewhere.
        """
        numbers = [self._numbers[name] for name in tables]
        return np.asarray((self._sharded_ms - self._copies_ms)[numbers])
