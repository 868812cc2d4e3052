"""Environments in which an agent places embedding tables on devices, one by one.

May import `cost_model`, `benchmark` and `workload`. `ShardingEnv` is registered with Gymnasium as
`Sharding-v0`, `ShardingVectorEnv` is its vector environment, and both run `BatchedPlacementEnv`.
A `TableCatalog` holds the tables, a `TaskSampler` draws tasks from it (`envs.task_families` defines
families of tasks), a `Reward` rewards episodes, and a `CostSource` provides their costs.
"""

from typing import TYPE_CHECKING

import gymnasium

from autoshard.workload.lazy import lazy_exports

if TYPE_CHECKING:
    from autoshard.envs.batched_env import BatchedPlacementEnv
    from autoshard.envs.catalog import TableCatalog, TaskInstance
    from autoshard.envs.observation import Layout
    from autoshard.envs.rewards import (
        Balance,
        Costs,
        CostSource,
        Dense,
        EstimatedCostSource,
        MeasuredCostSource,
        MixedCostSource,
        NegativeStep,
        Reward,
    )
    from autoshard.envs.single import ShardingEnv, default_catalog
    from autoshard.envs.task_sampling import MixedTaskSampler, RandomTaskSampler, TaskSampler
    from autoshard.envs.vector import ShardingVectorEnv
else:
    __getattr__, __dir__ = lazy_exports(__name__)

__all__ = [
    "Balance",
    "BatchedPlacementEnv",
    "CostSource",
    "Costs",
    "Dense",
    "EstimatedCostSource",
    "Layout",
    "MeasuredCostSource",
    "MixedCostSource",
    "MixedTaskSampler",
    "NegativeStep",
    "RandomTaskSampler",
    "Reward",
    "ShardingEnv",
    "ShardingVectorEnv",
    "TableCatalog",
    "TaskInstance",
    "TaskSampler",
    "default_catalog",
]


if "Sharding-v0" not in gymnasium.registry:
    gymnasium.register(
        "Sharding-v0",
        entry_point="autoshard.envs.single:ShardingEnv",
        vector_entry_point="autoshard.envs.single:make_vector",
    )
