"""`IncrementalSharder`: improves a plan in use, with a limit on the bytes that move."""

from autoshard.cost_model import EstimatedCosts, StepPredictor
from autoshard.sharders.replanning.world_change import CarriedPlan, carried_over
from autoshard.sharders.search.local_search import LocalSearch
from autoshard.workload import PlanError, ShardingPlan, ShardingTask
from autoshard.workload.plans.moves import moved_bytes, moves_between
from autoshard.workload.plans.sharded import Sharded


class IncrementalSharder:
    """Improves a plan in use by local search, within a limit of moved bytes. Copies and rows stay.

    The plan may be for another number of devices: it is carried over first (`carried_over`). What
    that moves may move anywhere, and does not count.

    Args:
        oracle: Predicts costs of plans.
        plan: Plan in use, of the task's tables.
        max_bytes: Maximum bytes of weights and optimizer state that move beside those that have to.
        seed: Seed of the search.
    """

    def __init__(
        self, oracle: EstimatedCosts, plan: ShardingPlan, max_bytes: int, seed: int = 0
    ) -> None:
        self._oracle = oracle
        self._plan = plan
        self._max_bytes = max_bytes
        self._seed = seed

    def start(self, task: ShardingTask) -> ShardingPlan:
        """Returns the plan in use, or what it is carried over to: all that moves has to.

        Raises:
            PlanError: The plan in use is not valid for the task, or cannot be carried over.
        """
        return self._carried(task).plan

    def shard(self, task: ShardingTask) -> ShardingPlan:
        """Returns a valid plan, which is not worse than `start`.

        Raises:
            PlanError: The plan in use is not valid for the task, or cannot be carried over.
        """
        start, was = self._carried(task)
        if not start.placements or not Sharded.can_be(start):
            return start
        max_bytes = moved_bytes(moves_between(was, start, task)) + self._max_bytes
        search = LocalSearch(self._oracle, seed=self._seed, near=(was, max_bytes))
        # Of what single devices hold, as copies may have no price. Blocks of rows stay where they
        # are by the rules of that task.
        rest, tables = start.columns_task(task, reserve=True), {t.name for t in task.tables}
        found = search.improve(rest, [Sharded(start.placed(task))])
        columns = ([pair for pair in f.placed if pair[0].table.name in tables] for f in found)
        plans = (start.with_columns(ShardingPlan.in_place(task, some)) for some in columns)
        near = [
            plan
            for plan in (start, *plans)
            if moved_bytes(moves_between(was, plan, task)) <= max_bytes
        ]
        predictor = StepPredictor(self._oracle, rest)
        return min(near, key=lambda plan: predictor.expected_ms(plan.placed(task)))

    def _carried(self, task: ShardingTask) -> CarriedPlan:
        self._oracle.check(task)
        if self._plan.num_devices != len(task.devices):
            return carried_over(self._oracle, self._plan, task)
        try:
            self._plan.check(task)
        except PlanError as fault:
            raise PlanError(f"the plan to stay near to is no plan for this task: {fault}") from None
        return CarriedPlan(self._plan, self._plan)
