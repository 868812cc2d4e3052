"""What copies of tables, and tables in blocks of rows, take in a step of training.

A copied table is data-parallel: each rank looks up its own samples in its own copy, and no outputs
are exchanged. Its gradient is dense, so each step clears it, reduces it over all ranks and updates
all rows. All ranks take as long, and it is linear in a rank's own lookups and outputs and in the
size of the table.

A block of rows is priced like a table on its device (`workload.tables.table.row_blocks`). Beside
that, a second operator starts where other tables are in columns; and partial sums are reduced as
they are, so that they are neither packed nor put together again, as outputs of columns are.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from autoshard.workload import EmbeddingTable, ShardingTask
from autoshard.workload.arrays import Floats
from autoshard.workload.tables.operators import WEIGHT_BYTES
from autoshard.workload.tasks.links import all_reduce_ms

# What a table with a copy on each rank is to a rank.
COPY_LOADS = ("lookups", "gathered", "outputs", "weights")
_WEIGHTS = COPY_LOADS.index("weights")
_NS = 1e-6  # milliseconds
Coefficients = TypeVar("Coefficients", bound=Any)


def times(coefficients: Coefficients, factor: float, names: Iterable[str]) -> Coefficients:
    """Returns coefficients of which those that are named are so many times as large."""
    return replace(coefficients, **{name: factor * getattr(coefficients, name) for name in names})


@dataclass(frozen=True)
class CopyOverhead:
    """What copies add to a step, on all ranks alike.

    Args:
        start_ms: Once there is any.
        lookup_ns: For each lookup of a rank's own samples.
        gathered_ns: For each element of the rows that these look up.
        output_ns: For each element of pooled outputs of a rank's own samples.
        weight_ns: For each weight: of its gradient, and of its update.
        deviation: Relative standard deviation of what copies take from all of this.
    """

    start_ms: float
    lookup_ns: float
    gathered_ns: float
    output_ns: float
    weight_ns: float
    deviation: float = 0.0

    @property
    def rates(self) -> Floats:
        """Milliseconds for one of each of COPY_LOADS."""
        work = (self.lookup_ns, self.gathered_ns, self.output_ns, self.weight_ns)
        return np.array([_NS * ns for ns in work])

    def scaled(self, factor: float) -> "CopyOverhead":
        """Returns what copies take on a machine that takes so many times as long."""
        names = ("start_ms", "lookup_ns", "gathered_ns", "output_ns", "weight_ns")
        return times(self, factor, names)

    def ms(self, task: ShardingTask, copied: Sequence[EmbeddingTable]) -> float:
        """Returns what copies of these tables add to a step, with their all-reduce."""
        return self.start_ms + float(self.each_ms(task, copied).sum()) if copied else 0.0

    def each_ms(self, task: ShardingTask, tables: Iterable[EmbeddingTable]) -> Floats:
        """Returns what a copy of each table adds to a step that has others: [tables]."""
        ranks = len(task.devices)
        loads = copy_loads(tables, task.batch_size, ranks)
        if not task.objective.counts_exchanges or task.objective.link is None:
            return np.asarray(loads @ self.rates)
        over = task.objective.copies_over or (task.objective.link, ranks)
        weight_ms = all_reduce_ms(*over, WEIGHT_BYTES[task.operator.weights])
        return np.asarray(loads @ self.rates + loads[:, _WEIGHTS] * weight_ms)


def copy_loads(tables: Iterable[EmbeddingTable], batch_size: int, ranks: int) -> Floats:
    """Returns COPY_LOADS of each table, with lookups and outputs of a rank's own samples.

    Args:
        tables: Copied tables.
        batch_size: Samples of the batch of all ranks.
        ranks: Number of ranks, each of which has a copy.

    Returns:
        Numbers of each table, [tables, loads].
    """
    tables = list(tables)
    own = batch_size / ranks
    lookups = own * np.array([table.pooling_factor for table in tables])
    dims = np.array([table.dim for table in tables], float)
    outputs = own * dims * np.array([table.features for table in tables])
    weights = dims * np.array([table.rows for table in tables], float)
    return np.stack([lookups, lookups * dims, outputs, weights], axis=1)


@dataclass(frozen=True)
class RowOverhead:
    """What blocks of rows add to a step, on all ranks alike, and what they save.

    Args:
        start_ms: Where some tables are in blocks of rows, and others in columns.
        saved_sum_ns: For each element of partial sums that a rank computes, for all samples.
        saved_output_ns: For each element of pooled outputs of a rank's own samples.
        lookup_ns: For each lookup of a rank's own samples, which is sent to its block: beside what
            it takes where tables are in columns.
    """

    start_ms: float
    saved_sum_ns: float
    saved_output_ns: float = 0.0
    lookup_ns: float = 0.0

    @property
    def rates(self) -> Floats:
        """Milliseconds for one of each number of `row_loads`."""
        return _NS * np.array([self.saved_sum_ns, self.saved_output_ns, self.lookup_ns])

    def scaled(self, factor: float) -> "RowOverhead":
        """Returns what blocks of rows take on a machine that takes so many times as long."""
        return times(self, factor, ("start_ms", "saved_sum_ns", "saved_output_ns", "lookup_ns"))

    def ms(self, task: ShardingTask, row_wise: Mapping[str, int]) -> float:
        """Returns what tables of a task in so many blocks of rows add to a step, but the start."""
        return float(row_loads(task, row_wise) @ self.rates)


def row_loads(task: ShardingTask, row_wise: Mapping[str, int]) -> Floats:
    """Returns what `RowOverhead` has rates for, with savings below 0: [3].

    Tables in blocks on one node count for its share of the devices, as others are on other nodes.
    """
    tables = [table for table in task.tables if table.name in row_wise]
    shares = [row_wise[table.name] / len(task.devices) for table in tables]
    columns = sum(t.dim * t.features * share for t, share in zip(tables, shares, strict=True))
    sums = -float(task.batch_size * columns)
    own = task.batch_size / len(task.devices)
    lookups = own * sum(table.pooling_factor for table in tables)
    return np.array([sums, sums / len(task.devices), lookups])


@dataclass(frozen=True)
class HotOverhead:
    """What it takes to look up hot and cold rows of a table apart, on all ranks alike.

    Args:
        hash_ns: For each lookup of a rank's own samples, where a table has no hot rows: its new id.
        table_ms: For each feature of such a table.
        lookup_ns: For each lookup of a rank's own samples: whether its row is hot, and its new id.
        bag_ns: For each of a rank's own samples and features: lengths of both parts.
        output_ns: For each element of pooled outputs of a rank's own samples: the sum of both
            parts, and its gradient.
    """

    hash_ns: float
    table_ms: float
    lookup_ns: float
    bag_ns: float
    output_ns: float

    def ms(self, task: ShardingTask, hot_rows: Mapping[str, int]) -> float:
        """Returns what so many hot rows of tables, maybe 0, add to a step, without their copies."""
        own = task.batch_size / len(task.devices)
        numbered = [table for table in task.tables if table.name in hot_rows]
        hot = [table for table in numbered if hot_rows[table.name]]
        lookups = own * sum(t.pooling_factor for t in numbered if not hot_rows[t.name])
        return _NS * self.hash_ns * lookups + float(self._each_ms(task, hot).sum())

    def _each_ms(self, task: ShardingTask, tables: Sequence[EmbeddingTable]) -> Floats:
        """Returns what hot rows of each table add to a step, without their copies: [tables]."""
        own = task.batch_size / len(task.devices)
        features = np.array([table.features for table in tables], float)
        lookups = own * np.array([table.pooling_factor for table in tables])
        outputs = own * features * np.array([table.dim for table in tables])
        work = lookups * self.lookup_ns + own * features * self.bag_ns + outputs * self.output_ns
        return np.asarray(self.table_ms * features + _NS * work)


# Of `HotCold` alone on one core of an Intel Xeon 6.106, with 512 to 8,192 samples of a rank.
HOT_OVERHEAD = HotOverhead(hash_ns=3.0, table_ms=0.12, lookup_ns=28.0, bag_ns=30.0, output_ns=10.0)
