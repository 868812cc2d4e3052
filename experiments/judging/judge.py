"""The judge: measures plans of several sharders until it is known how they compare, or time is up.

First every shard of every plan is measured once, task by task. Then, in turns, whatever narrows the
intervals of the sharders' ratios to the best heuristic most per second: another visit of shards
that are likely to hold up a wait and are not known well, or another task.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from autoshard.experiments.console import cli
from autoshard.experiments.console.progress import following
from autoshard.experiments.judging.outcomes import Outcome, best_heuristic
from autoshard.experiments.judging.shard_visits import ShardVisits, digests_of, pricing_of
from autoshard.experiments.judging.statistics import Floats, Plan, Pricing, Ratio, Scenarios
from autoshard.workload import Shard, ShardingPlan, ShardingTask, UserError

Value = TypeVar("Value")

_VISITS_A_TURN = 4  # for each device that measures: turns that end with few of them idle
_SHARE_A_TURN = 8  # a turn brings an eighth more: of many tasks a single one changes little
_TOLD = 5  # lines about how far it is, until the seconds are over
_UNKNOWN_SECONDS = 1.0  # of a visit, as long as all came from the store


@dataclass(frozen=True)
class Entry:
    """A task, and what each sharder made of it."""

    task: ShardingTask
    outcomes: Mapping[str, Outcome]


@dataclass(frozen=True)
class Limits:
    """When to stop: all 95 % intervals are within +-`precision`, or `seconds` are spent."""

    precision: float = 0.01
    seconds: float = 300.0


@dataclass(frozen=True)
class Judgement:
    """What the judge has found.

    Args:
        tasks: that were measured, in order.
        outcomes: of each sharder for each of them, with costs.
        steps_ms: by each sharder's plans in each scenario, [scenarios, tasks]; NaN without plan.
        seconds: that judging took, planning included.
        measuring_seconds: of these, those in which the judge measured.
        visits: that were measured for it.
        ended: why it stopped, in one line.
    """

    tasks: list[ShardingTask]
    outcomes: dict[str, list[Outcome]]
    steps_ms: dict[str, Floats]
    seconds: float = 0.0
    measuring_seconds: float = 0.0
    visits: int = 0
    ended: str = ""


class OutOfTimeError(UserError):
    """The seconds were over before anything could be said."""


class Judge:
    """Judges what comes as entries, all of the same sharders.

    Args:
        entries: tasks with plans, made when they are asked for: that takes time, too.
        visits: what measures.
        limits: when to stop.
        at_once: devices that measure.
        clock: seconds; as the one of `visits`.
    """

    def __init__(
        self,
        entries: Iterator[Entry],
        visits: ShardVisits,
        limits: Limits,
        at_once: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = entries
        self._visits = visits
        self._limits = limits
        self._at_once = at_once
        self._clock = clock
        self._started = clock()
        self._entries: list[Entry] = []
        self._plans: dict[str, list[Plan | None]] = {}
        self._pricing: list[Pricing] = []  # of each task
        self._shards: dict[str, Shard] = {}
        self._planning: list[float] = []  # seconds, by task
        self._more_tasks = True
        self._told = self._turns = 0

    def run(self, tasks: int) -> Judgement:
        """Begin with so many tasks; OutOfTimeError if there is not even the time for one."""
        missing = tasks
        with following(tasks, "tasks measured") as step:
            while missing and (not self._entries or not self._late) and self._take_task():
                missing -= 1
                step()
        if not self._entries:
            raise OutOfTimeError(
                f"--seconds {self._limits.seconds:g} were over before all plans of one task were "
                "measured: allow more, and what was measured counts then"
            )
        ended = self._go_on()
        left_out = missing if self._more_tasks else 0
        if left_out:
            ended += f"; {left_out} of {tasks} tasks were left out"
        return Judgement(
            [entry.task for entry in self._entries],
            self._outcomes(),
            self._scenarios().steps_ms,
            self._clock() - self._started,
            self._visits.seconds,
            self._visits.visits,
            ended,
        )

    @property
    def _deadline(self) -> float:
        return self._started + self._limits.seconds

    @property
    def _late(self) -> bool:
        return self._clock() >= self._deadline

    def _take_task(self) -> bool:
        """Plan and measure the next task; False if there is none, or no time for it."""
        began = self._clock()
        entry = next(self._source, None)
        if entry is None:
            self._more_tasks = False
            return False
        self._planning.append(self._clock() - began)
        plans = [o.plan for o in _rotated(entry.outcomes, len(self._entries)) if o.plan is not None]
        shards = [s for plan in plans for s in plan.shards(entry.task) if s is not None]
        if not self._visits.measure(shards, 1, self._deadline):
            return False
        self._shards |= {shard.digest: shard for shard in shards}
        self._entries.append(entry)
        self._pricing.append(pricing_of(entry.task, plans))
        for name, outcome in entry.outcomes.items():
            plan = None if outcome.plan is None else digests_of(entry.task, outcome.plan)
            self._plans.setdefault(name, []).append(plan)
        return True

    def _go_on(self) -> str:
        """Narrow the intervals; why it ended."""
        while True:
            scenarios = self._scenarios()
            best, ratios = _ratios(scenarios)
            precision = self._limits.precision
            wide = {n: ratio for n, ratio in ratios.items() if ratio.half_width > precision}
            if not wide:
                return f"all intervals are within +-{precision:.1%}" if ratios else "measured once"
            assert best is not None
            told = _told_wide(wide)
            if self._late:
                return f"stopped by --seconds {self._limits.seconds:g}: {told}"
            self._tell(told)
            if not self._more_tasks:  # only what measuring adds to intervals can still be mended
                wide = {n: ratio for n, ratio in wide.items() if ratio.measured_width > precision}
            visits = self._worthwhile(scenarios, best, wide)
            if self._more_tasks and self._task_pays(wide, visits):
                for _ in range(1 + len(self._entries) // _SHARE_A_TURN):
                    if self._late or not self._take_task():
                        break
            elif visits:
                self._visit([self._shards[digest] for digest in visits])
            elif not self._more_tasks:
                return f"there are no more tasks, and more visits would not help: {told}"

    def _visit(self, shards: Sequence[Shard]) -> None:
        """One more visit of each."""
        by_count: dict[int, list[Shard]] = {}
        for shard in shards:
            by_count.setdefault(self._visits.wanted(shard) or 1, []).append(shard)
        for count, some in by_count.items():
            self._visits.measure(some, count, self._deadline)

    def _task_pays(self, wide: Mapping[str, Ratio], visits: Mapping[str, float]) -> bool:
        """Whether another task narrows the intervals more, per second, than these visits."""
        if not visits:
            return True
        visit_s = _UNKNOWN_SECONDS
        if self._visits.visits:
            visit_s = self._visits.seconds / self._visits.visits
        task_s = float(np.mean(self._planning)) + visit_s * len(self._shards) / len(self._entries)
        of_task = sum(ratio.gain_of_a_task() for ratio in wide.values())
        return of_task / task_s > sum(visits.values()) / (visit_s * len(visits))

    def _worthwhile(
        self, scenarios: Scenarios, best: str, wide: Mapping[str, Ratio]
    ) -> dict[str, float]:
        """Shards to visit next, and how much each narrows intervals, as shares of their squares.

        The sharders whose intervals are wide choose by turns, so that drift of the machine falls on
        all of them alike.
        """
        if not wide:
            return {}
        gains = self._visits.gains()
        known = {d: g for d, g in gains.items() if self._visits.wanted(self._shards[d]) is not None}
        worth = {n: _worth(scenarios, n, best, ratio, known) for n, ratio in wide.items()}
        ranked = {n: iter(sorted(some, key=lambda d: -some[d])) for n, some in worth.items()}
        self._turns += 1
        names, chosen = _rotated(ranked, self._turns), list[str]()
        most = max(_VISITS_A_TURN * self._at_once, len(self._shards) // _SHARE_A_TURN)
        while names and len(chosen) < most:
            for wishes in list(names):
                wish = next((digest for digest in wishes if digest not in chosen), None)
                if wish is None:
                    names.remove(wishes)
                else:
                    chosen.append(wish)
        return {d: sum(some.get(d, 0.0) for some in worth.values()) for d in chosen}

    def _scenarios(self) -> Scenarios:
        return Scenarios(self._visits.known(), self._plans, self._pricing)

    def _outcomes(self) -> dict[str, list[Outcome]]:
        """With what their plans cost; those that cannot be measured have none."""

        def costed(entry: Entry, outcome: Outcome) -> Outcome:
            plan = outcome.plan
            if plan is None:
                return outcome
            return replace(outcome, cost=self._visits.plan_cost(entry.task, plan))

        names = self._entries[0].outcomes
        return {name: [costed(e, e.outcomes[name]) for e in self._entries] for name in names}

    def _tell(self, widest: str) -> None:
        """Now and then, how far it is."""
        passed = self._clock() - self._started
        if passed * _TOLD >= (self._told + 1) * self._limits.seconds:
            self._told = int(passed * _TOLD / self._limits.seconds)
            cli.console.print(
                f"  {passed:.0f} of {self._limits.seconds:.0f} s: {self._visits.visits} visits, "
                f"{len(self._entries)} tasks; {widest}",
                soft_wrap=True,
            )


@dataclass(frozen=True)
class MeasuredStep:
    """What a step takes by a plan: milliseconds, and their 95 % interval."""

    mean_ms: float
    interval_ms: tuple[float, float]


def judge_plan(
    measuring: ShardVisits, task: ShardingTask, plan: ShardingPlan, visits: int
) -> MeasuredStep | None:
    """Measure one plan with so many visits of each shard; None if a shard cannot be measured."""
    measuring.measure([shard for shard in plan.shards(task) if shard is not None], visits)
    known = measuring.known()
    digests = digests_of(task, plan)
    if not known.keys() >= set(digests):
        return None
    steps = Scenarios(known, {"": [digests]}, [pricing_of(task, [plan])]).steps_ms[""]
    low, high = np.quantile(steps, (0.025, 0.975))
    return MeasuredStep(float(steps.mean()), (float(low), float(high)))


def _ratios(scenarios: Scenarios) -> tuple[str | None, dict[str, Ratio]]:
    """The best heuristic, and the ratios of all others to it."""
    steps = scenarios.steps_ms
    means = {
        name: [None if math.isnan(ms) else float(ms) for ms in some.mean(axis=0)]
        for name, some in steps.items()
    }
    best = best_heuristic(means)
    if best is None:
        return None, {}
    ratios = {name: Ratio.of(steps[name], steps[best]) for name in steps if name != best}
    return best, {name: ratio for name, ratio in ratios.items() if ratio is not None}


def _worth(
    scenarios: Scenarios, name: str, best: str, ratio: Ratio, gains: Mapping[str, float]
) -> dict[str, float]:
    """What a visit of each shard takes off the square of the ratio's interval, as a share of it."""
    slopes: dict[str, float] = {}  # of the sums of steps over which the ratio is
    total = 0.0
    for task, theirs in enumerate(scenarios.steps_ms[best].mean(axis=0).tolist()):
        ours, bar = scenarios.slopes(name, task), scenarios.slopes(best, task)
        if not ours or not bar:
            continue
        total += theirs
        for digest, slope in ours.items():
            slopes[digest] = slopes.get(digest, 0.0) + slope
        for digest, slope in bar.items():
            slopes[digest] = slopes.get(digest, 0.0) - ratio.value * slope
    return {
        digest: ratio.gain_of_measuring((slope / total) ** 2 * gains[digest])
        for digest, slope in slopes.items()
        if slope and digest in gains
    }


def _rotated(some: Mapping[str, Value], turn: int) -> list[Value]:
    """All of them, each first in its turn."""
    values = list(some.values())
    first = turn % len(values)
    return [*values[first:], *values[:first]]


def _told_wide(wide: Mapping[str, Ratio]) -> str:
    """The widest intervals, in words."""
    if any(math.isinf(ratio.half_width) for ratio in wide.values()):
        return "one task says nothing of others"
    order = sorted(wide, key=lambda name: -wide[name].half_width)
    told = [f"{name} is +-{wide[name].half_width:.1%}" for name in order[:3]]
    more = f" and {len(order) - 3} more are wide" if len(order) > 3 else ""
    return f"the interval of {', of '.join(told)}{more}"
