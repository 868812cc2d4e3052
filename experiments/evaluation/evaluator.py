"""Compares sharders by measured plans until the intervals are narrow or the time is over.

First, every shard of every plan is measured once, task by task. Then the evaluator reduces the
larger part of the ratios' variance: it either adds tasks or repeats measurements.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from autoshard.benchmark import BenchmarkPool, MeasureSettings
from autoshard.cost_model.learning.measured_knowledge import MeasuredKnowledge
from autoshard.cost_model.pricing.repeated_measurements import (
    SEEDS,
    RepeatedMeasurements,
    evaluation_seeds,
    normalizer,
)
from autoshard.experiments.console import cli
from autoshard.experiments.console.progress import following
from autoshard.experiments.evaluation.planners import Outcome, PlannedTask, Planners, best_heuristic
from autoshard.experiments.evaluation.posterior import (
    Pricing,
    ShardDigests,
    StepPosterior,
    digests_of,
    means_of,
)
from autoshard.experiments.evaluation.ratio import Ratio
from autoshard.experiments.evaluation.report import Evaluation
from autoshard.experiments.evaluation.task_sets import TaskSet
from autoshard.sharders import needs_of
from autoshard.workload import Shard, UserError
from autoshard.workload.arrays import Floats

_GROWTH = 8  # an eighth more tasks at a time: one task among many changes little
_REPORTS = 5  # lines of progress within the time limit


@dataclass(frozen=True)
class Limits:
    """When to stop: all 95 % intervals are within +-`precision`, or `seconds` have passed."""

    precision: float = 0.01
    seconds: float = 300.0


class OutOfTimeError(UserError):
    """The time limit was reached before one task was measured."""


class Evaluator:
    """Measures the plans of entries, all of the same sharders.

    Args:
        entries: Tasks with plans. Plans are made during iteration, within the time limit.
        repeats: Measures shards.
        limits: When to stop.
        clock: Returns the current time in seconds; the clock of `repeats`.
    """

    def __init__(
        self,
        entries: Iterator[PlannedTask],
        repeats: RepeatedMeasurements,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = entries
        self._measurements = repeats
        self._limits = limits
        self._clock = clock
        self._started = clock()
        self._entries: list[PlannedTask] = []
        self._plans: dict[str, list[ShardDigests | None]] = {}
        self._pricing: list[Pricing] = []  # one for each task
        self._shards: list[list[Shard]] = []  # one for each task
        self._more_tasks = True
        self._reported = 0

    def run(self, tasks: int) -> Evaluation:
        """Evaluates at least `tasks` tasks; OutOfTimeError if time does not suffice for one."""
        missing = tasks
        with following(tasks, "tasks measured") as step:
            while missing and (not self._entries or not self._out_of_time) and self._take_task():
                missing -= 1
                step()
        if not self._entries:
            raise OutOfTimeError(
                f"--seconds {self._limits.seconds:g} were over before all plans of one task were "
                "measured: allow more seconds; what was measured is in the store"
            )
        ended = self._narrow()
        left_out = missing if self._more_tasks else 0
        if left_out:
            ended += f"; {left_out} of {tasks} tasks were left out"
        return Evaluation(
            [entry.task for entry in self._entries],
            self._outcomes(),
            self._posterior().steps_ms,
            self._clock() - self._started,
            self._measurements.seconds,
            self._measurements.repeats,
            ended,
        )

    @property
    def _out_of_time(self) -> bool:
        return self._clock() >= self._deadline

    @property
    def _deadline(self) -> float:
        return self._started + self._limits.seconds

    def _take_task(self) -> bool:
        """Plans and measures the next task; False if there is none, or no time for it."""
        entry = next(self._source, None)
        if entry is None:
            self._more_tasks = False
            return False
        # Sharders come first in turns, so that drift of the machine affects all of them alike.
        outcomes = list(entry.outcomes.values())
        first = len(self._entries) % len(outcomes)
        turned = [*outcomes[first:], *outcomes[:first]]
        plans = [outcome.plan for outcome in turned if outcome.plan is not None]
        shards = [s for plan in plans for s in plan.shards(entry.task) if s is not None]
        if not self._measurements.measure(shards, 1, self._deadline):
            return False
        self._entries.append(entry)
        self._shards.append(list({shard.digest: shard for shard in shards}.values()))
        self._pricing.append(Pricing.of(entry.task, plans, self._measurements.common_ms))
        for name, outcome in entry.outcomes.items():
            plan = None if outcome.plan is None else digests_of(entry.task, outcome.plan)
            self._plans.setdefault(name, []).append(plan)
        return True

    def _narrow(self) -> str:
        """Narrows the intervals of the ratios to the best heuristic; returns why it ended."""
        while True:
            ratios = _ratios(self._posterior().steps_ms)
            precision = self._limits.precision
            wide = {  # one task says nothing of others, however well it is measured
                name: ratio
                for name, ratio in ratios.items()
                if ratio.half_width > precision or (self._more_tasks and ratio.count == 1)
            }
            if not wide:
                within = f"all intervals are within +-{precision:.1%}{_remark(ratios)}"
                return within if ratios else "measured once"
            widest = _format_widest(wide)
            if self._out_of_time:
                return f"stopped by --seconds {self._limits.seconds:g}: {widest}"
            self._report(widest)
            by_tasks = sum(r.task_variance for r in wide.values()) > sum(
                r.measurement_variance for r in wide.values()
            )
            helps = any(ratio.noise_width > precision for ratio in wide.values())
            if not self._more_tasks and not (helps and self._repeat()):
                return f"there are no more tasks, and repeats would not help: {widest}"
            if self._more_tasks and (by_tasks or not self._repeat()):
                for _ in range(1 + len(self._entries) // _GROWTH):
                    if self._out_of_time or not self._take_task():
                        break

    def _repeat(self) -> bool:
        """Repeats the task with the fewest measurements; False if no shard can be repeated."""
        tasks: list[dict[int, list[Shard]]] = []  # shards by their next number of measurements
        for shards in self._shards:
            by_repeats: dict[int, list[Shard]] = {}
            for shard in shards:
                if (repeats := self._measurements.wanted(shard)) is not None:
                    by_repeats.setdefault(repeats, []).append(shard)
            tasks.append(by_repeats)
        fewest = min(filter(None, tasks), key=min, default={})
        for repeats in sorted(fewest):
            self._measurements.measure(fewest[repeats], repeats, self._deadline)
        return bool(fewest)

    def _posterior(self) -> StepPosterior:
        return StepPosterior(self._measurements.known(), self._plans, self._pricing)

    def _outcomes(self) -> dict[str, list[Outcome]]:
        """Returns the outcomes with the measured costs of their plans."""
        costed: dict[str, list[Outcome]] = {}
        for entry in self._entries:
            for name, outcome in entry.outcomes.items():
                if outcome.plan is not None:
                    cost = self._measurements.plan_cost(entry.task, outcome.plan)
                    outcome = replace(outcome, cost=cost)
                costed.setdefault(name, []).append(outcome)
        return costed

    def _report(self, widest: str) -> None:
        """Prints the progress at each fifth of the time limit."""
        passed = self._clock() - self._started
        if passed * _REPORTS >= (self._reported + 1) * self._limits.seconds:
            self._reported = int(passed * _REPORTS / self._limits.seconds)
            cli.say(
                f"  {passed:.0f} of {self._limits.seconds:.0f} s: {self._measurements.repeats} "
                f"measurements, {len(self._entries)} tasks; {widest}"
            )


def evaluate_measured(
    task_set: TaskSet,
    planners: Planners,
    pool: BenchmarkPool,
    limits: Limits,
    seeds: int = SEEDS,
) -> Evaluation:
    """Compares sharders by plans that are measured on the pool.

    Args:
        task_set: Tasks, and plans of other planners.
        planners: Sharders.
        pool: Pool that measures.
        limits: When to stop.
        seeds: Number of index batches per shard; sharders that measure use other batches.
    """
    oracle, unseen = planners.oracle, evaluation_seeds(seeds)
    settings = MeasureSettings(oracle.batch_size, oracle.model.provenance.operator)
    repeats = RepeatedMeasurements(
        pool,
        settings,
        unseen,
        None,
        normalizer(oracle.model, pool),
        cli.note,
        overhead=oracle.model.counted_overhead,
    )
    knowledge = None
    if "pool" in needs_of(planners.names):
        knowledge = MeasuredKnowledge(
            pool, oracle.model, settings, seeds, unseen=unseen, notify=cli.note
        )
    entries = planners.entries(task_set, knowledge)
    return Evaluator(entries, repeats, limits).run(task_set.begin)


def _ratios(steps_ms: Mapping[str, Floats]) -> dict[str, Ratio]:
    """Returns the ratios of all sharders to the best heuristic; empty without one."""
    best = best_heuristic(means_of(steps_ms))
    if best is None:
        return {}
    ratios = {name: Ratio.of(steps, steps_ms[best]) for name, steps in steps_ms.items()}
    return {name: ratio for name, ratio in ratios.items() if ratio is not None and name != best}


def _format_widest(wide: Mapping[str, Ratio]) -> str:
    """Returns a phrase about the widest intervals."""
    order = sorted(wide, key=lambda name: -wide[name].half_width)
    widths = [f"{name} is +-{wide[name].half_width:.1%}" for name in order[:3]]
    more = f" and {len(order) - 3} more are wide" if len(order) > 3 else ""
    return f"the interval of {', of '.join(widths)}{more}{_remark(wide)}"


def _remark(ratios: Mapping[str, Ratio]) -> str:
    """Returns what an interval of one task does not contain."""
    alone = any(ratio.count == 1 for ratio in ratios.values())
    return ", by the noise of one task, which does not generalize to others" if alone else ""
