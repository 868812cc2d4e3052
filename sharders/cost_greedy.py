"""Greedy placement by predicted costs: of tables alone, or of each device with the table.

The cost of a device is the sum of forward and backward time and of the time to send its columns in
both all-to-alls.
"""

from weakref import WeakKeyDictionary

import numpy as np

from autoshard.cost_model import EstimatedCosts
from autoshard.cost_model.placement_state import TaskPlacement, UnitCatalog
from autoshard.cost_model.threads import one_thread
from autoshard.sharders.heuristics import greedy_plan, place_in_turn
from autoshard.workload import ShardingPlan, ShardingTask
from autoshard.workload.admission import RuleMasks
from autoshard.workload.arrays import Floats
from autoshard.workload.step_price import StepPrice


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
        return greedy_plan(task, costs, StepPrice.of_task(task).column_ms())


_MAX_KNOWN = 8  # plans of an oracle that are kept: copies, rows and searches ask for the same
_known: WeakKeyDictionary[EstimatedCosts, dict[ShardingTask, ShardingPlan]] = WeakKeyDictionary()


class FusedGreedySharder:
    """Places each table where the cost of the device with the table is lowest.

    The latest plans of an oracle are kept.
    """

    def __init__(self, oracle: EstimatedCosts) -> None:
        self._oracle = oracle

    def shard(self, task: ShardingTask) -> ShardingPlan:
        """Returns a valid plan; raises PlanError if no device has memory for a table."""
        known = _known.setdefault(self._oracle, {})
        if task not in known:
            found = self._plan(task)
            if len(known) == _MAX_KNOWN:
                del known[next(iter(known))]
            known[task] = found
        return known[task]

    @one_thread()
    def _plan(self, task: ShardingTask) -> ShardingPlan:
        self._oracle.check(task)
        masks = RuleMasks(task)
        pricing = self._oracle.expectation()  # scenarios would take twice as long
        catalog = UnitCatalog(pricing, task, masks, masks.units)
        devices, numbers = TaskPlacement(catalog), np.arange(len(masks.units))
        column_ms = devices.price.column_ms()

        def burden(number: int) -> Floats:
            compute = devices.compute_joined(numbers[number : number + 1]).sum((0, 2, 3))
            columns = devices.columns[0] + catalog.columns[number]
            return np.asarray(compute.double().numpy() + column_ms * columns)

        alone = pricing.price(catalog.amounts).sum((1, 2)).double().numpy()
        costs = alone + column_ms * catalog.columns
        return place_in_turn(task, masks, devices, costs.tolist(), burden, devices.add)
