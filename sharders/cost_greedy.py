"""Greedy placement by learned costs: of tables alone, or of each device together with the table."""

from autoshard.cost_model import EstimatedCosts
from autoshard.cost_model.training import one_thread
from autoshard.sharders.heuristics import greedy_plan, place_in_turn
from autoshard.workload import Shard, ShardingPlan, ShardingTask


class AloneGreedySharder:
    """Balances the sums of what tables cost alone: what a single-table cost model can do."""

    def __init__(self, oracle: EstimatedCosts) -> None:
        self._oracle = oracle

    @one_thread()
    def shard(self, task: ShardingTask) -> ShardingPlan:
        """A valid plan; PlanError names the table that no device has room for."""
        self._oracle.check(task)
        alone = self._oracle.prices([Shard((table.whole(),)) for table in task.tables])
        return greedy_plan(task, alone.total_ms.tolist())


class FusedGreedySharder:
    """Puts each table where device and table together cost least."""

    def __init__(self, oracle: EstimatedCosts) -> None:
        self._oracle = oracle

    @one_thread()
    def shard(self, task: ShardingTask) -> ShardingPlan:
        """A valid plan; PlanError names the table that no device has room for."""
        self._oracle.check(task)
        slices = [table.whole() for table in task.tables]
        devices = self._oracle.devices(slices, len(task.devices))
        return place_in_turn(
            task,
            devices.alone().total_ms.tolist(),
            lambda number: devices.with_each([number]).total_ms[:, 0].tolist(),
            devices.put,
        )
