"""Simulated annealing: slow, and a reference for the gap of faster sharders."""

import time
from collections.abc import Callable
from contextlib import suppress

from autoshard.cost_model import EstimatedCosts
from autoshard.cost_model.threads import one_thread
from autoshard.sharders.heuristics.cost_greedy import AloneGreedySharder
from autoshard.sharders.policy.files import Policy
from autoshard.sharders.policy.sharder import PolicySharder
from autoshard.sharders.search.option_sets import OptionSets
from autoshard.sharders.search.simulated_annealing import Annealing
from autoshard.workload import PlanError, ShardingPlan, ShardingTask
from autoshard.workload.packing.table_options import NO_RESOURCES, OptionResources
from autoshard.workload.plans.sharded import Sharded

ANNEAL_SECONDS = 60.0
_MAX_SEARCHED = 40_000  # tables times devices: local search takes minutes for larger tasks
_STARTS = 2  # sets of options whose greedy plans it may begin with


class AnnealingSharder:
    """Simulated annealing from the best plan of `cost`, `cost_fused` and `cost_fused_search`.

    It proposes random moves, swaps, splits and joins of pieces, with the options of the initial
    plan, and minimises the task's objective in the mean scenario. The result is never worse than
    the initial plan.

    Args:
        oracle: Predicts costs.
        seconds: Time of annealing, beside that of the initial plans.
        proposals: Maximum number of proposed changes. The temperature then depends on their number
            instead of the time, which makes plans reproducible unless `seconds` ends the search.
        seed: Seed of the changes.
        clock: Returns the time in seconds.
        resources: Ids of hot rows, hashed ids and host memory, as far as options may use them.
    """

    def __init__(
        self,
        oracle: EstimatedCosts,
        seconds: float = ANNEAL_SECONDS,
        proposals: int | None = None,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
        resources: OptionResources = NO_RESOURCES,
    ) -> None:
        self._oracle, self._resources = oracle, resources
        self._annealing = Annealing(oracle, seconds, proposals, seed, clock)

    @one_thread()
    def shard(self, task: ShardingTask) -> ShardingPlan:
        """Returns a valid plan; raises PlanError, which says what is missing, if none is found."""
        self._oracle.check(task)

        def worth(plan: ShardingPlan) -> float:
            return self._oracle.step_ms(plan, task)

        sets = OptionSets(self._oracle, task, self._resources)
        best = min(self._starts(task, sets), key=lambda start: worth(start.plan(task)))
        columns = sets.options.columns_task(best.options)
        if len(task.devices) == 1 or not columns.tables:
            return sets.options.allowed([best])[0]
        placed = self._annealing.improve(columns, best.columns_placed(task))
        found = Sharded.of_columns(task, placed, best.options)
        return min(sets.options.allowed([best, found]), key=worth)

    def _starts(self, task: ShardingTask, sets: OptionSets) -> list[Sharded]:
        starts, found = sets.starts(), list[Sharded]()
        for start in starts[:_STARTS]:
            with suppress(PlanError):
                alone = AloneGreedySharder(self._oracle)
                found.append(sets.options.sharded(alone, start.options))
            found += start.greedy
        if len(task.tables) * len(task.devices) <= _MAX_SEARCHED:
            with suppress(PlanError):
                search = PolicySharder(
                    Policy.untrained(), self._oracle, search=True, resources=self._resources
                )
                found.append(Sharded.of(search.shard(task), task))
        return found or [sets.options.any_plan()]
