"""Sharders: algorithms that return a plan for a task.

May import `envs`, `cost_model`, `benchmark` and `workload`. `make_sharder` creates a sharder by its
name in `SHARDERS` from a `SharderContext`. There are published heuristics, greedy placement by
predicted costs, `NeuroShardSharder`, `PolicySharder` (a trained policy, optionally with local
search), `MeasuringSharder`, `AnnealingSharder` and `IncrementalSharder`.
`RequiredOptions` makes plans of sharders that know columns alone take the options that rules ask
for, and keeps tables in host memory where they do not fit into that of devices.
`DriftMonitor` watches in a training loop whether a plan still fits the data.
`next_steps` suggests single changes of a plan, `explain_text` explains it, `write_report` writes a
page about it. `load_policy` and `save_policy` handle folders.
"""

from typing import TYPE_CHECKING

from autoshard.workload.lazy import lazy_exports

if TYPE_CHECKING:
    from autoshard.sharders.context import (
        MEASURE_SECONDS,
        SharderContext,
        open_context,
        open_oracle,
        oracle_of,
    )
    from autoshard.sharders.explaining.explain import explain_text
    from autoshard.sharders.explaining.report import write_report
    from autoshard.sharders.heuristics.cost_greedy import AloneGreedySharder, FusedGreedySharder
    from autoshard.sharders.heuristics.heuristics import HEURISTICS, USUAL_HEURISTICS, GreedySharder
    from autoshard.sharders.measuring import Measurer, MeasuringSharder
    from autoshard.sharders.peers.annealing import ANNEAL_SECONDS, AnnealingSharder
    from autoshard.sharders.peers.neuroshard import NeuroShardSharder
    from autoshard.sharders.policy.files import (
        Policy,
        PolicyError,
        cost_model_beside,
        find_policy,
        load_policy,
        save_policy,
    )
    from autoshard.sharders.policy.sharder import PolicySharder
    from autoshard.sharders.registry import (
        SHARDERS,
        SharderSpec,
        check_takes_seconds,
        make_measuring,
        make_sharder,
        needs_of,
        spec_of,
        usable_sharders,
    )
    from autoshard.sharders.replanning.drift import DriftMonitor, DriftReport
    from autoshard.sharders.replanning.incremental import IncrementalSharder
    from autoshard.sharders.required_options import RequiredOptions
    from autoshard.sharders.search.local_search import LocalSearch, LocalSearchSharder
    from autoshard.sharders.search.steps import Step, next_steps
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
    "DriftMonitor",
    "DriftReport",
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
    "RequiredOptions",
    "SharderContext",
    "SharderSpec",
    "Step",
    "check_takes_seconds",
    "cost_model_beside",
    "explain_text",
    "find_policy",
    "load_policy",
    "make_measuring",
    "make_sharder",
    "needs_of",
    "next_steps",
    "open_context",
    "open_oracle",
    "oracle_of",
    "save_policy",
    "spec_of",
    "usable_sharders",
    "write_report",
]
