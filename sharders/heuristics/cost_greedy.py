"""Greedy placement by predicted costs: of tables alone, or of each device with the table.

The cost of a device is the sum of forward and backward time and of the time to send its columns in
both all-to-alls.
"""

import numpy as np

from autoshard.cost_model import EstimatedCosts
from autoshard.cost_model.pricing.placement_state import TaskPlacement, UnitCatalog
from autoshard.cost_model.threads import one_thread
from autoshard.sharders.heuristics.heuristics import greedy_plan, place_in_turn
from autoshard.workload import ShardingPlan, ShardingTask
from autoshard.workload.arrays import Floats, Ints
from autoshard.workload.packing.admission import RuleMasks
from autoshard.workload.plans.step_price import StepPrice

_AT_ONCE = 32  # units that are priced together, if there are as many devices to take one each


class AloneGreedySharder:
    """Balances the sums of costs of tables alone, as a single-table cost model can."""

    def __init__(self, oracle: EstimatedCosts) -> None:
        self._oracle = oracle

    @one_thread()
    def shard(self, task: ShardingTask) -> ShardingPlan:
        """Returns a valid plan; raises PlanError if no device has memory for a table."""
        self._oracle.check(task)
        alone_ms = self._oracle.alone_ms([table.whole() for table in task.tables])
        costs = {t.name: ms for t, ms in zip(task.tables, alone_ms.tolist(), strict=True)}
        slowness = self._oracle.slowness(task) if task.hardware else None
        return greedy_plan(task, costs, StepPrice.of_task(task).column_ms(), slowness)


class FusedGreedySharder:
    """Places each table where the cost of the device with the table is lowest."""

    def __init__(self, oracle: EstimatedCosts) -> None:
        self._oracle = oracle

    @one_thread()
    def shard(self, task: ShardingTask) -> ShardingPlan:
        """Returns a valid plan; raises PlanError if no device has memory for a table."""
        self._oracle.check(task)
        masks = RuleMasks(task)
        pricing = self._oracle.expectation()  # scenarios would take twice as long
        catalog = UnitCatalog(pricing, task, masks, masks.units)
        devices = TaskPlacement(catalog)
        column_ms = devices.price.column_ms()

        def burdens(numbers: Ints) -> Floats:
            compute = devices.compute_joined(numbers).sum((2, 3))
            columns = devices.columns[0] + catalog.columns[numbers][:, None]
            return np.asarray(compute.double().numpy() + column_ms * columns)

        alone = pricing.price(catalog.amounts).sum((1, 2)).double().numpy()
        costs = alone + column_ms * catalog.columns
        at_once = min(len(task.devices), _AT_ONCE)
        return place_in_turn(task, masks, devices, costs.tolist(), burdens, devices.add, at_once)
