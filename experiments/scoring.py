"""How sharders did on the same tasks: means, wins, and by how much they beat the best heuristic."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cost_model import EstimatedCosts
from envs import Deal, Deck, ShardingGame
from experiments.comparing import Outcome
from experiments.policy_check import best_heuristic, relative
from sharders import HEURISTICS
from workload import ShardingTask

_RESAMPLES = 10_000
_INTERVAL = (0.025, 0.975)


@dataclass(frozen=True)
class Score:
    """A sharder on all tasks. Those that it ran out of memory on are in no mean, and not won.

    Args:
        max_ms_mean: of the slowest device, mean of tasks.
        max_ms: of each task; None where it ran out of memory.
        balance_mean: mean over maximum of the devices, mean of tasks.
        oom: tasks for which it found no plan that fits.
        seconds_mean: to make a plan.
        win_rate: share of the tasks on which no sharder's maximum is lower.
        improvement: share of the best heuristic's mean maximum that it saves, on tasks for which
            both have a plan; None without such tasks, or without a heuristic.
        improvement_low: lower end of its 95 % interval, by drawing other tasks of these.
        improvement_high: upper end.
        gap: of the mean maximum over what the model takes for the least that whole tables allow.
    """

    max_ms_mean: float | None
    max_ms: tuple[float | None, ...]
    balance_mean: float | None
    oom: int
    seconds_mean: float | None
    win_rate: float
    improvement: float | None
    improvement_low: float | None
    improvement_high: float | None
    gap: float | None


def score_all(
    outcomes: Mapping[str, Sequence[Outcome]], bounds_ms: Sequence[float]
) -> tuple[dict[str, Score], str | None]:
    """The score of each sharder, the least mean maximum first, and the best heuristic's name."""
    maxima = {name: [outcome.max_ms for outcome in some] for name, some in outcomes.items()}
    heuristics = {name: some for name, some in maxima.items() if name in HEURISTICS}
    best = best_heuristic(heuristics) if heuristics else None
    least = [
        min((ms for ms in column if ms is not None), default=None)
        for column in zip(*maxima.values(), strict=True)
    ]
    scores = {}
    for name, some in outcomes.items():
        ours = maxima[name]
        costs = [outcome.cost for outcome in some if outcome.cost is not None]
        theirs = [None] * len(ours) if best is None else maxima[best]
        low, high = _interval(ours, theirs)
        scores[name] = Score(
            max_ms_mean=_mean([ms for ms in ours if ms is not None]),
            max_ms=tuple(ours),
            balance_mean=_mean([cost.balance for cost in costs]),
            oom=ours.count(None),
            seconds_mean=_mean([o.seconds for o in some if o.cost is not None]),
            win_rate=sum(ms is not None and ms == b for ms, b in zip(ours, least, strict=True))
            / len(ours),
            improvement=_less(relative(ours, theirs)),
            improvement_low=low,
            improvement_high=high,
            gap=_more(relative(ours, bounds_ms)),
        )
    ordered = sorted(scores, key=lambda name: (scores[name].max_ms_mean or np.inf, name))
    return {name: scores[name] for name in ordered}, best


def bounds_ms(oracle: EstimatedCosts, tasks: Sequence[ShardingTask]) -> list[float]:
    """Milliseconds that no plan of whole tables can undercut, as the model estimates them."""
    found = []
    for task in tasks:
        deck = Deck(oracle, [table.whole() for table in task.tables])
        game = ShardingGame(deck, 1, len(task.tables), len(task.devices))
        memory = np.array([device.memory_bytes for device in task.devices], np.int64)
        game.deal([0], [Deal(np.arange(len(task.tables)), memory)])
        found.append(float(game.bound_ms[0]))
    return found


def _interval(
    ours: Sequence[float | None], theirs: Sequence[float | None]
) -> tuple[float | None, float | None]:
    """95 % interval of the improvement: bootstrap over the tasks for which both have a plan."""
    both = np.array(
        [(a, b) for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None]
    )
    if not len(both):
        return None, None
    rng = np.random.default_rng(0)
    drawn = both[rng.integers(len(both), size=(_RESAMPLES, len(both)))].sum(axis=1)
    low, high = np.quantile(1 - drawn[:, 0] / drawn[:, 1], _INTERVAL)
    return float(low), float(high)


def _mean(values: Sequence[float]) -> float | None:
    return statistics.mean(values) if values else None


def _less(ratio: float) -> float | None:
    return None if np.isnan(ratio) else 1 - ratio


def _more(ratio: float) -> float | None:
    return None if np.isnan(ratio) else ratio - 1
