"""The best heuristic's plan: what any plan is held against."""

from contextlib import suppress
from dataclasses import dataclass

from autoshard.cost_model import Outlook, TaskOutlook
from autoshard.sharders import HEURISTICS, Means, make_sharder
from autoshard.workload import PlanError, ShardingPlan, ShardingTask


@dataclass(frozen=True)
class Rival:
    """A heuristic, its plan, and what that is expected to cost."""

    name: str
    plan: ShardingPlan
    outlook: Outlook


def best_heuristic(task: ShardingTask, outlook: TaskOutlook, seed: int) -> Rival | None:
    """The one whose slowest device is expected to compute least; None if no plan fits."""
    found = []
    for name in HEURISTICS:
        with suppress(PlanError):
            plan = make_sharder(name, Means(seed=seed)).shard(task)
            found.append(Rival(name, plan, outlook.of(plan)))
    return min(found, key=lambda rival: rival.outlook.expected_ms, default=None)
