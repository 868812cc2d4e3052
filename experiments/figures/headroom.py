"""What there is to be won in each family of tasks: plans of all sharders beside annealing's.

By the cost model and each task's objective: nothing is measured. Annealing is no bound, but it
looks at all that a plan is judged by, and takes as long as it is given.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.cost_model import EstimatedCosts, OutsideTraining, load_model
from autoshard.envs import Deck
from autoshard.envs.task_families import FAMILIES, FILLS, Choice
from autoshard.experiments.figures.figure import Figure
from autoshard.experiments.figures.workbench import say
from autoshard.experiments.judging.outcomes import (
    best_of_each,
    estimated,
    make_plans,
    maxima_of,
    relative,
)
from autoshard.experiments.training.policy_check import draw_tasks
from autoshard.sharders import (
    HEURISTICS,
    SHARDERS,
    Means,
    Policy,
    load_policy,
    make_sharder,
)
from autoshard.workload import Sharder, ShardingTask
from autoshard.workload.parts import tables_by_part

_BATCH_SIZE = 1024
_NEGLIGIBLE = 1e-6  # of what a plan costs: no headroom
_TASKS, _SEED = 3, 5
_SECONDS = 60.0  # of annealing for all tasks of a family, loose or tight
BAR, YARDSTICK, _BEST = "cost_fused", "annealing", "best heuristic"
# What is set beside the bar, as far as it is there.
_NAMES = tuple(name for name in ("policy", "autoshard", "neuroshard") if name in SHARDERS)


@dataclass(frozen=True)
class Tried:
    """What a sharder made of tasks: ms by their objectives, None without a plan; and seconds."""

    plan_ms: list[float | None]
    seconds: list[float]


@dataclass(frozen=True)
class Headroom:
    """Of a family's tasks, by the name of each sharder; of heuristics the best of each task."""

    choice: Choice
    tried: Mapping[str, Tried]

    @property
    def name(self) -> str:
        """Of the family, and which memory."""
        return f"{self.choice.name}, {self.choice.memory}"

    def share(self, name: str) -> float | None:
        """Of what annealing wins over cost_fused, how much a sharder does, on tasks for which all
        three have plans; None where there are none, or nothing is won.
        """
        rows = (self.tried[each].plan_ms for each in (BAR, name, YARDSTICK))
        told = np.array(list(zip(*rows, strict=True)), float)  # None becomes NaN
        bar, ours, least = told[~np.isnan(told).any(1)].sum(0)
        return float((bar - ours) / (bar - least)) if bar - least > _NEGLIGIBLE * bar else None

    def figures(self) -> list[Figure]:
        """As they are told."""
        found = []
        for name, tried in self.tried.items():
            if name != BAR:
                found.append(self._ratio(name))
            if name not in (BAR, YARDSTICK):
                told = f"{self.name}: share of the headroom, {name}"
                found.append(Figure(told, "", self.share(name)))
            without = tried.plan_ms.count(None)
            found.append(Figure(f"{self.name}: tasks without a plan, {name}", "", without))
            mean = sum(tried.seconds) / len(tried.seconds)
            found.append(Figure(f"{self.name}: seconds a plan, {name}", "", mean, "s"))
        return found

    def _ratio(self, name: str) -> Figure:
        told = f"{self.name}: objective over cost_fused's, {name}"
        ratio = relative(self.tried[name].plan_ms, self.tried[BAR].plan_ms)
        if ratio is None:
            return Figure(told, "", None)
        known = ratio.count > 1
        return Figure(told, "", ratio.value, interval=(ratio.low, ratio.high) if known else None)


def headroom_figures(
    seconds: float = _SECONDS, tasks: int = _TASKS, names: Sequence[str] = tuple(FAMILIES)
) -> list[Figure]:
    """Of each family, loose and tight. `seconds`: of annealing, for all tasks of one together."""
    policy, found = load_policy("cpu"), list[Figure]()
    for choice in (Choice(name, memory) for name in names for memory in FILLS):
        say(f"what there is to be won: {choice.name}, {choice.memory}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", OutsideTraining)  # whatever tables cost, all go by it
            found += headroom(choice, policy, seconds / tasks, tasks).figures()
    return found


def family_tasks(choice: Choice, count: int) -> tuple[EstimatedCosts, list[ShardingTask]]:
    """So many of the family's test tasks, and what prices them."""
    oracle = EstimatedCosts(load_model("cpu"), _BATCH_SIZE)
    tables = tables_by_part(choice.family.tables())["test"]
    deck = Deck(oracle, [table.whole() for table in tables])
    return oracle, draw_tasks(deck, choice.deals, count, _SEED)


def headroom(choice: Choice, policy: Policy, seconds: float, tasks: int) -> Headroom:
    """Of so many of the family's test tasks, with so many seconds of annealing for each."""
    oracle, dealt = family_tasks(choice, tasks)
    # Seconds are annealing's; what others plan in is their own. An oracle each: what one sharder
    # has looked up would cost the next no time.
    sharders = {
        name: make_sharder(name, Means(EstimatedCosts(oracle.model, _BATCH_SIZE), policy))
        for name in (*HEURISTICS, BAR, *_NAMES)
    }
    annealing = make_sharder(YARDSTICK, Means(oracle, seconds=seconds))
    tried = tried_by(sharders | {YARDSTICK: annealing}, oracle, dealt)
    usual = {name: tried[name].plan_ms for name in HEURISTICS}
    best = Tried(best_of_each(usual), [max(tried[name].seconds) for name in HEURISTICS])
    others = {name: tried[name] for name in (BAR, *_NAMES, YARDSTICK)}
    return Headroom(choice, {_BEST: best, **others})


def tried_by(
    sharders: Mapping[str, Sharder], oracle: EstimatedCosts, tasks: Sequence[ShardingTask]
) -> dict[str, Tried]:
    """What each of these makes of the tasks."""
    made = make_plans(sharders, tasks)
    costs = maxima_of(estimated(made, tasks, oracle))
    return {
        name: Tried(costs[name], [outcome.seconds or 0.0 for outcome in some])
        for name, some in made.items()
    }
