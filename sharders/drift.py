"""`DriftMonitor`: watches in a training loop whether the plan still fits the data."""

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from autoshard.cost_model import EstimatedCosts, StepPrediction, StepPredictor
from autoshard.cost_model.drift import CostChange, cost_change, sampling_error
from autoshard.cost_model.threads import one_thread
from autoshard.sharders.context import SharderContext
from autoshard.sharders.incremental import IncrementalSharder
from autoshard.sharders.policy_files import load_policy
from autoshard.sharders.registry import make_sharder
from autoshard.workload import Link, PlanError, ShardingPlan, ShardingTask, UserError
from autoshard.workload.arrays import Floats, Ints
from autoshard.workload.links import AnyLink
from autoshard.workload.moves import Move, moved_bytes, moves_between, renumbered, traffic_of
from autoshard.workload.profiling.sources import of_features
from autoshard.workload.profiling.table_counts import TableBatch
from autoshard.workload.profiling.window import WindowCounts, counted_batches
from autoshard.workload.sizes import format_bytes

_BUDGETS = (0.02, 0.2)  # shares of all bytes that may move in plans near the one in use
_INTERVAL = (0.05, 0.95)
_SURE = 0.95


@dataclass(frozen=True)
class MoveAdvice:
    """What moving to a new plan gains and takes. The new plan may be the one in use.

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
            f"{verdict}: a new plan takes {_format(self.new)}; moving "
            f"{format_bytes(self.moved_bytes)} takes {self.moving_s:.3g} s and saves "
            f"{self.saved_s:,.3g} s (90% interval {low:,.3g} to {high:,.3g}) in "
            f"{self.steps_left:,} steps, with probability {self.probability:.2f}"
        )

    def _saved_s(self, old_ms: Any, new_ms: Any) -> Any:
        return (old_ms - new_ms) * self.steps_left / 1000 - self.moving_s


@dataclass(frozen=True)
class DriftReport:
    """What a window of batches says of the plan in use.

    Args:
        step: Last step of the window.
        task: The task with the tables as the window uses them, to plan anew.
        change: How costs changed since the reference.
        before: Predicted step time of the plan by the lookups of the reference.
        now: Predicted step time of the plan by the window's.
        advice: Whether moving pays; None where costs have not changed.
    """

    step: int
    task: ShardingTask
    change: CostChange
    before: StepPrediction
    now: StepPrediction
    advice: MoveAdvice | None = None

    @property
    def line(self) -> str:
        """The report in a line."""
        found = self.change
        what = "costs changed" if found.is_drift else "costs are as before"
        low, high = found.ratio_90
        line = (
            f"{what} (p = {found.p_value:.2g}): a step takes {_format(self.now)}, "
            f"{found.ratio:.3f} of before (90% interval {low:.3f} to {high:.3f})"
        )
        return line if self.advice is None else f"{line}; {self.advice.line}"

    @property
    def metrics(self) -> dict[str, float]:
        """Numbers for MLflow, by name."""
        found = {
            "drift/alarm": float(self.change.is_drift),
            "drift/p_value": self.change.p_value,
            "drift/step_ratio": self.change.ratio,
            "drift/step_ratio_low": self.change.ratio_90[0],
            "drift/step_ratio_high": self.change.ratio_90[1],
            "drift/balanced_ratio": self.change.work_ratio,
            "drift/step_ms": self.now.expected_ms,
        }
        if self.advice is not None:
            found |= {
                "drift/new_plan_ms": self.advice.new.expected_ms,
                "drift/pays": float(self.advice.pays),
                "drift/moved_gb": self.advice.moved_bytes / 1e9,
                "drift/saved_s": self.advice.saved_s,
                "drift/saved_s_low": self.advice.saved_90_s[0],
                "drift/saved_s_high": self.advice.saved_90_s[1],
            }
        return found


class DriftMonitor:
    """Counts one batch in `every` of a training loop, and tests whether costs of the plan changed.

    Use it on one rank. Batches of that rank are joined until they have as many samples as the
    task's batch, and counted in a thread beside training. After `window` such batches, `observe`
    returns a report, and logs it to MLflow if a run is active. Costs are compared with those of the
    tables that the plan was made for, if these were profiled in batches of the task, else with the
    first window. A window that differs is what later ones are compared with.

    Example:
        monitor = DriftMonitor(plan, task, oracle, total_steps=100_000)
        for batch in batches:
            if report := monitor.observe(batch.sparse_features):
                print(report.line)

    Args:
        plan: Plan in use.
        task: Task that it was made for.
        oracle: Cost oracle of the task.
        total_steps: Steps of the whole training, so many of which are left to save time.
        link: Link over which tables would move. Default: that of the task's objective.
        features: Features of each table; default: each feature is a table of its name.
        hot_ids: Hot ids by table, if the plan has hot rows.
        every: One batch in so many is counted.
        window: Counted batches of a window, at least 20.
    """

    def __init__(
        self,
        plan: ShardingPlan,
        task: ShardingTask,
        oracle: EstimatedCosts,
        total_steps: int,
        link: Link | None = None,
        features: Mapping[str, Sequence[str]] | None = None,
        hot_ids: Mapping[str, Ints] | None = None,
        every: int = 100,
        window: int = 100,
    ) -> None:
        if every < 1:
            raise UserError(f"every must be at least 1, got {every}")
        oracle.check(task)
        plan.check_places(task)
        self._plan, self._task, self._oracle = plan, task, oracle
        self._link, self._total_steps = link_of(task, link), total_steps
        self._features, self._every, self._window = features, every, window
        hot = dict(plan.hot_rows)
        if missing := sorted(set(hot) - set(hot_ids or {})):
            raise UserError(f"the plan copies hot rows of table {missing[0]}: give their hot_ids")
        self._hot_ids = {name: (hot_ids or {})[name][:count] for name, count in hot.items()}
        self._batches = counted_batches(task.tables, task.batch_size)
        self._before = self._predicted(task) if self._batches else None
        self._counts = self._new_window()
        self.step, self._next = 0, 0
        self._parts: list[Any] = []  # batches of this rank that are to be joined
        self._samples = 0
        self._work: Future[DriftReport | None] | None = None
        self._thread = ThreadPoolExecutor(1, "drift")

    def observe(self, batch: Any) -> DriftReport | None:
        """Takes the batch of a step; returns the report of a window once it is there.

        A batch that is due while the last one is still being counted is left out.

        Args:
            batch: A KeyedJaggedTensor, or an object whose `sparse_features` is one; best one in
                the memory of the host.
        """
        number, self.step = self.step, self.step + 1
        if self._parts or number >= self._next:
            self._collect(batch)
        return self.wait() if self._work is not None and self._work.done() else None

    __call__ = observe

    def wait(self) -> DriftReport | None:
        """Waits until the last batch is counted; returns the report if it ended a window."""
        work, self._work = self._work, None
        report = None if work is None else work.result()
        if report is not None:
            _log(report)
        return report

    def count(self, read: Callable[[str], TableBatch]) -> DriftReport | None:
        """Counts a batch of all ranks; returns the report if it ended a window.

        Args:
            read: Returns the lookups of a table in the batch, by its name.
        """
        self._counts.add(read)
        if not self._counts.is_full:
            return None
        window, self._counts = self._counts, self._new_window()
        task = replace(self._task, tables=window.tables())
        if self._batches is None or self._before is None:
            self._become_reference(task, window.batches, self._predicted(task))
            return None
        change = cost_change(self._oracle, self._plan, self._task, self._batches, window)
        before, now, advice = self._before, self._predicted(task), None
        if change.is_drift:
            left = max(0, self._total_steps - self.step)
            advice = best_move(self._plan, task, self._oracle, window, self._link, left)
            self._become_reference(task, window.batches, now)
        return DriftReport(self.step, task, change, before, now, advice)

    def _collect(self, batch: Any) -> None:
        from autoshard.workload.torchrec.lookups import features_of, joined_features

        self._parts.append(features_of(batch).to("cpu"))
        self._samples += self._parts[-1].stride()
        if self._samples < self._task.batch_size:
            return
        parts, self._parts, self._samples = self._parts, [], 0
        self._next += self._every * len(parts)

        def count() -> DriftReport | None:
            ((lookups, _),) = joined_features(parts, self._task.batch_size)
            return self.count(partial(self._of_table, lookups))

        if self._work is None:
            self._work = self._thread.submit(count)

    def _of_table(self, lookups: Mapping[str, tuple[Ints, Ints]], name: str) -> TableBatch:
        features = [name] if self._features is None else self._features[name]
        return of_features(name, features, lookups)[0]

    def _predicted(self, task: ShardingTask) -> StepPrediction:
        return predicted(self._oracle, task, [self._plan])[0]

    def _become_reference(self, task: ShardingTask, batches: int, now: StepPrediction) -> None:
        self._task, self._batches, self._before = task, batches, now

    def _new_window(self) -> WindowCounts:
        return WindowCounts(
            self._task.tables,
            self._task.batch_size,
            self._window,
            self._plan.row_wise,
            self._hot_ids,
        )


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


def _format(prediction: StepPrediction) -> str:
    low, high = prediction.interval_ms
    return f"{prediction.expected_ms:.2f} ms (90% interval {low:.2f} to {high:.2f})"


def _log(report: DriftReport) -> None:
    """Logs a report to MLflow's active run. Whoever started one has imported MLflow."""
    mlflow = sys.modules.get("mlflow")
    if mlflow is not None and mlflow.active_run() is not None:
        known = {name: value for name, value in report.metrics.items() if math.isfinite(value)}
        mlflow.log_metrics(known, step=report.step)
