"""Sharders of a comparison, and the plans that they make."""

import math
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING

from autoshard.benchmark.plan_cost import PlanCost, price_plan
from autoshard.cost_model import EstimatedCosts
from autoshard.experiments.console.progress import following
from autoshard.experiments.evaluation.task_sets import TaskSet
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
    from autoshard.cost_model.learning.measured_knowledge import MeasuredKnowledge
    from autoshard.sharders import Measurer

Steps = Mapping[str, Sequence[float | None]]  # step times by sharder and task, ms; None: no plan

_WARM_UP_TABLES = 4


@dataclass(frozen=True)
class Outcome:
    """The result of a sharder for a task."""

    plan: ShardingPlan | None = None  # a valid plan; None if the sharder ran out of memory
    # planning time without measuring; None for plans of other planners
    seconds: float | None = None
    measuring_seconds: float = 0.0  # time that the sharder spent measuring
    cost: PlanCost | None = None  # cost of the plan, once it is known

    @property
    def step_ms(self) -> float | None:
        """Step time, in ms; None without a plan."""
        return None if self.cost is None else self.cost.step_ms


Outcomes = Mapping[str, Sequence[Outcome]]  # outcomes by sharder and task


@dataclass(frozen=True)
class PlannedTask:
    """A task with the outcome of each sharder."""

    task: ShardingTask
    outcomes: Mapping[str, Outcome]


@dataclass(frozen=True)
class Planners:
    """Sharders by name, and what they require."""

    names: Sequence[str]  # names of the sharders
    oracle: EstimatedCosts  # oracle for the tasks' batch size
    policy: Policy  # policy of sharders that use one
    seed: int = 0  # seed of sharders that sample
    # time limit of `autoshard_verified` for measuring, per task
    measure_seconds: float = MEASURE_SECONDS
    # further policies by name. Each makes one plan, as the sharder `policy` does
    others: Mapping[str, Policy] = field(default_factory=dict)

    def sharders(self, measurer: "Measurer | None" = None) -> dict[str, Sharder]:
        """Returns the sharders by name."""

        def make(name: str, policy: Policy, measurer: "Measurer | None" = None) -> Sharder:
            # Each sharder has its own oracle, so that none profits from prices cached by another.
            context = SharderContext(
                self.oracle.fresh(), policy, measurer, self.measure_seconds, self.seed
            )
            return make_sharder(name, context)

        made = {name: make(name, self.policy, measurer) for name in self.names}
        return made | {name: make("policy", policy) for name, policy in self.others.items()}

    def planned(self, task_set: TaskSet) -> list[PlannedTask]:
        """Returns the tasks to begin with and all plans, which are made with a progress bar."""
        entries = []
        with following(task_set.begin, "tasks planned") as step:
            for entry in islice(self.entries(task_set), task_set.begin):
                entries.append(entry)
                step()
        return entries

    def entries(
        self, task_set: TaskSet, knowledge: "MeasuredKnowledge | None" = None
    ) -> Iterator[PlannedTask]:
        """Yields each task with the plans of all sharders, made during iteration.

        Args:
            task_set: Tasks, and plans of other planners for them.
            knowledge: Measurer of sharders that measure.
        """
        sharders = self.sharders(knowledge)
        not_warmed_up = {
            n for n, spec in SHARDERS.items() if "pool" in spec.needs or spec.time == "all"
        }
        warm_up(
            {name: s for name, s in sharders.items() if name not in not_warmed_up}, task_set.first
        )
        for number, task in enumerate(task_set.tasks):
            others = {name: Outcome(plans[number]) for name, plans in task_set.plans.items()}
            yield PlannedTask(task, plan_task(sharders, task, knowledge) | others)


def warm_up(sharders: Mapping[str, Sharder], task: ShardingTask) -> None:
    """Shards a few of the task's tables, so that planning times exclude first calls."""
    plan_task(sharders, replace(task, tables=task.tables[:_WARM_UP_TABLES], rules=()))


def plan_task(
    sharders: Mapping[str, Sharder],
    task: ShardingTask,
    knowledge: "MeasuredKnowledge | None" = None,
) -> dict[str, Outcome]:
    """Returns each sharder's plan and planning time, without costs."""
    return {name: _plan(sharder, task, knowledge) for name, sharder in sharders.items()}


def _plan(sharder: Sharder, task: ShardingTask, knowledge: "MeasuredKnowledge | None") -> Outcome:
    def clocks() -> tuple[float, float]:
        return time.perf_counter(), 0.0 if knowledge is None else knowledge.seconds

    started, before = clocks()
    plan: ShardingPlan | None
    try:
        plan = sharder.shard(task)
        ended, after = clocks()
        plan.check(task)
    except PlanError:
        (ended, after), plan = clocks(), None
    measured = after - before
    return Outcome(plan, ended - started - measured, measured)


def make_plans(
    sharders: Mapping[str, Sharder], tasks: Sequence[ShardingTask]
) -> dict[str, list[Outcome]]:
    """Returns each sharder's plan for each task."""
    planned = [plan_task(sharders, task) for task in tasks]
    return {name: [outcomes[name] for outcomes in planned] for name in sharders}


def estimated(
    outcomes: Outcomes, tasks: Sequence[ShardingTask], oracle: EstimatedCosts
) -> dict[str, list[Outcome]]:
    """Returns the outcomes with costs that the oracle estimates."""
    return {
        name: [
            o if o.plan is None else replace(o, cost=_estimated(o.plan, task, oracle))
            for o, task in zip(found, tasks, strict=True)
        ]
        for name, found in outcomes.items()
    }


def _estimated(plan: ShardingPlan, task: ShardingTask, oracle: EstimatedCosts) -> PlanCost:
    """Returns the cost of a plan with the all-to-alls that its task counts."""
    return price_plan(plan, task, oracle, common_ms=oracle.common_ms(task, plan))


def steps_of(outcomes: Outcomes) -> dict[str, list[float | None]]:
    """Returns the step time of each plan by its cost, in ms; None without a plan."""
    return {name: [outcome.step_ms for outcome in found] for name, found in outcomes.items()}


def best_heuristic(steps: Steps) -> str | None:
    """Returns the heuristic with the most plans, and of these the lowest step (geometric mean).

    Returns None without heuristics.
    """
    heuristics = [name for name in steps if name in HEURISTICS]
    return min(
        heuristics, key=lambda n: (list(steps[n]).count(None), typical(steps[n])), default=None
    )


def typical(steps_ms: Sequence[float | None]) -> float:
    """Returns the geometric mean, in which large tasks count no more than small ones."""
    known = [ms for ms in steps_ms if ms is not None]
    return statistics.geometric_mean(known) if known else math.inf


def best_of_each(steps: Steps) -> list[float | None]:
    """Returns the lowest step time of any heuristic for each task; None where none found a plan.

    A single heuristic for all tasks would be the one with the most plans where memory is tight. A
    user would choose another one where memory is loose.
    """
    return lowest_of_each([values for name, values in steps.items() if name in HEURISTICS])


def lowest_of_each(steps: Iterable[Sequence[float | None]]) -> list[float | None]:
    """Returns the lowest step time of any sharder for each task; None where none found a plan."""
    return [
        min((ms for ms in of_task if ms is not None), default=None)
        for of_task in zip(*steps, strict=True)
    ]
