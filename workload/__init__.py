"""What is to be sharded: the ground floor, which imports no other room.

Hands out the words of the platform (`EmbeddingTable`, `TableSlice`, `Shard`, `Device`,
`ShardingTask`, `ShardingPlan`, `OperatorOptions`), the protocols of its two trades (`CostOracle`,
`Sharder`), readers of table lists (`load_tables`), the index batches that a table's description
stands for, and the features that models see of it.
"""

from workload.batches import IndexBatch, shard_batch, table_lookups
from workload.errors import FieldError, UserError
from workload.features import FEATURE_NAMES, slice_features
from workload.operators import OperatorOptions
from workload.plans import Placement, PlanError, ShardingPlan
from workload.protocols import CostOracle, ShardCost, Sharder
from workload.readers import load_tables
from workload.sampling import random_exchanges, random_shards, random_tasks
from workload.synthetic import synthetic_tables
from workload.tables import EmbeddingTable, Shard, TableSlice, Trace
from workload.tasks import Device, ShardingTask

__all__ = [
    "FEATURE_NAMES",
    "CostOracle",
    "Device",
    "EmbeddingTable",
    "FieldError",
    "IndexBatch",
    "OperatorOptions",
    "Placement",
    "PlanError",
    "Shard",
    "ShardCost",
    "Sharder",
    "ShardingPlan",
    "ShardingTask",
    "TableSlice",
    "Trace",
    "UserError",
    "load_tables",
    "random_exchanges",
    "random_shards",
    "random_tasks",
    "shard_batch",
    "slice_features",
    "synthetic_tables",
    "table_lookups",
]
