"""Local search over a cost model: moves, swaps and splits of tables until none helps any more."""

import math
import time
from collections.abc import Callable, Sequence
from itertools import count

import numpy as np

from autoshard.cost_model import EstimatedCosts
from autoshard.cost_model.step_prediction import Placed, StepPredictor
from autoshard.cost_model.training import one_thread
from autoshard.sharders.cost_greedy import AloneGreedySharder, FusedGreedySharder
from autoshard.sharders.plan_search import PlanSearch
from autoshard.workload import PlanError, Sharder, ShardingPlan, ShardingTask
from autoshard.workload.step_price import norm_power

# The norm of the devices' costs that is minimised in the mean: softer than their maximum, for what
# evens out devices that are not the slowest helps the next move.
_SOFT = 12.0
_SCENARIOS = 16  # that the end of the search goes by
_LAST_SHARE = 0.2  # of the seconds is for that end


class LocalSearch:
    """Improves plans, table by table: first what they cost in the mean, then in scenarios.

    A search finds the mistakes of its model, so it is kicked away from its optimum only a few
    times, by turns with random moves and with a split. Scenarios tell which plans stand or fall
    with what is not known.

    Args:
        oracle: prices devices.
        kicks: restarts from a change of the best plan so far.
        split: allow tables to be split by columns.
        seed: of the kicks, and of scenarios.
        near: A plan in use, and the bytes that may move away from it; by default none.
        clock: seconds.
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
        """Valid plans that the search came to from the best of these: the last ones are the best,
        by the scenarios that it went by.

        With `seconds` it is kicked until they are over, however often, and ends where it is then.
        """
        until = math.inf if seconds is None else self._clock() + (1 - _LAST_SHARE) * seconds

        def late() -> bool:
            return self._clock() > until

        mean = self._oracle.expectation()
        searches = [PlanSearch(mean, task, _SOFT, start, self._near) for start in starts]
        best = min(searches, key=PlanSearch.objective)
        best.descend(self._split, late)
        rng = np.random.default_rng(self._seed)
        for number in count() if seconds is not None else range(self._kicks):
            if late():
                break
            other = PlanSearch(mean, task, _SOFT, best.placed(), self._near)
            # By turns: what holds a device up is halved, though it helps only after other moves.
            if not (self._split and number % 2 and other.split_costliest(number // 2)):
                other.kick(rng)
            other.descend(self._split, late)
            if other.objective() < best.objective():
                best = other
        power = norm_power(self._oracle.residuals.prior.rest)
        scenarios = self._oracle.scenarios(task.tables, _SCENARIOS, self._seed)
        last = PlanSearch(scenarios, task, power, best.placed(), self._near)
        if seconds is not None:
            until += _LAST_SHARE * seconds
        last.descend(self._split, late)
        return [best.placed(), last.placed()]


class LocalSearchSharder:
    """Local search from the better of the two greedy plans by cost."""

    def __init__(self, oracle: EstimatedCosts, split: bool = True) -> None:
        self._starts: tuple[Sharder, ...] = (AloneGreedySharder(oracle), FusedGreedySharder(oracle))
        self._oracle = oracle
        self._search = LocalSearch(oracle, split=split)

    def shard(self, task: ShardingTask) -> ShardingPlan:
        """A valid plan; PlanError names the table that no device has room for, as a whole."""
        plans, faults = [], []
        for start in self._starts:
            try:
                plans.append(start.shard(task).placed(task))
            except PlanError as fault:
                faults.append(fault)
        if not plans:
            raise faults[0]
        found: list[Placed] = [*plans, *self._search.improve(task, plans)]
        return StepPredictor(self._oracle, task).best_plan(found)
