"""Sharders that know columns alone, made to obey rules for copies and rows.

Tables are kept in host memory where device memory is too small for all.
"""

import math

from autoshard.cost_model import EstimatedCosts
from autoshard.workload import PlanError, Sharder, ShardingPlan, ShardingTask
from autoshard.workload.packing.table_options import TableOptions, until_worse
from autoshard.workload.ways import OptionLimits
from autoshard.workload.ways.option import Options


class RequiredOptions:
    """Copies tables and shards them by rows where rules say so; a sharder places the others.

    Args:
        sharder: Places columns of tables.
        oracle: Prices plans; only needed where tables may be in host memory.
        host_bytes: Memory of the host for each device, for tables for which device memory is too
            small; 0 if none may be there.
    """

    def __init__(
        self, sharder: Sharder, oracle: EstimatedCosts | None = None, host_bytes: int = 0
    ) -> None:
        self._sharder, self._oracle, self._host_bytes = sharder, oracle, host_bytes

    def shard(self, task: ShardingTask) -> ShardingPlan:
        """Returns a valid plan; raises PlanError if none is found."""
        options = TableOptions(OptionLimits.required(task), self._host_bytes)
        lack: PlanError | None = None
        if not options.cached or options.fit_into_devices:
            try:
                return options.sharded(self._sharder, options.required).plan(task)
            except PlanError as error:
                lack = error
        found: list[tuple[float, ShardingPlan]] = []

        def step_ms(some: Options) -> float:
            nonlocal lack
            assert self._oracle is not None
            try:
                (plan,) = options.allowed([options.sharded(self._sharder, some)])
            except PlanError as error:
                lack = error
                return math.inf
            found.append((self._oracle.step_ms(plan, task), plan))
            return found[-1][0]

        until_worse(map(step_ms, options.cached), found)
        if not found:
            assert lack is not None
            raise lack
        return min(found, key=lambda each: each[0])[1]
