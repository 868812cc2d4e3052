"""Who decides: everything that turns a task into a plan.

May import `benchmark` and `workload`. Hands out sharders by name (`make_sharder`).
"""

from sharders.heuristics import HEURISTICS, GreedySharder, make_sharder

__all__ = ["HEURISTICS", "GreedySharder", "make_sharder"]
