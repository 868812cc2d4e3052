"""Greedy placement by learned costs: of tables alone, or of each device together with the table."""

from autoshard.cost_model import EstimatedCosts
from autoshard.cost_model.training import one_thread
from autoshard.sharders.heuristics import greedy_plan, place_in_turn, sum_of
from autoshard.workload import Shard, ShardingPlan, ShardingTask
from autoshard.workload.terms import Terms


class AloneGreedySharder:
    """Balances the sums of what tables cost alone: what a single-table cost model can do."""

    def __init__(self, oracle: EstimatedCosts) -> None:
        self._oracle = oracle

    @one_thread()
    def shard(self, task: ShardingTask) -> ShardingPlan:
        """A valid plan; PlanError names the table that no device has room for."""
        self._oracle.check(task)
        alone = self._oracle.prices([Shard((table.whole(),)) for table in task.tables])
        names = [table.name for table in task.tables]
        costs = dict(zip(names, alone.total_ms.tolist(), strict=True))
        bundles = Terms(task).bundles()
        return greedy_plan(task, bundles, [sum_of(bundle, costs) for bundle in bundles])


class FusedGreedySharder:
    """Puts each table where device and table together cost least."""

    def __init__(self, oracle: EstimatedCosts) -> None:
        self._oracle = oracle

    @one_thread()
    def shard(self, task: ShardingTask) -> ShardingPlan:
        """A valid plan; PlanError names the table that no device has room for."""
        self._oracle.check(task)
        bundles = Terms(task).bundles()
        devices = self._oracle.devices(bundles, len(task.devices))
        return place_in_turn(
            task,
            bundles,
            devices.alone().total_ms.tolist(),
            lambda number: devices.with_each([number]).total_ms[:, 0].tolist(),
            devices.put,
        )
