"""`MeasuringSharder`: plans, measures what tells most about the task, learns, and plans again."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from autoshard.cost_model import EstimatedCosts
from autoshard.cost_model.outlook import TaskOutlook
from autoshard.cost_model.telling import most_telling
from autoshard.sharders.cost_greedy import FusedGreedySharder
from autoshard.sharders.rounds import best_by_rounds
from autoshard.workload import PlanError, Shard, Sharder, ShardingPlan, ShardingTask

MEASURE_SECONDS = 20.0  # a task of 60 tables is well known by then, on two cores
_LEARNING_SHARE = 0.7  # of the seconds; the rest is for finalists
_ROUND_SHARE = 0.4  # of what is left for learning: later rounds know better what to ask
_LEAST_SECONDS = 2.0  # that are worth a round
_A_ROUND = 24  # shards for each device: more than it can measure in a round


class Measurer(Protocol):
    """What measures on the task's kind of devices, and remembers."""

    @property
    def devices(self) -> int:
        """How many measure at once."""
        ...

    def fits(self, shard: Shard) -> bool:
        """Whether one of them has room for it."""
        ...

    def learn(self, shards: Sequence[Shard], seconds: float) -> int:
        """Measure the first of these, as far as the time goes; how many are new."""
        ...

    def informed(self, oracle: EstimatedCosts) -> EstimatedCosts:
        """The oracle, by all that has been measured."""
        ...

    def step_ms(
        self, task: ShardingTask, plans: Sequence[ShardingPlan], visits: int
    ) -> Sequence[float]:
        """What a step takes by each plan, with at least so many visits of each shard; infinite
        where one cannot be measured.
        """
        ...


class MeasuringSharder:
    """Rounds of planning, measuring and learning; then the best few plans are measured.

    In a round the shards are measured that tell most about what is still doubtful, and those of the
    plan. It ends when the plan hardly changes any more, or the time is up.

    Args:
        oracle: what is known beforehand.
        make: a sharder that goes by an oracle.
        measurer: measures.
        seconds: for all of it. What is measured once in any case may take longer.
        finalists: plans that are measured at the end.
        greedy: let what `cost_fused` plans compete.
        clock: seconds.
    """

    def __init__(
        self,
        oracle: EstimatedCosts,
        make: Callable[[EstimatedCosts], Sharder],
        measurer: Measurer,
        seconds: float = MEASURE_SECONDS,
        finalists: int = 3,
        greedy: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._oracle = oracle
        self._make = make
        self._measurer = measurer
        self._seconds = seconds
        self._finalists = finalists
        self._greedy = greedy
        self._clock = clock

    def shard(self, task: ShardingTask) -> ShardingPlan:
        """A valid plan; PlanError says what is missing where none is found."""
        began = self._clock()
        plans, oracle = self._learned(task, began + _LEARNING_SHARE * self._seconds)
        outlook = TaskOutlook(oracle, task)
        different = dict.fromkeys(plans)
        ranked = sorted(different, key=lambda plan: outlook.expected_ms(plan.placed(task)))
        best = ranked[: self._finalists]

        def measure(numbers: Sequence[int], visits: int) -> Sequence[float]:
            return self._measurer.step_ms(task, [best[number] for number in numbers], visits)

        left = began + self._seconds - self._clock()
        return best[best_by_rounds(len(best), measure, left, self._clock)]

    def _learned(
        self, task: ShardingTask, deadline: float
    ) -> tuple[list[ShardingPlan], EstimatedCosts]:
        """All plans that there were, and the oracle in the end."""
        measurer, seed = self._measurer, 0
        oracle, plan, planning = self._planned(task)
        rivals = self._rivals(oracle, task)
        plans = [*rivals, plan]  # what is thought now may be as good
        while True:
            left = deadline - self._clock()
            if left < max(_LEAST_SECONDS, planning):
                break
            own = _shards(task, plans[-1])
            theirs = [shard for rival in rivals for shard in _shards(task, rival)]
            count = _A_ROUND * measurer.devices
            telling = most_telling(oracle, task, own + theirs, count, measurer.fits, seed)
            # Strange tables first; then whether the plan keeps its promise.
            asked = telling if seed == 0 else [*filter(measurer.fits, own), *telling]
            seconds = min(_ROUND_SHARE * left, left - planning)
            fresh = measurer.learn(asked, max(_LEAST_SECONDS, seconds))
            oracle, plan, planning = self._planned(task)
            plans.append(plan)
            rivals = self._rivals(oracle, task)
            if not fresh or (seed > 0 and _settled(oracle, task, plans[-2], plans[-1])):
                break
            seed += 1
        return [*plans, *rivals], oracle

    def _planned(self, task: ShardingTask) -> tuple[EstimatedCosts, ShardingPlan, float]:
        """What is known by now, the plan by it, and the seconds that it took."""
        began = self._clock()
        oracle = self._measurer.informed(self._oracle)
        plan = self._make(oracle).shard(task)
        return oracle, plan, self._clock() - began

    def _rivals(self, oracle: EstimatedCosts, task: ShardingTask) -> list[ShardingPlan]:
        """What `cost_fused` plans, if it does and may compete."""
        with suppress(PlanError):
            return [FusedGreedySharder(oracle).shard(task)] if self._greedy else []
        return []


def _settled(
    oracle: EstimatedCosts, task: ShardingTask, before: ShardingPlan, after: ShardingPlan
) -> bool:
    """Whether the new plan is better by no more than it is uncertain how fast it is."""
    outlook = TaskOutlook(oracle, task)
    new, old = outlook.of(after), outlook.of(before)
    low, high = new.interval_ms
    return old.expected_ms - new.expected_ms < (high - low) / 2


def _shards(task: ShardingTask, plan: ShardingPlan) -> list[Shard]:
    return [shard for shard in plan.shards(task) if shard is not None]
