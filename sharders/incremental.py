"""A better plan that is near to one in use: moving tables takes time, so not all may change."""

from autoshard.cost_model import EstimatedCosts, StepPredictor
from autoshard.sharders.local_search import LocalSearch
from autoshard.workload import PlanError, ShardingPlan, ShardingTask
from autoshard.workload.moves import moved_bytes, moves_between


class IncrementalSharder:
    """Improves a plan step by step, as far as so many bytes go.

    Args:
        oracle: prices plans.
        plan: that is in use, of the task's tables.
        most_bytes: of weights and optimizer state that may move.
        seed: of the search.
    """

    def __init__(
        self, oracle: EstimatedCosts, plan: ShardingPlan, max_bytes: int, seed: int = 0
    ) -> None:
        self._oracle = oracle
        self._plan = plan
        self._max_bytes = max_bytes
        self._seed = seed

    def shard(self, task: ShardingTask) -> ShardingPlan:
        """A valid plan, at worst the one in use; PlanError if that one is not valid."""
        self._oracle.check(task)
        try:
            self._plan.check(task)
        except PlanError as fault:
            raise PlanError(f"the plan to stay near to is no plan for this task: {fault}") from None
        predictor = StepPredictor(self._oracle, task)
        search = LocalSearch(self._oracle, seed=self._seed, near=(self._plan, self._max_bytes))
        found = [
            ShardingPlan.in_place(task, placed)
            for placed in search.improve(task, [self._plan.placed(task)])
        ]
        near = [
            plan
            for plan in (self._plan, *found)
            if moved_bytes(moves_between(self._plan, plan, task)) <= self._max_bytes
        ]
        return min(near, key=lambda plan: predictor.expected_ms(plan.placed(task)))
