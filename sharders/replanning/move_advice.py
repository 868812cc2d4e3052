"""Whether moving to a new plan pays: what it gains in the steps that are left, and takes."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from autoshard.cost_model import EstimatedCosts, StepPrediction, StepPredictor
from autoshard.cost_model.pricing.drift import sampling_error
from autoshard.cost_model.threads import one_thread
from autoshard.sharders.context import SharderContext
from autoshard.sharders.policy.files import load_policy
from autoshard.sharders.registry import make_sharder
from autoshard.sharders.replanning.incremental import IncrementalSharder
from autoshard.workload import Link, PlanError, ShardingPlan, ShardingTask, UserError
from autoshard.workload.arrays import Floats
from autoshard.workload.plans.moves import Move, moved_bytes, moves_between, renumbered, traffic_of
from autoshard.workload.profiling.window import WindowCounts
from autoshard.workload.sizes import format_bytes
from autoshard.workload.tasks.links import AnyLink

_BUDGETS = (0.02, 0.2)  # shares of all bytes that may move in plans near the one in use
_INTERVAL = (0.05, 0.95)
_SURE = 0.95


@dataclass(frozen=True)
class MoveAdvice:
    """Gain and cost of moving to a new plan, which may be the one in use.

    Args:
        plan: The new plan.
        moves: What moves.
        old: Predicted step time of the plan in use, with the window's lookups.
        new: Predicted step time of the new plan.
        error: Standard error of the logarithm of their ratio, as few batches were counted.
        moving_s: Seconds until the busiest device has sent and received what moves.
        steps_left: Steps that are left to train.
    """

    plan: ShardingPlan
    moves: tuple[Move, ...]
    old: StepPrediction
    new: StepPrediction
    error: float
    moving_s: float
    steps_left: int

    @property
    def moved_bytes(self) -> int:
        """Bytes of weights and optimizer state that move."""
        return moved_bytes(self.moves)

    @property
    def saved_s(self) -> float:
        """Expected seconds that moving saves in all steps that are left, less the move's."""
        return float(self._saved_s(self.old.expected_ms, self.new.expected_ms))

    @cached_property
    def drawn_s(self) -> Floats:
        """Samples of `saved_s`, by uncertain costs and few counted batches."""
        rng = np.random.default_rng(0)
        factors = np.exp(self.error * rng.standard_normal(len(self.new.drawn_ms)))
        return np.asarray(self._saved_s(self.old.drawn_ms, self.new.drawn_ms * factors))

    @property
    def saved_90_s(self) -> tuple[float, float]:
        """The 90 % interval of `saved_s`."""
        low, high = np.quantile(self.drawn_s, _INTERVAL)
        return float(low), float(high)

    @property
    def probability(self) -> float:
        """Probability that moving saves time."""
        return 0.0 if self.stays else float((self.drawn_s > 0).mean())

    @property
    def pays(self) -> bool:
        """Whether moving saves time with a probability of at least 0.95."""
        return self.probability >= _SURE

    @property
    def stays(self) -> bool:
        """Whether no new plan is expected to save time, and this one is the plan in use."""
        return self.old is self.new

    @property
    def line(self) -> str:
        """The advice in a line."""
        if self.stays:
            return "no other plan is expected to save time: stay"
        low, high = self.saved_90_s
        verdict = "moving pays" if self.pays else "moving may not pay"
        return (
            f"{verdict}: a new plan takes {format_prediction(self.new)}; moving "
            f"{format_bytes(self.moved_bytes)} takes {self.moving_s:.3g} s and saves "
            f"{self.saved_s:,.3g} s (90% interval {low:,.3g} to {high:,.3g}) in "
            f"{self.steps_left:,} steps, with probability {self.probability:.2f}"
        )

    def _saved_s(self, old_ms: Any, new_ms: Any) -> Any:
        return (old_ms - new_ms) * self.steps_left / 1000 - self.moving_s


def link_of(task: ShardingTask, link: Link | None) -> AnyLink:
    """Returns the link over which tables move: the given one, else that of the task's objective.

    Raises:
        UserError: There is none.
    """
    found = link or task.objective.link
    if found is None:
        raise UserError("the task has no link: give the one over which tables move, as 25GB/s")
    return found


@one_thread()
def predicted(
    oracle: EstimatedCosts, task: ShardingTask, plans: Iterable[ShardingPlan]
) -> list[StepPrediction]:
    """Returns the predicted step times of plans; the oracle keeps nothing of the task's tables."""
    own = oracle.fresh()
    predictor = StepPredictor(own, task)
    return [predictor.of(plan) for plan in plans]


@one_thread()
def best_move(
    plan: ShardingPlan,
    task: ShardingTask,
    oracle: EstimatedCosts,
    window: WindowCounts,
    link: AnyLink,
    steps_left: int,
) -> MoveAdvice:
    """Returns the move that saves most time in the steps that are left, or stays with the plan.

    New plans are that of sharder `autoshard`, and plans near the one in use, of which few tables
    move. All are made and priced by the window's tables.

    Args:
        plan: Plan in use.
        task: Task with the tables of the window.
        oracle: Cost oracle.
        window: Counts of the window.
        link: Link over which tables move.
        steps_left: Steps that are left to train.
    """
    own = oracle.fresh()
    stored = sum(task.operator.stored_bytes(table.rows, table.dim) for table in task.tables)
    sharders = [
        make_sharder("autoshard", SharderContext(own, load_policy("cpu"))),
        *(IncrementalSharder(own, plan, int(share * stored)) for share in _BUDGETS),
    ]
    found = [plan]
    for sharder in sharders:
        with suppress(PlanError):  # none fits, or the one in use no longer does
            found.append(renumbered(sharder.shard(task), plan, task))
    speed = link.all_to_all(len(task.devices))
    old, *others = predicted(own, task, found)
    advice = [MoveAdvice(plan, (), old, old, 0.0, 0.0, steps_left)]
    for new, prediction in zip(found[1:], others, strict=True):
        moves = moves_between(plan, new, task)
        most = max(traffic.most for traffic in traffic_of(moves, len(task.devices)))
        moving_s = speed.latency_s + most / speed.bytes_s if moves else 0.0
        advice.append(MoveAdvice(new, moves, old, prediction, 0.0, moving_s, steps_left))
    best = max(advice, key=lambda each: each.saved_s)
    if best.stays:
        return best
    return replace(best, error=sampling_error(own, (plan, best.plan), task, window))


def format_prediction(prediction: StepPrediction) -> str:
    """Returns a step time with its interval."""
    low, high = prediction.interval_ms
    return f"{prediction.expected_ms:.2f} ms (90% interval {low:.2f} to {high:.2f})"
