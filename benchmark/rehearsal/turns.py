"""Trains several plans of a task interleaved, so that disturbances affect all alike."""

import time
from collections.abc import Mapping

from autoshard.benchmark.rehearsal.rehearsal import RankGroup
from autoshard.benchmark.rehearsal.times import Rehearsal
from autoshard.workload import ShardingPlan, ShardingTask

_STEPS = 10  # of a plan in a round
_WARM_UP = 3  # after which the caches hold nothing of the plan before
_FEWEST_ROUNDS = 3


def train_interleaved(
    group: RankGroup,
    task: ShardingTask,
    plans: Mapping[str, ShardingPlan | None],
    seconds: float,
) -> dict[str, list[Rehearsal]]:
    """Trains a few steps by each plan in each round.

    Args:
        group: Running ranks.
        task: Task of all plans.
        plans: Plans by name; None where TorchRec's planner decides.
        seconds: Time after which no round begins, except for the first few.
    """
    together = _fit_together(group, task, plans)
    prepared: set[str] = set()
    found: dict[str, list[Rehearsal]] = {name: [] for name in plans}
    names, began = list(plans), time.monotonic()
    while names and (len(found[names[-1]]) < _FEWEST_ROUNDS or time.monotonic() < began + seconds):
        for name in names:
            if name not in prepared:
                group.prepare(name, task, plans[name])
                prepared.add(name)
            found[name].append(group.train(name, _STEPS, _WARM_UP))
            if not together:
                group.forget(name)
                prepared.remove(name)
        names = [*names[1:], names[0]]
    for name in prepared:
        group.forget(name)
    return found


def _fit_together(
    group: RankGroup, task: ShardingTask, plans: Mapping[str, ShardingPlan | None]
) -> bool:
    """Returns whether ranks can hold the models of all plans at once; else each is built anew."""
    task_bytes = task.operator.memory([table.whole() for table in task.tables], task.batch_size)
    return all(len(plans) * task_bytes.total <= device.memory_bytes for device in group.devices())
