"""The same tasks for all sharders: their plans, what these cost, and which heuristic is best."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.benchmark import PlanCost, price_plan
from autoshard.cost_model import EstimatedCosts
from autoshard.experiments.judging.statistics import Floats, Ratio
from autoshard.sharders import HEURISTICS
from autoshard.workload import PlanError, Sharder, ShardingPlan, ShardingTask

Maxima = Mapping[str, Sequence[float | None]]  # ms of each sharder for each task; None: no plan

_WARM_UP_TABLES = 4


@dataclass(frozen=True)
class Outcome:
    """What a sharder made of a task. Out of memory: no plan, no cost.

    Args:
        plan: that fits.
        seconds: to make it, measuring left out; None if it came from elsewhere.
        measuring_seconds: that the sharder spent measuring meanwhile.
        cost: of the plan, once it is known.
    """

    plan: ShardingPlan | None = None
    seconds: float | None = None
    measuring_seconds: float = 0.0
    cost: PlanCost | None = None

    @property
    def step_ms(self) -> float | None:
        """What a step takes; None without a plan."""
        return None if self.cost is None else self.cost.step_ms


Outcomes = Mapping[str, Sequence[Outcome]]  # of each sharder for each task


def warm_up(sharders: Mapping[str, Sharder], task: ShardingTask) -> None:
    """Shard a few of the task's tables: what a first call takes longer is not the sharder's."""
    few = replace(task, tables=task.tables[:_WARM_UP_TABLES], rules=())
    plan_task(sharders, few)


def plan_task(
    sharders: Mapping[str, Sharder],
    task: ShardingTask,
    measuring: Callable[[], float] = lambda: 0.0,
) -> dict[str, Outcome]:
    """A plan of each sharder, and the seconds it took; no costs yet.

    `measuring` tells how many seconds sharders have spent measuring so far.
    """
    return {name: _plan(sharder, task, measuring) for name, sharder in sharders.items()}


def make_plans(
    sharders: Mapping[str, Sharder],
    tasks: Sequence[ShardingTask],
    step: Callable[[], None] = lambda: None,
) -> dict[str, list[Outcome]]:
    """A plan of each sharder for each task; `step` is called after each task."""
    outcomes: dict[str, list[Outcome]] = {name: [] for name in sharders}
    for task in tasks:
        for name, outcome in plan_task(sharders, task).items():
            outcomes[name].append(outcome)
        step()
    return outcomes


def _plan(sharder: Sharder, task: ShardingTask, measuring: Callable[[], float]) -> Outcome:
    started, before = time.perf_counter(), measuring()

    def outcome(plan: ShardingPlan | None) -> Outcome:
        measured = measuring() - before
        return Outcome(plan, time.perf_counter() - started - measured, measured)

    try:
        found = outcome(sharder.shard(task))
        assert found.plan is not None
        found.plan.check(task)
    except PlanError:
        return outcome(None)
    return found


def estimated(
    outcomes: Outcomes, tasks: Sequence[ShardingTask], oracle: EstimatedCosts
) -> dict[str, list[Outcome]]:
    """The plans with their costs as the oracle estimates them, all-to-alls by the objective."""
    return {
        name: [
            o if o.plan is None else replace(o, cost=price_plan(o.plan, task, oracle))
            for o, task in zip(some, tasks, strict=True)
        ]
        for name, some in outcomes.items()
    }


def maxima_of(outcomes: Outcomes) -> dict[str, list[float | None]]:
    """What a step takes by each plan, as its cost says."""
    return {name: [outcome.step_ms for outcome in some] for name, some in outcomes.items()}


def best_heuristic(maxima: Maxima) -> str | None:
    """The one with the least mean among those that found most plans; None if none is compared."""
    heuristics = [name for name in maxima if name in HEURISTICS]

    def rank(name: str) -> tuple[int, float]:
        found = [ms for ms in maxima[name] if ms is not None]
        return len(maxima[name]) - len(found), statistics.mean(found) if found else float("inf")

    return min(heuristics, key=rank, default=None)


def best_of_each(maxima: Maxima) -> list[float | None]:
    """What the best heuristic of each task needs; None where none found a plan.

    One heuristic for all tasks would be that which finds most plans where memory is tight, and
    that is not the one that a user would take where memory is loose.
    """
    heuristics = [values for name, values in maxima.items() if name in HEURISTICS]
    return [
        min((ms for ms in of_task if ms is not None), default=None)
        for of_task in zip(*heuristics, strict=True)
    ]


def as_known(maxima: Sequence[float | None]) -> Floats:
    """Steps that are certain, as one scenario: NaN without a plan."""
    return np.array([[np.nan if ms is None else ms for ms in maxima]])


def relative(ours: Sequence[float | None], theirs: Sequence[float | None]) -> Ratio | None:
    """Mean of ours over mean of theirs, on tasks for which both have a plan; None without any."""
    return Ratio.of(as_known(ours), as_known(theirs))


def mean_ratio(ours: Sequence[float | None], theirs: Sequence[float | None]) -> float | None:
    """The mean of ours over theirs, on tasks for which both have a plan, those with long steps and
    with short ones alike; None without any.
    """
    both = np.array([ours, theirs], float)  # None becomes NaN
    ratios = (both[0] / both[1])[~np.isnan(both).any(0)]
    return float(ratios.mean()) if len(ratios) else None
