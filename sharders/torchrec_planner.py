"""TorchRec's own planner as a sharder."""

from autoshard.workload import ShardingPlan, ShardingTask


class TorchRecSharder:
    """Plans by TorchRec's planner.

    Args:
        column_wise: Whether tables may also be split evenly by columns.

    Raises:
        UserError: TorchRec is not installed.
    """

    def __init__(self, column_wise: bool) -> None:
        from autoshard.workload.torchrec import plan_of_torchrec  # an optional dependency

        self._plan = plan_of_torchrec
        self._column_wise = column_wise

    def shard(self, task: ShardingTask) -> ShardingPlan:
        """Returns a valid plan; raises PlanError if TorchRec finds none, or it does not fit."""
        return self._plan(task, self._column_wise)
