"""Simulated annealing of where the columns of tables are."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from autoshard.cost_model import EstimatedCosts
from autoshard.cost_model.pricing.prediction import Placed
from autoshard.sharders.search.column_plan import Changes, ColumnPlan
from autoshard.sharders.search.proposing import Proposer
from autoshard.workload import ShardingTask
from autoshard.workload.arrays import Floats

# Initial and final temperature: mean accepted rise, relative to the plan's cost.
_HOT, _COLD = 0.003, 1e-5
_SOFT, _SHARP = 3.0, 96.0  # initial and final power of the norm over devices
_MIN_BATCH, _MAX_BATCH = 16, 512  # changes that are priced at once
_MIN_MS = 1e-9


@dataclass(frozen=True)
class Annealing:
    """Proposes random moves, swaps, splits and joins of pieces, and minimises the task's objective
    in the mean scenario. The result is never worse than the initial plan.

    Args:
        oracle: Predicts costs.
        seconds: Time of annealing.
        proposals: Maximum number of proposed changes. The temperature then depends on their number
            instead of the time, which makes plans reproducible unless `seconds` ends the search.
        seed: Seed of the changes.
        clock: Returns the time in seconds.
    """

    oracle: EstimatedCosts
    seconds: float
    proposals: int | None = None
    seed: int = 0
    clock: Callable[[], float] = time.monotonic

    def improve(self, task: ShardingTask, start: Placed) -> Placed:
        """Anneals from a plan; returns the best plan found."""
        plan = ColumnPlan(self.oracle, task, start)
        rng = np.random.default_rng(self.seed)
        proposer = Proposer(plan, rng)
        best, best_ms = plan.widths.copy(), plan.plan_ms()
        tried, count, began = 0, _MIN_BATCH, self.clock()
        while (done := self._done(tried, began)) < 1:
            heat = _HOT * (_COLD / _HOT) ** done
            power = _SOFT * (_SHARP / _SOFT) ** done
            changes = proposer.draw(count, _pressure(plan.stages, power))
            taken = _take(plan, changes, power, heat * rng.standard_exponential(len(changes)))
            tried += len(changes)
            # Only changes of a batch that share no device or table can be accepted together.
            count = min(_MAX_BATCH, 2 * count) if taken <= 1 else max(_MIN_BATCH, count // 2)
            now_ms = plan.plan_ms()
            if now_ms < best_ms:
                best, best_ms = plan.widths.copy(), now_ms
        return plan.placed(best)

    def _done(self, tried: int, began: float) -> float:
        """Returns the share of the search that is done."""
        spent = (self.clock() - began) / self.seconds
        if self.proposals is None:
            return spent
        return 1.0 if spent >= 1 else tried / self.proposals


def _pressure(stages: Floats, power: float) -> Floats:
    """Returns the contribution of each device to the softened cost of the plan, [devices]."""
    largest = np.maximum(stages.max(0), _MIN_MS)
    powers = (stages / largest) ** power
    return np.asarray((largest * powers / powers.sum(0)).sum(1))


def _take(plan: ColumnPlan, changes: Changes, power: float, worse: Floats) -> int:
    """Applies admitted changes that share no device or table; returns their number.

    Args:
        plan: Plan to change.
        changes: Proposed changes.
        power: Power of the norm over devices.
        worse: Maximum relative rise of the softened cost for each change.
    """
    after = plan.price(changes)
    admitted = plan.admitted(changes, after)
    largest = np.maximum(plan.stages.max(0), _MIN_MS)
    before = (plan.stages / largest) ** power
    of_two = before[changes.first] + before[changes.second]
    with np.errstate(over="ignore"):  # such changes are never accepted
        become = ((after.stages / largest) ** power).sum(1)
    change = become - of_two  # how the sums of powers change, [changes, stages]
    sums = before.sum(0)

    def norm_ms(powers: Floats) -> Floats:
        """Returns the step time [...] with norms over devices, from sums [..., stages]."""
        return np.asarray((largest * np.maximum(powers, _MIN_MS) ** (1 / power)).sum(-1))

    now_ms = float(norm_ms(sums))
    likely = admitted & (norm_ms(sums + change) <= now_ms * (1 + worse))
    touched: set[int] = set()
    moved: set[int] = set()
    taken = 0
    for number in np.flatnonzero(likely).tolist():
        pair = {int(changes.first[number]), int(changes.second[number])}
        tables = {int(changes.table[number]), int(changes.other[number])} - {-1}
        if pair & touched or tables & moved:
            continue
        then_ms = float(norm_ms(sums + change[number]))
        if then_ms > now_ms * (1 + worse[number]):
            continue
        plan.apply(changes, after, number)
        sums, now_ms, taken = sums + change[number], then_ms, taken + 1
        touched |= pair
        moved |= tables
    return taken
