"""The same tasks for all sharders: plans first, then what each plan costs."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from benchmark import PlanCost, price_plan
from cost_model import EstimatedCosts
from experiments.measuring import PlanMeter
from experiments.progress import following
from workload import PlanError, Sharder, ShardingPlan, ShardingTask

_WARM_UP_TABLES = 4


@dataclass(frozen=True)
class Outcome:
    """What a sharder made of a task, and in how many seconds. Out of memory: no plan, no cost."""

    seconds: float
    plan: ShardingPlan | None = None
    cost: PlanCost | None = None

    @property
    def max_ms(self) -> float | None:
        """What the slowest device computes; None without a plan."""
        return None if self.cost is None else self.cost.max_compute_ms


def make_plans(
    sharders: Mapping[str, Sharder], tasks: Sequence[ShardingTask]
) -> dict[str, list[Outcome]]:
    """A plan of each sharder for each task, and the seconds it took; no costs yet."""
    few = replace(tasks[0], tables=tasks[0].tables[:_WARM_UP_TABLES])
    for sharder in sharders.values():  # what a first call takes longer is not the sharder's
        _plan(sharder, few)
    outcomes: dict[str, list[Outcome]] = {name: [] for name in sharders}
    with following(len(tasks) * len(sharders), "plans") as step:
        for task in tasks:
            for name, sharder in sharders.items():
                outcomes[name].append(_plan(sharder, task))
                step()
    return outcomes


def _plan(sharder: Sharder, task: ShardingTask) -> Outcome:
    started = time.perf_counter()
    try:
        plan = sharder.shard(task)
        seconds = time.perf_counter() - started
        plan.check(task)
    except PlanError:
        return Outcome(time.perf_counter() - started)
    return Outcome(seconds, plan)


def estimated(
    outcomes: Mapping[str, Sequence[Outcome]], tasks: Sequence[ShardingTask], oracle: EstimatedCosts
) -> dict[str, list[Outcome]]:
    """The plans with their costs as the oracle estimates them."""
    return {
        name: [
            o if o.plan is None else replace(o, cost=price_plan(o.plan, task, oracle))
            for o, task in zip(some, tasks, strict=True)
        ]
        for name, some in outcomes.items()
    }


def measured(
    outcomes: Mapping[str, Sequence[Outcome]], tasks: Sequence[ShardingTask], judge: PlanMeter
) -> dict[str, list[Outcome]]:
    """The plans with their measured costs.

    Task by task, and another sharder's plan first in each: if the machine is slower for a while,
    it is so for all of them.
    """
    names = list(outcomes)
    found: dict[str, list[Outcome]] = {name: [] for name in names}
    with following(len(tasks), "tasks measured") as step:
        for number, task in enumerate(tasks):
            first = number % len(names)
            plans = {
                name: plan
                for name in (*names[first:], *names[:first])
                if (plan := outcomes[name][number].plan) is not None
            }
            costs = dict(zip(plans, judge.costs(task, list(plans.values())), strict=True))
            for name in names:
                found[name].append(replace(outcomes[name][number], cost=costs.get(name)))
            step()
    return found
