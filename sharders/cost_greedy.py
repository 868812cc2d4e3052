"""Greedy placement by learned costs: of tables alone, or of each device together with the table.

Costs are all that counts of a device's step: forward, backward, and what its columns take to be
sent in both all-to-alls.
"""

from collections.abc import Sequence

import numpy as np
import torch

from autoshard.cost_model import DeviceSums, EstimatedCosts
from autoshard.cost_model.inputs import bundle_amounts
from autoshard.cost_model.training import one_thread
from autoshard.sharders.heuristics import Floats, greedy_plan, place_in_turn, sum_of
from autoshard.workload import ShardingPlan, ShardingTask
from autoshard.workload.step_price import StepPrice
from autoshard.workload.terms import Bundle, Terms


class AloneGreedySharder:
    """Balances the sums of what tables cost alone: what a single-table cost model can do."""

    def __init__(self, oracle: EstimatedCosts) -> None:
        self._oracle = oracle

    @one_thread()
    def shard(self, task: ShardingTask) -> ShardingPlan:
        """A valid plan; PlanError names the table that no device has room for."""
        self._oracle.check(task)
        alone = self._oracle.devices([table.whole() for table in task.tables], 1).alone()
        names = [table.name for table in task.tables]
        costs = dict(zip(names, alone.total_ms.tolist(), strict=True))
        bundles = Terms(task).bundles()
        sent = _sent_ms(task, bundles)
        each = [sum_of(bundle, costs) + ms for bundle, ms in zip(bundles, sent, strict=True)]
        return greedy_plan(task, bundles, each)


class FusedGreedySharder:
    """Puts each table where device and table together cost least."""

    def __init__(self, oracle: EstimatedCosts) -> None:
        self._oracle = oracle

    @one_thread()
    def shard(self, task: ShardingTask) -> ShardingPlan:
        """A valid plan; PlanError names the table that no device has room for."""
        self._oracle.check(task)
        bundles = Terms(task).bundles()
        pricing = self._oracle.expectation()  # what is not known of costs would take as long again
        amounts = bundle_amounts(pricing.amounts, bundles)
        devices = DeviceSums(pricing, amounts, len(task.devices))
        sent, sending = torch.tensor(_sent_ms(task, bundles)), torch.zeros(len(task.devices))
        each = torch.split(torch.arange(len(bundles)), 1)  # lists of one take longer to index by

        def burden(number: int) -> Floats:
            computing = devices.with_each(each[number]).sum((1, 2, 3))
            return np.asarray((computing + sending + sent[number]).double().numpy())

        def placed(number: int, device: int) -> None:
            devices.put(number, device)
            sending[device] += sent[number]

        alone = (devices.alone().sum((1, 2)) + sent).tolist()
        return place_in_turn(task, bundles, alone, burden, placed)


def _sent_ms(task: ShardingTask, bundles: Sequence[Bundle]) -> list[float]:
    """Milliseconds that the columns of each bundle are sent for in the all-to-alls that count."""
    each = float(StepPrice.of_task(task).column_ms())
    return [each * sum(piece.output_width for piece in bundle.slices) for bundle in bundles]
