"""Plans in files, held against the tasks that they should be of."""

from pathlib import Path

from autoshard.workload import ShardingPlan, ShardingTask
from autoshard.workload.documents import naming


def read_plan(path: Path, task: ShardingTask, fitting: bool) -> ShardingPlan:
    """The plan, if it is one of the task; UserError names the file and says what is other.

    `fitting`: it must be valid in all, as one that is to run. One that runs already may not be.
    """
    plan = ShardingPlan.load(path)
    with naming(path):
        (plan.check if fitting else plan.check_places)(task)
    return plan
