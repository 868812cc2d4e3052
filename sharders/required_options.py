"""Sharders that know columns alone, made to obey rules for copies and rows.

Tables are kept in host memory where device memory is too small for all.
"""

import math

from autoshard.cost_model import EstimatedCosts
from autoshard.workload import PlanError, Sharder, ShardingPlan, ShardingTask
from autoshard.workload.packing.table_options import TableOptions

_WORSE = 2  # smaller caches in a row that give worse plans, after which none are tried


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
        options = TableOptions(task, copies=False, rows=False, host_bytes=self._host_bytes)
        lack: PlanError | None = None
        if not options.cached or options.fit_into_devices:
            try:
                return options.sharded(self._sharder, options.required).plan(task)
            except PlanError as error:
                lack = error
        best, best_ms, worse = None, math.inf, 0
        for some in options.cached:
            try:
                plan = options.sharded(self._sharder, some).plan(task)
                options.check_host(plan)
            except PlanError as error:
                lack = error
                continue
            assert self._oracle is not None
            step_ms = self._oracle.step_ms(plan, task)
            worse = worse + 1 if step_ms >= best_ms else 0
            if step_ms < best_ms:
                best, best_ms = plan, step_ms
            if worse == _WORSE:
                break
        if best is None:
            assert lack is not None
            raise lack
        return best
