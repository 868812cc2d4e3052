"""What tables in blocks of rows take in a step of training, beside their blocks.

A block is priced like a table on its device (`workload.row_blocks`). On all ranks alike, each rank
sorts the lookups of its own samples by blocks, and a second operator starts beside that of columns,
with exchanges of its own.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from autoshard.workload import EmbeddingTable, ShardingTask
from autoshard.workload.arrays import Floats

# What a rank does for its own samples of a table in blocks of rows.
ROW_LOADS = ("lookups", "bags", "outputs")
_NS = 1e-6  # milliseconds


@dataclass(frozen=True)
class RowOverhead:
    """What blocks of rows add to a step, on all ranks alike.

    Args:
        start_ms: Once there are any.
        lookup_ns: For each lookup of a rank's own samples.
        bag_ns: For each of a rank's own samples and each feature, in each block.
        output_ns: For each element of a rank's own outputs, in each block.
    """

    start_ms: float = 0.0
    lookup_ns: float = 0.0
    bag_ns: float = 0.0
    output_ns: float = 0.0

    def ms(self, task: ShardingTask, by_rows: Collection[str]) -> float:
        """Returns what these tables of a task add to a step if they are in blocks of rows."""
        tables = [table for table in task.tables if table.name in by_rows]
        if not tables:
            return 0.0
        loads = row_loads(tables, task.batch_size, len(task.devices)).sum(0)
        rates = _NS * np.array([self.lookup_ns, self.bag_ns, self.output_ns])
        return self.start_ms + float(loads @ rates)


def row_loads(tables: Collection[EmbeddingTable], batch_size: int, ranks: int) -> Floats:
    """Returns ROW_LOADS of each table, [tables, loads].

    Args:
        tables: Tables in blocks of rows on all ranks.
        batch_size: Samples of the batch of all ranks.
        ranks: Number of ranks, each of which has a block.
    """
    own = batch_size / ranks
    lookups = own * np.array([table.pooling_factor for table in tables])
    bags = own * ranks * np.array([table.features for table in tables], float)
    outputs = bags * np.array([table.dim for table in tables])
    return np.stack([lookups, bags, outputs], axis=1)
