"""`DriftMonitor`: watches in a training loop whether the plan still fits the data."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from autoshard.cost_model import EstimatedCosts, StepPrediction
from autoshard.cost_model.pricing.drift import CostChange, cost_change
from autoshard.sharders.replanning.move_advice import (
    MoveAdvice,
    best_move,
    format_prediction,
    link_of,
    predicted,
)
from autoshard.workload import Link, ShardingPlan, ShardingTask, UserError
from autoshard.workload.access.hot_ids import hottest_ids
from autoshard.workload.arrays import Ints
from autoshard.workload.profiling.jagged import features_of, joined_features
from autoshard.workload.profiling.sources import of_features
from autoshard.workload.profiling.table_counts import TableBatch
from autoshard.workload.profiling.window import WindowCounts, counted_batches


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
            f"{what} (p = {found.p_value:.2g}): a step takes {format_prediction(self.now)}, "
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
        self._hot_ids = hottest_ids(plan.copied_hot_rows, hot_ids or {})
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


def _log(report: DriftReport) -> None:
    """Logs a report to MLflow's active run. Whoever started one has imported MLflow."""
    mlflow = sys.modules.get("mlflow")
    if mlflow is not None and mlflow.active_run() is not None:
        known = {name: value for name, value in report.metrics.items() if math.isfinite(value)}
        mlflow.log_metrics(known, step=report.step)
