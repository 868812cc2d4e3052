"""`MeasuringSharder`: alternates planning and measuring of the most uncertain shards."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from autoshard.cost_model import EstimatedCosts
from autoshard.cost_model.pricing.acquisition import select_measurements
from autoshard.cost_model.pricing.prediction import StepPredictor
from autoshard.sharders.context import MEASURE_SECONDS
from autoshard.sharders.heuristics.cost_greedy import FusedGreedySharder
from autoshard.sharders.required_options import RequiredOptions
from autoshard.workload import PlanError, Shard, Sharder, ShardingPlan, ShardingTask

_ROUND_SHARE = 0.4  # share of the remaining time: later rounds select better shards
_MIN_ROUND_SECONDS = 2.0  # less is not worth a round
_SHARDS_PER_DEVICE = 24  # number in a round: more than a device can measure in it


class Measurer(Protocol):
    """Measures shards on the task's kind of devices, and learns from all measurements."""

    @property
    def devices(self) -> int:
        """Number of devices that measure at once."""
        ...

    def fits(self, shard: Shard) -> bool:
        """Returns whether a measuring device has memory for the shard."""
        ...

    def learn(self, shards: Sequence[Shard], seconds: float) -> int:
        """Measures the first of these shards, within the time; returns how many are new."""
        ...

    def informed(self, oracle: EstimatedCosts) -> EstimatedCosts:
        """Returns the oracle, corrected by all measurements."""
        ...


class MeasuringSharder:
    """Plans in rounds, and learns from measurements in between.

    A round measures the shards that reduce the uncertainty most, and from the second round on
    those of the plan. The rounds end when the plan hardly improves, or with the time. The result is
    the plan with the lowest expected step of all rounds.

    Args:
        oracle: Costs by what is known beforehand.
        make: Returns a sharder for an oracle.
        measurer: Measures.
        seconds: Time for all rounds.
        greedy: Whether plans of `cost_fused` compete.
        clock: Seconds.
    """

    def __init__(
        self,
        oracle: EstimatedCosts,
        make: Callable[[EstimatedCosts], Sharder],
        measurer: Measurer,
        seconds: float = MEASURE_SECONDS,
        greedy: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._oracle = oracle
        self._make = make
        self._measurer = measurer
        self._seconds = seconds
        self._greedy = greedy
        self._clock = clock

    def shard(self, task: ShardingTask) -> ShardingPlan:
        """Returns a valid plan; raises PlanError, which says what is missing, if none is found."""
        deadline = self._clock() + self._seconds
        oracle, plan, planning = self._planned(task)
        competing = self._competing(oracle, task)
        plans = [*competing, plan]  # the first plans may be as good
        number = 0
        while (remaining := deadline - self._clock()) >= max(_MIN_ROUND_SECONDS, planning):
            own = _shards(task, plan)
            theirs = [shard for other in competing for shard in _shards(task, other)]
            count = _SHARDS_PER_DEVICE * self._measurer.devices
            fits = self._measurer.fits
            informative = select_measurements(oracle, task, own + theirs, count, fits, number)
            # Out-of-distribution tables come first; then whether the plan is as fast as predicted.
            requested = informative if number == 0 else [*filter(fits, own), *informative]
            seconds = min(_ROUND_SHARE * remaining, remaining - planning)
            fresh = self._measurer.learn(requested, max(_MIN_ROUND_SECONDS, seconds))
            before = plan
            oracle, plan, planning = self._planned(task)
            competing = self._competing(oracle, task)
            plans += [plan, *competing]
            if not fresh or (number > 0 and _settled(oracle, task, before, plan)):
                break
            number += 1
        predictor = StepPredictor(oracle, task)
        return min(dict.fromkeys(plans), key=predictor.expected_of)

    def _planned(self, task: ShardingTask) -> tuple[EstimatedCosts, ShardingPlan, float]:
        """Returns the oracle by all measurements, the plan by it, and the seconds this took."""
        began = self._clock()
        oracle = self._measurer.informed(self._oracle)
        plan = self._make(oracle).shard(task)
        return oracle, plan, self._clock() - began

    def _competing(self, oracle: EstimatedCosts, task: ShardingTask) -> list[ShardingPlan]:
        """Returns the plan of `cost_fused`, if there is one and it may compete."""
        with suppress(PlanError):
            greedy = RequiredOptions(FusedGreedySharder(oracle))
            return [greedy.shard(task)] if self._greedy else []
        return []


def _settled(
    oracle: EstimatedCosts, task: ShardingTask, before: ShardingPlan, after: ShardingPlan
) -> bool:
    """Returns whether the new plan improves by less than the uncertainty of its step."""
    predictor = StepPredictor(oracle, task)
    new, old = predictor.of(after), predictor.of(before)
    low, high = new.interval_ms
    return old.expected_ms - new.expected_ms < (high - low) / 2


def _shards(task: ShardingTask, plan: ShardingPlan) -> list[Shard]:
    return [shard for shard in plan.shards(task) if shard is not None]
