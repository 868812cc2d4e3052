"""Who decides: everything that turns a task into a plan.

May import `envs`, `cost_model`, `benchmark` and `workload`. Hands out every sharder by name
(`make_sharder`, with the `Means` that it needs): the published heuristics, greedy placement by
learned costs, `NeuroShardSharder`, which splits tables around it, `PolicySharder`, a trained policy
alone or with sampling, splits and local search, `MeasuringSharder`, which measures and learns while
it plans, `AnnealingSharder`, the yardstick of all that are quicker, `NearSharder`, which improves a
plan in use, and `TorchRecSharder`, TorchRec's own planner to be compared with. `next_steps` says
what one more move, swap or split would bring to a plan. Policies are kept in folders
(`load_policy`, `save_policy`).
"""

from autoshard.sharders.annealing import ANNEAL_SECONDS, AnnealingSharder
from autoshard.sharders.cost_greedy import AloneGreedySharder, FusedGreedySharder
from autoshard.sharders.heuristics import HEURISTICS, USUAL_HEURISTICS, GreedySharder
from autoshard.sharders.local_search import LocalSearch, LocalSearchSharder
from autoshard.sharders.measuring import MEASURE_SECONDS, Measurer, MeasuringSharder
from autoshard.sharders.near import NearSharder
from autoshard.sharders.neuroshard import NeuroShardSharder
from autoshard.sharders.policy import PolicySharder
from autoshard.sharders.policy_files import (
    Policy,
    PolicyError,
    find_policy,
    load_policy,
    save_policy,
)
from autoshard.sharders.registry import (
    BY_NO_MODEL,
    NEED_POLICY,
    NEED_POOL,
    NEED_TORCHREC,
    SHARDERS,
    TAKE_SECONDS,
    TAKE_THEIR_TIME,
    Means,
    make_measuring,
    make_sharder,
)
from autoshard.sharders.steps import Step, next_steps
from autoshard.sharders.torchrec_planner import TorchRecSharder

__all__ = [
    "ANNEAL_SECONDS",
    "BY_NO_MODEL",
    "HEURISTICS",
    "MEASURE_SECONDS",
    "NEED_POLICY",
    "NEED_POOL",
    "NEED_TORCHREC",
    "SHARDERS",
    "TAKE_SECONDS",
    "TAKE_THEIR_TIME",
    "USUAL_HEURISTICS",
    "AloneGreedySharder",
    "AnnealingSharder",
    "FusedGreedySharder",
    "GreedySharder",
    "LocalSearch",
    "LocalSearchSharder",
    "Means",
    "Measurer",
    "MeasuringSharder",
    "NearSharder",
    "NeuroShardSharder",
    "Policy",
    "PolicyError",
    "PolicySharder",
    "Step",
    "TorchRecSharder",
    "find_policy",
    "load_policy",
    "make_measuring",
    "make_sharder",
    "next_steps",
    "save_policy",
]
