"""Sharding as a sequential decision: tables are placed one by one; a step's time is the score.

May import `cost_model`, `benchmark` and `workload`. Hands out the batched environment
(`BatchedPlacementEnv`, on a `TableCatalog`), its two Gymnasium environments (`ShardingEnv`,
registered as `Sharding-v0`, and `ShardingVectorEnv`), samplers of tasks (`RandomTaskSampler`,
`MixedTaskSampler`; families of tasks are in `envs.task_families`), rewards (`Balance`,
`NegativeStep`, `Dense`) and the sources of costs (`EstimatedRewards`, `MeasuredRewards`,
`MixedRewards`).
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
        EstimatedRewards,
        MeasuredRewards,
        MixedRewards,
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
    "EstimatedRewards",
    "Layout",
    "MeasuredRewards",
    "MixedRewards",
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
