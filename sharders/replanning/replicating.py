"""Plans with replica groups: the size of a group, its layout on nodes, and the plan inside it.

Fewer ranks in a group exchange less, over shorter ways, and hold more of the tables each, which
averages of the copies move. For each group size and layout, a sharder plans for a group. It does
not know the price of averages, which the rank that holds most sets. So where they take long, it
plans again with less memory, which spreads the tables evenly. The cheapest plan counts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.workload import PlanError, ShardingPlan, ShardingTask, UserError
from autoshard.workload.plans.replicas import ReplicaGroups, layouts

# Makes a plan of a task, and predicts its step in ms.
Decide = Callable[[ShardingTask], tuple[ShardingPlan, float]]

_EVEN = (1.25, 1.05)  # memory for plans anew, over the mean of devices
_LITTLE = 0.01  # of a step, below which it does not matter how long averages take


@dataclass(frozen=True)
class ReplicaPlan:
    """A plan of a group, and its price.

    Args:
        plan: Plan of a group; its `replicas` are the groups, None if there is one.
        task: Task of a group.
        groups: Groups, of which there may be one.
        step_ms: Expected step time without averages of the copies.
        sync_ms: Time of one average of the copies.
    """

    plan: ShardingPlan
    task: ShardingTask
    groups: ReplicaGroups
    step_ms: float
    sync_ms: float

    @property
    def shared_sync_ms(self) -> float:
        """Time of averages of the copies that counts for each step."""
        return self.sync_ms / self.groups.sync_interval

    @property
    def total_ms(self) -> float:
        """Expected step time, with its share of averages."""
        return self.step_ms + self.shared_sync_ms


@dataclass(frozen=True)
class NoReplicas:
    """A group size without a plan, and why there is none."""

    group_size: int
    reason: UserError


def plan_replicas(
    task: ShardingTask, sizes: Sequence[int], sync_interval: int, decide: Decide
) -> Iterator[ReplicaPlan | NoReplicas]:
    """Yields the cheapest plan of each group size, or why there is none.

    Args:
        task: Task of all devices, whose objective has a link.
        sizes: Group sizes.
        sync_interval: Steps from one average of the copies to the next.
        decide: Makes plans of groups.
    """
    for size in sizes:
        try:
            found = [
                plan
                for groups in layouts(task, size, sync_interval)
                for plan in _plans(task, groups, decide)
            ]
        except UserError as reason:
            yield NoReplicas(size, reason)
        else:
            yield min(found, key=lambda plan: plan.total_ms)


def _plans(task: ShardingTask, groups: ReplicaGroups, decide: Decide) -> Iterator[ReplicaPlan]:
    """Yields plans of a layout; PlanError if there is none."""
    link, own = task.objective.link, groups.task(task)
    assert link is not None

    def priced(limited: ShardingTask) -> ReplicaPlan:
        plan, step_ms = decide(limited)
        sync_ms = groups.sync_ms(plan, own, link)
        plan = replace(plan, replicas=groups if groups.count > 1 else None)
        return ReplicaPlan(plan, own, groups, step_ms, sync_ms)

    first = priced(own)
    yield first
    if len(own.devices) == 1 or first.shared_sync_ms < _LITTLE * first.step_ms:
        return
    mean = float(np.mean(first.plan.device_bytes(own)))
    for factor in _EVEN:
        try:
            yield priced(_with_at_most(own, int(factor * mean)))
        except PlanError:
            return


def _with_at_most(task: ShardingTask, usable_bytes: int) -> ShardingTask:
    """Returns the task of devices that use no more memory than that."""
    devices = tuple(
        replace(d, reserved_bytes=d.reserved_bytes + max(0, d.usable_bytes - usable_bytes))
        for d in task.devices
    )
    return replace(task, devices=devices)
