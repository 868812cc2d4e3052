"""Simulated annealing: slow and hard to beat, so it tells what quicker sharders leave to be won."""

import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from autoshard.cost_model import EstimatedCosts
from autoshard.cost_model.step_prediction import Placed
from autoshard.cost_model.training import one_thread
from autoshard.sharders.column_plan import Changes, ColumnPlan, Floats
from autoshard.sharders.cost_greedy import AloneGreedySharder, FusedGreedySharder
from autoshard.sharders.policy import PolicySharder
from autoshard.sharders.policy_files import Policy
from autoshard.sharders.proposing import Proposer
from autoshard.workload import PlanError, Sharder, ShardingPlan, ShardingTask
from autoshard.workload.packing import pack

ANNEAL_SECONDS = 60.0
# Of the plan's cost: by how much a change that is taken may make it worse, in the mean, at first
# and in the end.
_HOT, _COLD = 0.003, 1e-5
_SOFT, _SHARP = 3.0, 96.0  # powers of the norm that stands for the slowest device, likewise
_FEWEST, _MOST = 16, 512  # changes that are priced at once
_SEARCHED = 40_000  # tables times devices: where there are more, local search takes minutes
_MIN_MS = 1e-9


class AnnealingSharder:
    """Changes the best plan of the greedies by cost and of local search (`cost_fused_search`) at
    random: moves, swaps, splits and joins of slices, less and less often for the worse. It never
    ends worse.

    It goes by the mean of what is not known and by all of the task's objective, all-to-alls
    included, which the others look at only in part.

    Args:
        oracle: prices devices.
        seconds: that it takes, beside those for the plans to begin with.
        proposals: changes that are tried at most; with them it cools by their number, and the plan
            is the same each time, unless seconds end it. By default it cools by the clock.
        seed: of the changes.
        clock: seconds.
    """

    def __init__(
        self,
        oracle: EstimatedCosts,
        seconds: float = ANNEAL_SECONDS,
        proposals: int | None = None,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._oracle = oracle
        self._seconds, self._proposals = seconds, proposals
        self._seed, self._clock = seed, clock

    @one_thread()
    def shard(self, task: ShardingTask) -> ShardingPlan:
        """A valid plan; PlanError says what is missing where none is found."""
        self._oracle.check(task)

        def worth(plan: ShardingPlan) -> float:
            return self._oracle.step_ms(plan, task)

        best = min(self._starts(task), key=worth)
        if len(task.devices) == 1:
            return best
        found = ShardingPlan.of_pieces(task, self.improve(task, best.placed(task)))
        return min(best, found, key=worth)

    def _starts(self, task: ShardingTask) -> list[ShardingPlan]:
        makers: list[Sharder] = [AloneGreedySharder(self._oracle), FusedGreedySharder(self._oracle)]
        if len(task.tables) * len(task.devices) <= _SEARCHED:
            untrained = Policy.untrained()
            makers.append(PolicySharder(untrained, self._oracle, search=True))
        found = []
        for maker in makers:
            with suppress(PlanError):  # others may find one
                found.append(maker.shard(task))
        return found or [ShardingPlan.of_pieces(task, pack(task, split=True))]

    def improve(self, task: ShardingTask, start: Placed) -> Placed:
        """The best plan on the way from this one."""
        plan = ColumnPlan(self._oracle, task, start)
        rng = np.random.default_rng(self._seed)
        proposer = Proposer(plan, rng)
        best, best_ms = plan.widths.copy(), plan.plan_ms()
        tried, count, began = 0, _FEWEST, self._clock()
        while (done := self._done(tried, began)) < 1:
            heat = _HOT * (_COLD / _HOT) ** done
            power = _SOFT * (_SHARP / _SOFT) ** done
            changes = proposer.draw(count, _pressure(plan.waits, power))
            taken = _take(plan, changes, power, heat * rng.standard_exponential(len(changes)))
            tried += len(changes)
            # Of a batch only some that do not touch each other can be taken.
            count = min(_MOST, 2 * count) if taken <= 1 else max(_FEWEST, count // 2)
            now_ms = plan.plan_ms()
            if now_ms < best_ms:
                best, best_ms = plan.widths.copy(), now_ms
        return plan.placed(best)

    def _done(self, tried: int, began: float) -> float:
        """The share of all that is behind us."""
        spent = (self._clock() - began) / self._seconds
        if self._proposals is None:
            return spent
        return 1.0 if spent >= 1 else tried / self._proposals


def _pressure(waits: Floats, power: float) -> Floats:
    """How much each device has to do with what the plan costs: [devices]."""
    largest = np.maximum(waits.max(0), _MIN_MS)
    powers = (waits / largest) ** power
    return np.asarray((largest * powers / powers.sum(0)).sum(1))


def _take(plan: ColumnPlan, changes: Changes, power: float, worse: Floats) -> int:
    """Make those of the changes that are admitted and make the plan no more worse than that share
    of it: one after the other, of those that touch other devices and tables. Returns how many.
    """
    after = plan.price(changes)
    admitted = plan.admitted(changes, after)
    largest = np.maximum(plan.waits.max(0), _MIN_MS)
    before = (plan.waits / largest) ** power
    of_two = before[changes.first] + before[changes.second]
    with np.errstate(over="ignore"):  # what is so much worse is never taken
        become = ((after.waits / largest) ** power).sum(1)
    change = become - of_two  # of the sums of powers: [changes, waits]
    sums = before.sum(0)

    def norm_ms(powers: Floats) -> Floats:
        """A step [...] whose slowest devices are softened into norms, by sums [..., waits]."""
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
