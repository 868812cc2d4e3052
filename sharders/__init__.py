"""Who decides: everything that turns a task into a plan.

May import `envs`, `cost_model`, `benchmark` and `workload`. `make_sharder` makes every sharder by
its name, out of a `SharderContext`; `SHARDERS` says what each name stands for. There are the
published heuristics, greedy placement by learned costs, `NeuroShardSharder`, which splits tables
around it, `PolicySharder`, a trained policy alone or with a local search, `MeasuringSharder`, which
measures and learns while it plans, `AnnealingSharder`, the yardstick of all that are quicker,
`IncrementalSharder`, which improves a plan in use, and `TorchRecSharder`, TorchRec's own planner to
be compared with. `next_steps` says what one more move, swap or split would bring to a plan.
Policies are kept in folders (`load_policy`, `save_policy`).
"""

from typing import TYPE_CHECKING

from autoshard.workload.lazy import lazy_exports

if TYPE_CHECKING:
    from autoshard.sharders.annealing import ANNEAL_SECONDS, AnnealingSharder
    from autoshard.sharders.context import (
        MEASURE_SECONDS,
        SharderContext,
        open_context,
        open_oracle,
    )
    from autoshard.sharders.cost_greedy import AloneGreedySharder, FusedGreedySharder
    from autoshard.sharders.heuristics import HEURISTICS, USUAL_HEURISTICS, GreedySharder
    from autoshard.sharders.incremental import IncrementalSharder
    from autoshard.sharders.local_search import LocalSearch, LocalSearchSharder
    from autoshard.sharders.measuring import Measurer, MeasuringSharder
    from autoshard.sharders.neuroshard import NeuroShardSharder
    from autoshard.sharders.policy import PolicySharder
    from autoshard.sharders.policy_files import (
        Policy,
        PolicyError,
        cost_model_beside,
        find_policy,
        load_policy,
        save_policy,
    )
    from autoshard.sharders.registry import (
        SHARDERS,
        SharderSpec,
        make_measuring,
        make_sharder,
        needs_of,
        spec_of,
        usable_sharders,
    )
    from autoshard.sharders.steps import Step, next_steps
    from autoshard.sharders.torchrec_planner import TorchRecSharder
else:
    __getattr__, __dir__ = lazy_exports(__name__)

__all__ = [
    "ANNEAL_SECONDS",
    "HEURISTICS",
    "MEASURE_SECONDS",
    "SHARDERS",
    "USUAL_HEURISTICS",
    "AloneGreedySharder",
    "AnnealingSharder",
    "FusedGreedySharder",
    "GreedySharder",
    "IncrementalSharder",
    "LocalSearch",
    "LocalSearchSharder",
    "Measurer",
    "MeasuringSharder",
    "NeuroShardSharder",
    "Policy",
    "PolicyError",
    "PolicySharder",
    "SharderContext",
    "SharderSpec",
    "Step",
    "TorchRecSharder",
    "cost_model_beside",
    "find_policy",
    "load_policy",
    "make_measuring",
    "make_sharder",
    "needs_of",
    "next_steps",
    "open_context",
    "open_oracle",
    "save_policy",
    "spec_of",
    "usable_sharders",
]
