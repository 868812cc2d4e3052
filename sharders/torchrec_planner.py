"""TorchRec's own planner, as one that decides."""

from autoshard.workload import ShardingPlan, ShardingTask


class TorchRecSharder:
    """Plans as TorchRec's planner does: whole tables, and with `column_wise` evenly split ones too.

    UserError where TorchRec is not installed.
    """

    def __init__(self, column_wise: bool) -> None:
        from autoshard.workload.torchrec import plan_of_torchrec  # the door: only who asks enters

        self._plan = plan_of_torchrec
        self._column_wise = column_wise

    def shard(self, task: ShardingTask) -> ShardingPlan:
        """A valid plan; PlanError where TorchRec finds none, or none that fits."""
        return self._plan(task, self._column_wise)
