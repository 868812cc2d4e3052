"""Scores of sharders on the same tasks: a table, a picture, and a one-line verdict."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
import torch
from rich.table import Table

from autoshard.cost_model import EstimatedCosts
from autoshard.experiments.evaluation.planners import (
    Outcome,
    Outcomes,
    Planners,
    best_heuristic,
    estimated,
    lowest_of_each,
    steps_of,
    typical,
)
from autoshard.experiments.evaluation.posterior import as_samples, means_of
from autoshard.experiments.evaluation.ratio import Ratio, relative
from autoshard.experiments.evaluation.task_sets import TaskSet
from autoshard.workload import ShardingTask
from autoshard.workload.arrays import Floats
from autoshard.workload.plans.step_price import StepPrice

_NOTHING = "-"
_OPTIONAL = {"bal.": _NOTHING, "oom": "0", "95% CI": _NOTHING, "pred": _NOTHING, "meas s": _NOTHING}
_TIE = 1e-6  # relative difference up to which step times are equal: rounding differs between plans
_SIGNIFICANT = 0.975  # one-sided probability of a 95 % interval


@dataclass(frozen=True)
class Score:
    """A sharder's results on all tasks. Means leave out tasks without a plan."""

    step_ms_mean: float | None  # mean step time
    # step time per task, corrected for the upward bias of the maximum of noisy costs; None where
    # the sharder ran out of memory
    step_ms: tuple[float | None, ...]
    balance_mean: float | None  # mean over slowest device, all stages together
    oom: int  # number of tasks without a plan that fits
    seconds_mean: float | None  # planning time without measuring; None for plans of other planners
    measuring_seconds_mean: float | None  # time that the sharder measured per plan
    win_rate: float  # share of the tasks on which no sharder's step is shorter, but for rounding
    # step time over the best heuristic's, geometric mean over tasks that both have plans for;
    # None without such tasks, or without a heuristic
    ratio: float | None
    # lower end of its 95 % interval for other tasks of this kind; with one task, for that task by
    # the noise of measuring alone, or None if it is priced
    ratio_low: float | None
    ratio_high: float | None  # upper end
    # variance of its log due to measuring noise, and due to the choice of tasks; None with one task
    ratio_variance: Mapping[str, float] | None
    # ratio of each task; None where one of both has no plan, empty where `ratio` is None
    task_ratios: tuple[float | None, ...]
    improvement: float | None  # 1 minus the ratio
    # probability that the ratio is below 1; None for the best heuristic
    better_than_heuristic: float | None
    # probability that the sharder is faster than the next in the ranking
    better_than_next: float | None
    promise: float | None  # predicted over measured step time, geometric mean over tasks
    # step time over the model's lower bound for whole tables, geometric mean over tasks, minus 1
    gap: float | None

    @property
    def metrics(self) -> dict[str, float]:
        """Its numbers, without those that are None and those of single tasks."""
        return {n: float(v) for n, v in vars(self).items() if isinstance(v, int | float)}


def score_all(
    outcomes: Outcomes,
    steps_ms: Mapping[str, Floats],
    bounds_ms: Sequence[float],
    predicted_ms: Mapping[str, Sequence[float | None]],
) -> tuple[dict[str, Score], str | None]:
    """Returns scores by sharder, the least geometric mean of steps first, and the best heuristic.

    Args:
        outcomes: Plans and costs.
        steps_ms: Posterior samples of step times by sharder, [samples, tasks], NaN without a plan.
        bounds_ms: Lower bound of each task; may be empty.
        predicted_ms: Step times by a cost model, if others were measured; may be empty.
    """
    steps = means_of(steps_ms)
    best = best_heuristic(steps)
    lowest = lowest_of_each(steps.values())
    ranked = sorted(steps, key=lambda name: (typical(steps[name]), name))
    next_slower = dict(pairwise(ranked))
    scores = {}
    for name in ranked:
        ours = steps[name]
        planned = [outcome for outcome in outcomes[name] if outcome.plan]
        ratio = None if best is None else Ratio.of(steps_ms[name], steps_ms[best])
        bounded = ratio if ratio is not None and math.isfinite(ratio.high) else None
        after = next_slower.get(name)
        against = None if after is None else Ratio.of(steps_ms[name], steps_ms[after])
        balances = [
            outcome.cost.mean_ms / ms
            for outcome, ms in zip(outcomes[name], ours, strict=True)
            if outcome.cost is not None and ms is not None
        ]
        wins = [
            ms is not None and least is not None and math.isclose(ms, least, rel_tol=_TIE)
            for ms, least in zip(ours, lowest, strict=True)
        ]
        predicted = relative(predicted_ms.get(name, [None] * len(ours)), ours)
        bound = relative(ours, bounds_ms) if bounds_ms else None
        scores[name] = Score(
            step_ms_mean=_mean(ours),
            step_ms=tuple(ours),
            balance_mean=_mean(balances),
            oom=ours.count(None),
            seconds_mean=_mean([o.seconds for o in planned]),
            measuring_seconds_mean=_mean([o.measuring_seconds for o in planned]),
            win_rate=sum(wins) / len(ours),
            ratio=None if ratio is None else ratio.value,
            ratio_low=None if bounded is None else bounded.low,
            ratio_high=None if bounded is None else bounded.high,
            ratio_variance=None
            if ratio is None or ratio.count == 1
            else {"measuring": ratio.measurement_variance, "tasks": ratio.task_variance},
            task_ratios=() if ratio is None else ratio.of_tasks,
            improvement=None if ratio is None else 1 - ratio.value,
            better_than_heuristic=None
            if ratio is None or name == best
            else ratio.probability_below_one,
            better_than_next=None if against is None else against.probability_below_one,
            promise=None if predicted is None else predicted.value,
            gap=None if bound is None else bound.value - 1,
        )
    return scores, best


@dataclass(frozen=True)
class Evaluation:
    """Plans of several sharders for the same tasks, and their step times."""

    tasks: list[ShardingTask]  # the tasks, in order
    outcomes: dict[str, list[Outcome]]  # plans by sharder and task, with costs
    # posterior samples of step times by sharder, [samples, tasks]; NaN without a plan
    steps_ms: dict[str, Floats]
    seconds: float = 0.0  # time that the evaluation took, planning included
    measuring_seconds: float = 0.0  # part of it that was spent measuring
    repeats: int = 0  # number of measurements
    ended: str = ""  # why it ended, in one line

    def scores(
        self, oracle: EstimatedCosts, measured: bool, trained: bool = False
    ) -> tuple[dict[str, Score], str | None]:
        """Returns the score of each sharder, and the best heuristic's name.

        Measured steps are compared with the oracle's predictions. So are training steps, unless
        the oracle prices operators: then they are not compared with its lower bound either.
        """
        priced = not trained or oracle.model.in_training
        compared = (measured or trained) and priced
        predicted = steps_of(estimated(self.outcomes, self.tasks, oracle)) if compared else {}
        bounds = bounds_ms(oracle, self.tasks) if priced else []
        return score_all(self.outcomes, self.steps_ms, bounds, predicted)


def evaluate_estimated(task_set: TaskSet, planners: Planners) -> Evaluation:
    """Compares sharders by the planners' oracle, ignoring its uncertainty."""
    entries = planners.planned(task_set)
    tasks = [entry.task for entry in entries]
    plans = {name: [entry.outcomes[name] for entry in entries] for name in entries[0].outcomes}
    outcomes = estimated(plans, tasks, planners.oracle)
    steps = {name: as_samples(of_tasks) for name, of_tasks in steps_of(outcomes).items()}
    return Evaluation(tasks, outcomes, steps)


def bounds_ms(oracle: EstimatedCosts, tasks: Sequence[ShardingTask]) -> list[float]:
    """Returns a lower bound of each task's predicted step for plans of whole tables, in ms.

    Each stage takes at least as long as an even split of all tables, and as each table alone.
    """
    pricing, found = oracle.expectation(), []
    for task in tasks:
        price, ranks = StepPrice.of_task(task), len(task.devices)
        whole = [table.whole() for table in task.tables]
        amounts = pricing.amounts(whole)
        columns = np.array([float(piece.output_width) for piece in whole])
        every = torch.cat([amounts, amounts.sum(0, keepdim=True) / ranks])
        forward, backward = pricing.price(every)[:, 0].double().numpy().T
        # Some device sends at least an even share, and receives no more than that.
        columns = np.maximum(np.append(columns, 0.0), columns.sum() / ranks)
        step_ms = float(price.step_ms(forward, backward, columns))
        found.append(step_ms + oracle.common_ms(task))
    return found


def score_tables(
    scores: Mapping[str, Score],
    best: str | None,
    what: str,
    subject: str = "step",
    names: Sequence[str] = (),
) -> Iterator[Table]:
    """Yields a table with a row for each sharder, and one of the extreme ratios of several tasks.

    Args:
        scores: Scores by sharder.
        best: Name of the best heuristic.
        what: Objective, and the source of costs.
        subject: What is timed.
        names: Names of the tasks; by default their numbers.
    """
    rows = []
    for name, score in scores.items():
        low, high = _format(score.ratio_low, ".3f"), _format(score.ratio_high, ".3f")
        bounded = name != best and score.ratio_low is not None
        rows.append(
            {
                "sharder": name,
                "ms": _format(score.step_ms_mean, ".2f"),
                "bal.": _format(score.balance_mean, ".2f"),
                "oom": str(score.oom),
                "ratio": _format(score.ratio, ".3f"),
                "95% CI": f"{low}-{high}" if bounded else _NOTHING,
                "P": _format(score.better_than_heuristic, ".0%"),
                "P next": _format(score.better_than_next, ".0%"),
                "pred": _format(score.promise, ".2f"),
                "plan s": _format(score.seconds_mean, ".3f"),
                "meas s": _format(score.measuring_seconds_mean or None, ".1f"),
            }
        )
    shown = [
        column
        for column in rows[0]
        if column not in _OPTIONAL or any(row[column] != _OPTIONAL[column] for row in rows)
    ]
    yield _table(
        f"{subject} time ({what})",
        f"ms: mean of the tasks; ratio: over {best or 'the best heuristic (none is compared)'}, "
        "geometric mean of the tasks' ratios, and its 95 % CI; P, P next: probability of being "
        "faster than it, and than the next row; bal.: mean over slowest device, all stages "
        "together; pred: predicted over measured step; oom: tasks without a plan that fits, left "
        "out; plan s, meas s: seconds of planning on one core, and of measuring by the sharder",
        {name: [row[name] for row in rows] for name in shown},
        best,
    )
    extremes = []
    for name, score in scores.items():
        known = [(ratio, n) for n, ratio in enumerate(score.task_ratios) if ratio is not None]
        if len(known) > 1 and name != best:
            ends = (
                (f"{r:.3f}", names[n] if names else str(n)) for r, n in (min(known), max(known))
            )
            extremes.append((name, *chain(*ends)))
    if extremes:
        columns = zip(*extremes, strict=True)
        heads = ("sharder", "least", "task", "largest", "task ")
        yield _table("ratios of single tasks", "", dict(zip(heads, columns, strict=True)), None)


def _table(
    title: str, caption: str, columns: Mapping[str, Sequence[str]], bold: str | None
) -> Table:
    """Returns a table whose heads are never cut: if it is too wide, names are folded."""
    found = Table(
        title=title,
        title_justify="left",
        caption=caption,
        caption_justify="left",
        box=None,
        padding=(0, 0, 0, 1),
        pad_edge=False,
    )
    for head in columns:
        text = head == "sharder" or head.startswith("task")
        found.add_column(
            head, justify="left" if text else "right", no_wrap=not text, overflow="fold"
        )
    for row in zip(*columns.values(), strict=True):
        found.add_row(*row, style="bold" if row[0] == bold else "")
    return found


def best_sharder(scores: Mapping[str, Score]) -> str | None:
    """Returns the sharder with the lowest ratio, else the lowest mean step; None without plans."""
    planned = [name for name, score in scores.items() if score.step_ms_mean is not None]
    return max(planned, key=lambda name: scores[name].improvement or 0.0, default=None)


def verdict(scores: Mapping[str, Score], best: str | None, what: str, subject: str = "step") -> str:
    """Returns one line that compares the best sharder's step time with the best heuristic's."""
    first = best_sharder(scores)
    if first is None:
        return "no sharder found a plan that fits"
    score = scores[first]
    if best is None or score.improvement is None:
        return f"{first} is best with {score.step_ms_mean:.2f} ms ({what}); no heuristic to compare"
    if first == best:
        return f"no sharder beats {best}, the best heuristic: {score.step_ms_mean:.2f} ms ({what})"
    against = f"{best}, the best heuristic"
    low, high = score.ratio_low, score.ratio_high
    if low is None or high is None or high >= 1:
        known = "one task" if low is None or high is None else f"95% CI {low:.3f} to {high:.3f}"
        return (
            f"{first}: {subject} time not significantly different from {against} (ratio "
            f"{score.ratio:.3f}, {known}; {what})"
        )
    alone = "" if score.ratio_variance else " on this task alone"
    line = (
        f"{first}: {subject} time {score.improvement:.1%} lower than {against} (95% CI "
        f"{1 - high:.1%} to {1 - low:.1%}{alone}; {what})"
    )
    next_slower = dict(pairwise(scores)).get(first)
    probability = score.better_than_next
    if next_slower is None or probability is None or probability > _SIGNIFICANT:
        return line
    return f"{line}; the difference from {next_slower} is not significant"


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.mean(known) if known else None


def _format(value: float | None, form: str) -> str:
    return _NOTHING if value is None else format(value, form)
