"""`IncrementalSharder`: improves a plan in use, with a limit on the bytes that move."""

from autoshard.cost_model import EstimatedCosts, StepPredictor
from autoshard.sharders.local_search import LocalSearch
from autoshard.workload import PlanError, ShardingPlan, ShardingTask
from autoshard.workload.moves import moved_bytes, moves_between


class IncrementalSharder:
    """Improves a plan in use by local search, within a limit of moved bytes. Copies and rows stay.

    Args:
        oracle: Predicts costs of plans.
        plan: Plan in use, of the task's tables.
        max_bytes: Maximum bytes of weights and optimizer state that move.
        seed: Seed of the search.
    """

    def __init__(
        self, oracle: EstimatedCosts, plan: ShardingPlan, max_bytes: int, seed: int = 0
    ) -> None:
        self._oracle = oracle
        self._plan = plan
        self._max_bytes = max_bytes
        self._seed = seed

    def shard(self, task: ShardingTask) -> ShardingPlan:
        """Returns a valid plan, which is not worse than the one in use.

        Raises:
            PlanError: The plan in use is not valid for the task.
        """
        self._oracle.check(task)
        try:
            self._plan.check(task)
        except PlanError as fault:
            raise PlanError(f"the plan to stay near to is no plan for this task: {fault}") from None
        old, rest = self._plan.on_single_devices(task, reserve=True)
        if not old.placements or self._plan.has_grids:
            return self._plan  # grids are not planned here
        predictor = StepPredictor(self._oracle, rest)
        search = LocalSearch(self._oracle, seed=self._seed, near=(old, self._max_bytes))
        found = [
            ShardingPlan.in_place(rest, placed)
            for placed in search.improve(rest, [old.placed(rest)])
        ]
        near = [
            plan
            for plan in (old, *found)
            if moved_bytes(moves_between(old, plan, rest)) <= self._max_bytes
        ]
        best = min(near, key=lambda plan: predictor.expected_ms(plan.placed(rest)))
        return best.with_ways_of(self._plan, task)
