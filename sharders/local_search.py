"""Local search by the cost model: moves, swaps and splits until none helps."""

import math
import time
from collections.abc import Callable, Sequence
from itertools import count

import numpy as np

from autoshard.cost_model import EstimatedCosts
from autoshard.cost_model.step_prediction import StepPredictor
from autoshard.cost_model.threads import one_thread
from autoshard.sharders.cost_greedy import AloneGreedySharder, FusedGreedySharder
from autoshard.sharders.plan_search import PlanSearch
from autoshard.sharders.table_options import TableOptions
from autoshard.workload import PlanError, Sharder, ShardingPlan, ShardingTask
from autoshard.workload.admission import RuleMasks
from autoshard.workload.options import Sharded, tables_of_blocks
from autoshard.workload.step_price import norm_power

# Power of the norm over devices in the mean scenario. Unlike the maximum, it also falls where
# devices that are not the slowest become even, which helps later moves.
_SOFT = 12.0
_SCENARIOS = 16  # number of scenarios in the last descent
_LAST_SHARE = 0.2  # share of the time for that descent


class LocalSearch:
    """Iterated local search: first in the mean scenario, then over several scenarios.

    A long search exploits errors of the cost model, so there are few kicks, alternately random
    moves and a split. The scenarios then penalise plans that depend on uncertain costs.

    Args:
        oracle: Predicts costs.
        kicks: Number of restarts from a perturbation of the best plan.
        split: Whether tables may be split by columns.
        seed: Seed of kicks and scenarios.
        near: A plan in use and the bytes that may move away from it; by default none.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        oracle: EstimatedCosts,
        kicks: int = 8,
        split: bool = True,
        seed: int = 0,
        near: tuple[ShardingPlan, int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._oracle = oracle
        self._kicks = kicks
        self._split = split
        self._seed = seed
        self._near = near
        self._clock = clock

    @one_thread()
    def improve(
        self,
        task: ShardingTask,
        starts: Sequence[Sharded],
        seconds: float | None = None,
        options: TableOptions | None = None,
    ) -> list[Sharded]:
        """Improves the best of several plans.

        Args:
            task: Task to plan.
            starts: Valid plans.
            seconds: Time limit, up to which there are kicks; by default `kicks` many.
            options: Options that tables may take; by default they keep theirs.

        Returns:
            The best plan in the mean scenario, and the best plan over scenarios.
        """
        until = math.inf if seconds is None else self._clock() + (1 - _LAST_SHARE) * seconds

        def time_is_up() -> bool:
            return self._clock() > until

        mean, masks = self._oracle.expectation(), RuleMasks(task)

        def search_from(start: Sharded) -> PlanSearch:
            return PlanSearch(mean, task, _SOFT, start, self._near, masks)

        best = min(map(search_from, starts), key=PlanSearch.objective)
        best = self._descended(best, search_from, time_is_up, options)
        rng = np.random.default_rng(self._seed)
        for number in count() if seconds is not None else range(self._kicks):
            if time_is_up():
                break
            other = search_from(best.sharded())
            # Every other kick splits a piece of the slowest device, which may help later moves.
            if not (self._split and number % 2 and other.split_costliest(number // 2)):
                other.kick(rng)
            other = self._descended(other, search_from, time_is_up, options)
            if other.objective() < best.objective():
                best = other
        power = norm_power(self._oracle.residuals.prior.rest)
        scenarios = self._oracle.scenarios(task.tables, _SCENARIOS, self._seed)
        scenarios = scenarios.with_parts(tables_of_blocks(task, best.sharded().options))

        def last_from(start: Sharded) -> PlanSearch:
            return PlanSearch(scenarios, task, power, start, self._near, masks)

        if seconds is not None:
            until += _LAST_SHARE * seconds
        last = self._descended(last_from(best.sharded()), last_from, time_is_up)
        return [best.sharded(), last.sharded()]

    def _descended(
        self,
        search: PlanSearch,
        again: Callable[[Sharded], PlanSearch],
        time_is_up: Callable[[], bool],
        options: TableOptions | None = None,
    ) -> PlanSearch:
        """Returns the best plan that steps downwards lead to.

        Where the first split of a plan costs more than others, tables stay whole at first, and
        what comes of splits must be better than that.

        Args:
            search: The plan to begin with.
            again: Returns the search from a plan.
            time_is_up: Returns whether to stop.
            options: Options that tables may take.
        """
        if not self._split or search.first_split_ms == 0:
            search.descend(self._split, time_is_up, options)
            return search
        search.descend(False, time_is_up, options)
        splitting = again(search.sharded())
        splitting.descend(True, time_is_up, options)
        return min(search, splitting, key=PlanSearch.objective)


class LocalSearchSharder:
    """Local search from the better plan of `cost` and `cost_fused`."""

    def __init__(self, oracle: EstimatedCosts, split: bool = True) -> None:
        self._starts: tuple[Sharder, ...] = (AloneGreedySharder(oracle), FusedGreedySharder(oracle))
        self._oracle = oracle
        self._search = LocalSearch(oracle, split=split)

    def shard(self, task: ShardingTask) -> ShardingPlan:
        """Returns a valid plan; raises PlanError if no device has memory for a table."""
        plans: list[ShardingPlan] = []
        for start in self._starts:
            try:
                plans.append(start.shard(task))
            except PlanError:
                if start is self._starts[-1] and not plans:
                    raise
        starts = [Sharded(plan.placed(task)) for plan in plans]
        plans += [found.plan(task) for found in self._search.improve(task, starts)]
        return min(plans, key=StepPredictor(self._oracle, task).expected_of)
