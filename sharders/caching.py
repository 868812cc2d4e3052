"""Tables in host memory, with caches on devices, where device memory is too small for all."""

import math
from dataclasses import replace

from autoshard.cost_model import EstimatedCosts
from autoshard.workload import PlanError, Sharder, ShardingPlan, ShardingTask
from autoshard.workload.host_memory import cached_rows
from autoshard.workload.sizes import format_bytes

# Of all memory: what is left lets pieces be placed, and devices be balanced.
_SHARES = (0.98, 0.95, 0.9, 0.8, 0.65, 0.5)
_WORSE = 2  # shares in a row, after which smaller ones are not tried


class CachingSharder:
    """Keeps tables in host memory where there is no plan without.

    Args:
        sharder: Plans for tables with caches as for any.
        oracle: Prices plans.
        host_bytes: Memory of the host for each device.
    """

    def __init__(self, sharder: Sharder, oracle: EstimatedCosts, host_bytes: int) -> None:
        self._sharder, self._oracle, self._host_bytes = sharder, oracle, host_bytes

    def shard(self, task: ShardingTask) -> ShardingPlan:
        """Returns a valid plan; raises PlanError if none is found."""
        lack: PlanError | None = None
        if sum(map(task.table_bytes, task.tables)) <= task.usable_bytes.sum():
            try:
                return self._sharder.shard(task)
            except PlanError as error:
                lack = error
        best: ShardingPlan | None = None
        best_ms, worse = math.inf, 0
        budgets = [share * float(task.usable_bytes.sum()) for share in _SHARES]
        for counts in cached_rows(task, budgets):
            try:
                plan = self._sharder.shard(task.with_cached_rows(counts))
                found = replace(plan, cached_rows=tuple(counts.items()))
                self._check_host(found, task)
            except PlanError as error:
                lack = error
                continue
            step_ms = self._oracle.step_ms(found, task)
            worse = worse + 1 if step_ms >= best_ms else 0
            if step_ms < best_ms:
                best, best_ms = found, step_ms
            if worse == _WORSE:
                break
        if best is None:
            assert lack is not None
            raise lack
        return best

    def _check_host(self, plan: ShardingPlan, task: ShardingTask) -> None:
        """Raises PlanError if a device's tables need more of the host's memory than there is."""
        held = plan.host_bytes(task)
        most = max(range(len(held)), key=held.__getitem__)
        if held[most] > self._host_bytes:
            raise PlanError(
                f"device {most} would keep {format_bytes(held[most])} in host memory, of which "
                f"each device has {format_bytes(self._host_bytes)}: give more with "
                "--host-memory-gb, or add devices"
            )
