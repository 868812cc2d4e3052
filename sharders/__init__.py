"""Who decides: everything that turns a task into a plan.

May import `envs`, `cost_model`, `benchmark` and `workload`. Hands out every sharder by name
(`make_sharder`, with the `Means` that it needs): the published heuristics, greedy placement by
learned costs, and `PolicySharder`, a trained policy alone or with sampling, splits, local search
and measured verification. Policies are kept in folders (`load_policy`, `save_policy`).
"""

from autoshard.sharders.cost_greedy import AloneGreedySharder, FusedGreedySharder
from autoshard.sharders.heuristics import HEURISTICS, USUAL_HEURISTICS, GreedySharder
from autoshard.sharders.local_search import LocalSearch, LocalSearchSharder
from autoshard.sharders.policy import VERIFY_SECONDS, PolicySharder
from autoshard.sharders.policy_files import (
    Policy,
    PolicyError,
    find_policy,
    load_policy,
    save_policy,
)
from autoshard.sharders.registry import NEED_POLICY, NEED_POOL, SHARDERS, Means, make_sharder
from autoshard.sharders.rounds import MeasurePlans, best_by_rounds

__all__ = [
    "HEURISTICS",
    "NEED_POLICY",
    "NEED_POOL",
    "SHARDERS",
    "USUAL_HEURISTICS",
    "VERIFY_SECONDS",
    "AloneGreedySharder",
    "FusedGreedySharder",
    "GreedySharder",
    "LocalSearch",
    "LocalSearchSharder",
    "Means",
    "MeasurePlans",
    "Policy",
    "PolicyError",
    "PolicySharder",
    "best_by_rounds",
    "find_policy",
    "load_policy",
    "make_sharder",
    "save_policy",
]
