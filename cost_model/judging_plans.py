"""What a plan has of its task's objective, by the mean of what is not known."""

import numpy as np

from autoshard.cost_model.oracle import EstimatedCosts
from autoshard.workload import ShardingPlan, ShardingTask
from autoshard.workload.step_price import StepPrice


def planned_ms(oracle: EstimatedCosts, task: ShardingTask, plan: ShardingPlan) -> float:
    """Milliseconds of the plan by the task's objective, all-to-alls of its link included."""
    shards = plan.shards(task)
    filled = [number for number, shard in enumerate(shards) if shard is not None]
    prices = oracle.prices([shard for shard in shards if shard is not None])
    forward, backward = np.zeros((2, len(shards)))
    forward[filled], backward[filled] = prices.forward_ms.numpy(), prices.backward_ms.numpy()
    columns = np.array([0.0 if shard is None else shard.total_dim for shard in shards])
    stages = StepPrice.of_task(task).stages_ms(forward, backward, columns)
    return sum(float(stage.max()) for stage in stages)
