"""Plans in files, held against the tables that they should be of."""

from pathlib import Path

from autoshard.workload import ShardingPlan, ShardingTask
from autoshard.workload.documents import naming


def read_plan(path: Path, task: ShardingTask) -> ShardingPlan:
    """The plan, if it is one of the task; UserError names the file and says what is other."""
    plan = ShardingPlan.load(path)
    with naming(path):
        plan.check_places(task)
    return plan
