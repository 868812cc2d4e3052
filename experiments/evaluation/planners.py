"""The planners of a comparison: sharders with what they require, and the plans that they make."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from autoshard.benchmark.plan_cost import PlanCost, price_plan
from autoshard.cost_model import EstimatedCosts
from autoshard.experiments.evaluation.task_sets import TaskSet, save_task
from autoshard.sharders import (
    HEURISTICS,
    MEASURE_SECONDS,
    SHARDERS,
    Policy,
    SharderContext,
    make_sharder,
)
from autoshard.workload import PlanError, Sharder, ShardingPlan, ShardingTask

if TYPE_CHECKING:
    from autoshard.sharders import Measurer

Maxima = Mapping[str, Sequence[float | None]]  # step of each sharder and task, ms; None: no plan

_WARM_UP_TABLES = 4


@dataclass(frozen=True)
class Outcome:
    """What a sharder made of a task. Without a plan it ran out of memory.

    Args:
        plan: The plan, which fits.
        seconds: Planning time without measuring; None for plans from elsewhere.
        measuring_seconds: Seconds that the sharder spent measuring.
        cost: Cost of the plan, once it is known.
    """

    plan: ShardingPlan | None = None
    seconds: float | None = None
    measuring_seconds: float = 0.0
    cost: PlanCost | None = None

    @property
    def step_ms(self) -> float | None:
        """Step time, in ms; None without a plan."""
        return None if self.cost is None else self.cost.step_ms


Outcomes = Mapping[str, Sequence[Outcome]]  # of each sharder for each task


@dataclass(frozen=True)
class Entry:
    """A task, and what each sharder made of it."""

    task: ShardingTask
    outcomes: Mapping[str, Outcome]


@dataclass(frozen=True)
class Planners:
    """Sharders by name, and what they require.

    Args:
        names: Names of the sharders.
        oracle: Oracle for the tasks' batch size.
        policy: Policy of those that have one.
        seed: Seed of those that draw.
        measure_seconds: Seconds that `autoshard_verified` measures for a task.
        others: Further policies by name: each makes one plan, as `policy` does.
    """

    names: Sequence[str]
    oracle: EstimatedCosts
    policy: Policy
    seed: int = 0
    measure_seconds: float = MEASURE_SECONDS
    others: Mapping[str, Policy] = field(default_factory=dict)

    def sharders(self, measurer: "Measurer | None" = None) -> dict[str, Sharder]:
        """Returns the sharders by name."""
        made = {name: self._made(name, self.policy, measurer) for name in self.names}
        return made | {name: self._made("policy", one) for name, one in self.others.items()}

    def entries(
        self,
        task_set: TaskSet,
        save: Path | None = None,
        measurer: "Measurer | None" = None,
        measuring: Callable[[], float] = lambda: 0.0,
    ) -> Iterator[Entry]:
        """Yields the tasks with the plans of all, which are made when they are asked for.

        Args:
            task_set: Tasks, and plans of other planners for them.
            save: Folder into which tasks are written as they come.
            measurer: Measures for sharders that do so.
            measuring: Returns the seconds that sharders have spent measuring so far.
        """
        sharders = self.sharders(measurer)
        late = {n for n, spec in SHARDERS.items() if "pool" in spec.needs or spec.time == "all"}
        warm_up({name: each for name, each in sharders.items() if name not in late}, task_set.first)
        for number, task in enumerate(task_set.tasks):
            if save is not None:
                save_task(save, number, task)
            theirs = {name: Outcome(some[number]) for name, some in task_set.plans.items()}
            yield Entry(task, plan_task(sharders, task, measuring) | theirs)

    def _made(self, name: str, policy: Policy, measurer: "Measurer | None" = None) -> Sharder:
        # An oracle for each: what one sharder has priced would cost the next no time.
        oracle = EstimatedCosts(self.oracle.model, self.oracle.batch_size)
        context = SharderContext(oracle, policy, measurer, self.measure_seconds, self.seed)
        return make_sharder(name, context)


def warm_up(sharders: Mapping[str, Sharder], task: ShardingTask) -> None:
    """Shards a few of the task's tables, so that no plan pays for a first call."""
    plan_task(sharders, replace(task, tables=task.tables[:_WARM_UP_TABLES], rules=()))


def plan_task(
    sharders: Mapping[str, Sharder],
    task: ShardingTask,
    measuring: Callable[[], float] = lambda: 0.0,
) -> dict[str, Outcome]:
    """Returns each sharder's plan and the seconds that it took, without costs."""
    return {name: _plan(sharder, task, measuring) for name, sharder in sharders.items()}


def make_plans(
    sharders: Mapping[str, Sharder], tasks: Sequence[ShardingTask]
) -> dict[str, list[Outcome]]:
    """Returns each sharder's plan for each task."""
    planned = [plan_task(sharders, task) for task in tasks]
    return {name: [outcomes[name] for outcomes in planned] for name in sharders}


def _plan(sharder: Sharder, task: ShardingTask, measuring: Callable[[], float]) -> Outcome:
    started, before = time.perf_counter(), measuring()
    plan: ShardingPlan | None
    try:
        plan = sharder.shard(task)
        seconds, measured = time.perf_counter() - started, measuring() - before
        plan.check(task)
    except PlanError:
        seconds, measured, plan = time.perf_counter() - started, measuring() - before, None
    return Outcome(plan, seconds - measured, measured)


def estimated(
    outcomes: Outcomes, tasks: Sequence[ShardingTask], oracle: EstimatedCosts
) -> dict[str, list[Outcome]]:
    """Returns the plans with the costs that the oracle estimates."""
    return {
        name: [
            o if o.plan is None else replace(o, cost=price_plan(o.plan, task, oracle))
            for o, task in zip(some, tasks, strict=True)
        ]
        for name, some in outcomes.items()
    }


def maxima_of(outcomes: Outcomes) -> dict[str, list[float | None]]:
    """Returns the step of each plan by its cost, in ms."""
    return {name: [outcome.step_ms for outcome in some] for name, some in outcomes.items()}


def best_heuristic(maxima: Maxima) -> str | None:
    """Returns the heuristic with the least mean step among those that found most plans; None if
    there is no heuristic.
    """
    heuristics = [name for name in maxima if name in HEURISTICS]

    def rank(name: str) -> tuple[int, float]:
        found = [ms for ms in maxima[name] if ms is not None]
        return len(maxima[name]) - len(found), statistics.mean(found) if found else float("inf")

    return min(heuristics, key=rank, default=None)


def best_of_each(maxima: Maxima) -> list[float | None]:
    """Returns the least step of any heuristic for each task; None where none found a plan.

    One heuristic for all tasks would be the one that finds most plans where memory is tight, which
    is not the one that a user would take where memory is loose.
    """
    heuristics = [values for name, values in maxima.items() if name in HEURISTICS]
    return [
        min((ms for ms in of_task if ms is not None), default=None)
        for of_task in zip(*heuristics, strict=True)
    ]
