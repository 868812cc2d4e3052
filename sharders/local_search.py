"""Local search by the cost model: moves, swaps and splits until none helps."""

import math
import time
from collections.abc import Callable, Sequence
from itertools import count

import numpy as np

from autoshard.cost_model import EstimatedCosts
from autoshard.cost_model.step_prediction import Placed, StepPredictor
from autoshard.cost_model.threads import one_thread
from autoshard.sharders.cost_greedy import AloneGreedySharder, FusedGreedySharder
from autoshard.sharders.plan_search import PlanSearch
from autoshard.workload import PlanError, Sharder, ShardingPlan, ShardingTask
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
        self, task: ShardingTask, starts: Sequence[Placed], seconds: float | None = None
    ) -> list[Placed]:
        """Improves the best of several plans.

        Args:
            task: Task to plan.
            starts: Valid plans.
            seconds: Time limit, up to which there are kicks; by default `kicks` many.

        Returns:
            The best plan in the mean scenario, and the best plan over scenarios.
        """
        until = math.inf if seconds is None else self._clock() + (1 - _LAST_SHARE) * seconds

        def time_is_up() -> bool:
            return self._clock() > until

        mean = self._oracle.expectation()
        searches = [PlanSearch(mean, task, _SOFT, start, self._near) for start in starts]
        best = min(searches, key=PlanSearch.objective)
        best.descend(False, time_is_up)
        if self._split:
            whole, best = best, PlanSearch(mean, task, _SOFT, best.placed(), self._near)
            best.descend(True, time_is_up)
            best = min(best, whole, key=PlanSearch.objective)
        rng = np.random.default_rng(self._seed)
        for number in count() if seconds is not None else range(self._kicks):
            if time_is_up():
                break
            other = PlanSearch(mean, task, _SOFT, best.placed(), self._near)
            # Every other kick splits a piece of the slowest device, which may help later moves.
            if not (self._split and number % 2 and other.split_costliest(number // 2)):
                other.kick(rng)
            other.descend(self._split, time_is_up)
            if other.objective() < best.objective():
                best = other
        power = norm_power(self._oracle.residuals.prior.rest)
        scenarios = self._oracle.scenarios(task.tables, _SCENARIOS, self._seed)
        last = PlanSearch(scenarios, task, power, best.placed(), self._near)
        if seconds is not None:
            until += _LAST_SHARE * seconds
        last.descend(self._split, time_is_up)
        return [best.placed(), last.placed()]


class LocalSearchSharder:
    """Local search from the better plan of `cost` and `cost_fused`."""

    def __init__(self, oracle: EstimatedCosts, split: bool = True) -> None:
        self._starts: tuple[Sharder, ...] = (AloneGreedySharder(oracle), FusedGreedySharder(oracle))
        self._oracle = oracle
        self._search = LocalSearch(oracle, split=split)

    def shard(self, task: ShardingTask) -> ShardingPlan:
        """Returns a valid plan; raises PlanError if no device has memory for a table."""
        plans: list[Placed] = []
        for start in self._starts:
            try:
                plans.append(start.shard(task).placed(task))
            except PlanError:
                if start is self._starts[-1] and not plans:
                    raise
        found = [*plans, *self._search.improve(task, plans)]
        return StepPredictor(self._oracle, task).best_plan(found)
