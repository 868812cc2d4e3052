"""Tables, devices, tasks and plans: the package that imports no other.

Exports the data types (`EmbeddingTable`, `Piece`, `Shard`, `Device`, `ShardingTask`,
`ShardingPlan`, `OperatorOptions`), the protocols `CostOracle` and `Sharder`, readers of table lists
(`load_tables`), placement constraints (`Constraints`, `Rule`), index batches, the features that
cost models use, and estimates for slower memory (`lru_hit_rate`, `lfu_hit_rate`, `fast_rows`,
`slow_share`).
"""

from typing import TYPE_CHECKING

from autoshard.workload.lazy import lazy_exports

if TYPE_CHECKING:
    from autoshard.workload.access.batches import IndexBatch, shard_batch, table_lookups
    from autoshard.workload.access.caches import lfu_hit_rate, lru_hit_rate
    from autoshard.workload.access.features import FEATURE_NAMES, piece_features
    from autoshard.workload.access.hot_ids import load_hot_ids, save_hot_ids
    from autoshard.workload.access.memory_tiers import fast_rows, slow_share
    from autoshard.workload.errors import FieldError, UserError
    from autoshard.workload.packing.table_options import OptionResources
    from autoshard.workload.plans.placements import Placement
    from autoshard.workload.plans.plan import PlanError, ShardingPlan
    from autoshard.workload.plans.protocols import CostOracle, ShardCost, Sharder
    from autoshard.workload.sampling import random_exchanges, random_shards, random_tasks
    from autoshard.workload.sources.readers import load_tables
    from autoshard.workload.sources.synthetic import synthetic_tables
    from autoshard.workload.tables.operators import OperatorOptions
    from autoshard.workload.tables.table import EmbeddingTable, Piece, Shard, Trace
    from autoshard.workload.tasks.constraints import Constraints
    from autoshard.workload.tasks.links import Link, Network
    from autoshard.workload.tasks.objective import Objective
    from autoshard.workload.tasks.rules import Rule
    from autoshard.workload.tasks.task import Device, ShardingTask
else:
    __getattr__, __dir__ = lazy_exports(__name__)

__all__ = [
    "FEATURE_NAMES",
    "Constraints",
    "CostOracle",
    "Device",
    "EmbeddingTable",
    "FieldError",
    "IndexBatch",
    "Link",
    "Network",
    "Objective",
    "OperatorOptions",
    "OptionResources",
    "Piece",
    "Placement",
    "PlanError",
    "Rule",
    "Shard",
    "ShardCost",
    "Sharder",
    "ShardingPlan",
    "ShardingTask",
    "Trace",
    "UserError",
    "fast_rows",
    "lfu_hit_rate",
    "load_hot_ids",
    "load_tables",
    "lru_hit_rate",
    "piece_features",
    "random_exchanges",
    "random_shards",
    "random_tasks",
    "save_hot_ids",
    "shard_batch",
    "slow_share",
    "synthetic_tables",
    "table_lookups",
]
