"""How sharders did on the same tasks: means, wins, and their ratios to the best heuristic."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from autoshard.cost_model import EstimatedCosts
from autoshard.experiments.judging.outcomes import (
    Outcome,
    Outcomes,
    as_known,
    best_heuristic,
    maxima_of,
    relative,
)
from autoshard.experiments.judging.statistics import Floats, Ratio
from autoshard.workload import ShardingTask
from autoshard.workload.step_price import StepPrice


@dataclass(frozen=True)
class Score:
    """A sharder on all tasks. Those that it ran out of memory on are in no mean, and not won.

    Args:
        step_ms_mean: what a step takes, mean of tasks.
        step_ms: of each task, without the upward bias of the largest of noisy costs; None where it
            ran out of memory.
        balance_mean: mean over slowest device of all waits together, mean of tasks.
        oom: tasks for which it found no plan that fits.
        seconds_mean: to make a plan, measuring left out; None where plans came from elsewhere.
        measuring_seconds_mean: that it spent measuring for a plan.
        win_rate: share of the tasks on which no sharder's step is shorter.
        ratio: of its mean step to the best heuristic's, on tasks for which both have a plan; None
            without such tasks, or without a heuristic.
        ratio_low: lower end of its 95 % interval, for other tasks of this kind; None with one task.
        ratio_high: upper end.
        ratio_variance: by measuring, and by the choice of tasks.
        improvement: 1 minus the ratio.
        better_than_heuristic: the probability that the ratio is below 1; None for the best
            heuristic itself.
        better_than_next: the probability that it is better than the next in the ranking.
        promise: the step by the cost model over what it is, in sum over tasks.
        gap: of the mean step over what the model takes for the least that whole tables allow.
    """

    step_ms_mean: float | None
    step_ms: tuple[float | None, ...]
    balance_mean: float | None
    oom: int
    seconds_mean: float | None
    measuring_seconds_mean: float | None
    win_rate: float
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    ratio_variance: Mapping[str, float] | None
    improvement: float | None
    better_than_heuristic: float | None
    better_than_next: float | None
    promise: float | None
    gap: float | None

    @property
    def half_width(self) -> float | None:
        """Of the ratio's 95 % interval."""
        if self.ratio_high is None or self.ratio_low is None:
            return None
        return (self.ratio_high - self.ratio_low) / 2


def score_all(
    outcomes: Outcomes,
    steps_ms: Mapping[str, Floats],
    bounds_ms: Sequence[float],
    promised_ms: Mapping[str, Sequence[float | None]],
) -> tuple[dict[str, Score], str | None]:
    """The score of each sharder, the least mean step first, and the best heuristic's name.

    `steps_ms`: what steps may take by a sharder's plans, [scenarios, tasks], NaN without a plan.
    `bounds_ms`: what no plan of whole tables can undercut. `promised_ms`: steps by a cost model,
    where something else judges.
    """
    maxima = {
        name: [None if math.isnan(ms) else float(ms) for ms in some.mean(axis=0)]
        for name, some in steps_ms.items()
    }
    best = best_heuristic(maxima)
    least = [
        min((ms for ms in column if ms is not None), default=None)
        for column in zip(*maxima.values(), strict=True)
    ]
    ranked = sorted(maxima, key=lambda name: (_mean(_known(maxima[name])) or math.inf, name))
    following = dict(pairwise(ranked))
    scores = {}
    for name in ranked:
        ours, some = maxima[name], outcomes[name]
        ratio = None if best is None else Ratio.of(steps_ms[name], steps_ms[best])
        bounded = ratio is not None and ratio.count > 1
        after = following.get(name)
        against = None if after is None else Ratio.of(steps_ms[name], steps_ms[after])
        scores[name] = Score(
            step_ms_mean=_mean(_known(ours)),
            step_ms=tuple(ours),
            balance_mean=_mean(_balances(some, ours)),
            oom=ours.count(None),
            seconds_mean=_mean([o.seconds for o in some if o.plan and o.seconds is not None]),
            measuring_seconds_mean=_mean([o.measuring_seconds for o in some if o.plan]),
            win_rate=sum(ms is not None and ms == b for ms, b in zip(ours, least, strict=True))
            / len(ours),
            ratio=None if ratio is None else ratio.value,
            ratio_low=ratio.low if ratio is not None and bounded else None,
            ratio_high=ratio.high if ratio is not None and bounded else None,
            ratio_variance={"measuring": ratio.measuring, "tasks": ratio.tasks}
            if ratio is not None and bounded
            else None,
            improvement=None if ratio is None else 1 - ratio.value,
            better_than_heuristic=None if ratio is None or name == best else ratio.below_one,
            better_than_next=None if against is None else against.below_one,
            promise=_value(relative(promised_ms.get(name, [None] * len(ours)), ours)),
            gap=_less_one(_value(relative(ours, bounds_ms))) if bounds_ms else None,
        )
    return scores, best


def certain(outcomes: Outcomes) -> dict[str, Floats]:
    """Steps by plans whose costs are certain: one scenario."""
    return {name: as_known(some) for name, some in maxima_of(outcomes).items()}


def bounds_ms(oracle: EstimatedCosts, tasks: Sequence[ShardingTask]) -> list[float]:
    """Milliseconds of a step that no plan of whole tables can undercut, as the model estimates:
    each wait as if all devices shared alike, and no shorter than for any table alone.
    """
    pricing, found = oracle.expectation(), []
    for task in tasks:
        price, ranks = StepPrice.of_task(task), len(task.devices)
        whole = [table.whole() for table in task.tables]
        amounts = pricing.amounts(whole)
        columns = np.array([float(piece.output_width) for piece in whole])
        every = torch.cat([amounts, amounts.sum(0, keepdim=True) / ranks])
        forward, backward = pricing.price(every)[:, 0].double().numpy().T
        columns = np.append(columns, columns.sum() / ranks)
        stages = price.stages_ms(forward, backward, columns)
        found.append(sum(float(stage.max()) for stage in stages))
    return found


def _balances(outcomes: Sequence[Outcome], maxima: Sequence[float | None]) -> list[float]:
    return [
        outcome.cost.mean_ms / slowest
        for outcome, slowest in zip(outcomes, maxima, strict=True)
        if outcome.cost is not None and slowest is not None
    ]


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _mean(values: Sequence[float]) -> float | None:
    return statistics.mean(values) if values else None


def _value(ratio: Ratio | None) -> float | None:
    return None if ratio is None else ratio.value


def _less_one(ratio: float | None) -> float | None:
    return None if ratio is None else ratio - 1
