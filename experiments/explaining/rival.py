"""The best heuristic's plan: what any plan is held against."""

from contextlib import suppress
from dataclasses import dataclass

from autoshard.cost_model import Outlook, TaskOutlook
from autoshard.sharders import HEURISTICS, Means, make_sharder
from autoshard.workload import Objective, PlanError, ShardingPlan, ShardingTask

_ALIKE = 5e-4  # a relative difference that would read 0.0 %


@dataclass(frozen=True)
class Rival:
    """A heuristic, its plan, and what that is expected to cost."""

    name: str
    plan: ShardingPlan
    outlook: Outlook


def best_heuristic(task: ShardingTask, outlook: TaskOutlook, seed: int) -> Rival | None:
    """The one by whose plan a step is expected to take least; None if no plan fits."""
    found = []
    for name in HEURISTICS:
        with suppress(PlanError):
            plan = make_sharder(name, Means(seed=seed)).shard(task)
            found.append(Rival(name, plan, outlook.of(plan)))
    return min(found, key=lambda rival: rival.outlook.expected_ms, default=None)


def beside(name: str, ours: Outlook, rival: Rival | None, objective: Objective) -> str:
    """What a step is expected to take, and how that is to the best heuristic's."""
    low, high = ours.interval_ms
    line = (
        f"expected: a step takes {ours.expected_ms:.2f} ms ({objective}; 90 % interval {low:.2f} "
        f"to {high:.2f})"
    )
    if rival is None:
        return f"{line}; no heuristic finds a plan that fits"
    than = ours.over(rival.outlook)
    if name == rival.name or abs(1 - than.ratio) < _ALIKE:
        return f"{line}, the least of any heuristic"
    less = f"{1 - than.ratio:.1%} less" if than.ratio < 1 else f"{than.ratio - 1:.1%} more"
    return (
        f"{line}, {less} than by the best heuristic ({rival.name}, {rival.outlook.expected_ms:.2f} "
        f"ms): {than.low:.3f} to {than.high:.3f} of it, faster with probability "
        f"{than.probability:.2f}"
    )
