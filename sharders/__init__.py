"""Who decides: everything that turns a task into a plan.

May import `cost_model`, `benchmark` and `workload`. Hands out the published heuristics by name
(`make_sharder`), greedy placement by learned costs, and local search over them.
"""

from sharders.cost_greedy import AloneGreedySharder, FusedGreedySharder
from sharders.heuristics import HEURISTICS, GreedySharder, make_sharder
from sharders.local_search import LocalSearchSharder

__all__ = [
    "HEURISTICS",
    "AloneGreedySharder",
    "FusedGreedySharder",
    "GreedySharder",
    "LocalSearchSharder",
    "make_sharder",
]
