"""What there is to be won in each family of tasks: plans of all sharders beside annealing's.

By the cost model and each task's objective: nothing is measured. Annealing is no bound, but it
looks at all that a plan is judged by, and takes as long as it is given.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import ray

from autoshard.cost_model import EstimatedCosts, OutsideTraining, load_model
from autoshard.envs import Deck
from autoshard.envs.task_families import ALL, FAMILIES, FILLS, Choice, read_choices
from autoshard.experiments.evaluation.planners import estimated, make_plans, maxima_of
from autoshard.experiments.evaluation.posterior import mean_ratio
from autoshard.experiments.training.checks import draw_tasks
from autoshard.sharders import Means, load_policy, make_sharder
from autoshard.workload import Sharder, ShardingTask
from autoshard.workload.parts import tables_by_part
from bench.figure import Figure
from bench.workbench import say

_BATCH_SIZE = 1024
_NEGLIGIBLE = 1e-6  # of what a plan costs: no headroom
_TASKS, _SEED = 2, 5  # of each family, loose or tight
_SECONDS = 60.0  # of annealing for a task
_QUICK = 0.5  # seconds of autoshard for a task
BAR, YARDSTICK = "cost_fused", "annealing"
_POLICY = "policy"
_SEARCH, _PUBLISHED = f"autoshard in {_QUICK:g} s", "neuroshard"
_NAMES = {_POLICY: "policy", _SEARCH: "autoshard", _PUBLISHED: "neuroshard"}
_AT_EASE = {_POLICY: "policy", "autoshard": "autoshard"}
_UNTRAINED = ",".join(name for name, family in FAMILIES.items() if not family.trained)


@dataclass(frozen=True)
class Tried:
    """What a sharder made of tasks: ms by their objectives, None without a plan; and seconds."""

    plan_ms: Sequence[float | None]
    seconds: Sequence[float]


@dataclass(frozen=True)
class Headroom:
    """Tasks of a family, and what each sharder made of them, by its name."""

    choice: Choice
    tasks: Sequence[ShardingTask]
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

    def over(self, name: str, other: str = YARDSTICK) -> float | None:
        """What a sharder's plans cost over those of another, in the mean of tasks for which both
        have one; None where there are none.
        """
        return mean_ratio(self.tried[name].plan_ms, self.tried[other].plan_ms)

    def figures(self) -> list[Figure]:
        """As they are told."""
        overs = [
            Figure(f"{self.name}: plans over annealing's, {name}", "", self.over(name))
            for name in self.tried
            if name != YARDSTICK
        ]
        without = [
            Figure(f"{self.name}: tasks without a plan, {name}",
                   "" if name == BAR else "0", self.tried[name].plan_ms.count(None))
            for name in (BAR, _POLICY)
        ]  # fmt: skip
        share = Figure(f"{self.name}: share of the headroom, {_POLICY}", "", self.share(_POLICY))
        return [*overs, share, *without]


def headroom_figures(
    seconds: float = _SECONDS, tasks: int = _TASKS, families: str = ALL
) -> list[Figure]:
    """Of each family, loose and tight, and of all. `seconds`: of annealing, for each task."""
    found = [_beside(known, _NAMES, _QUICK) for known in annealed(families, seconds, tasks)]
    return [*_in_all(found), *(figure for each in found for figure in each.figures())]


def size_figures(seconds: float = _SECONDS, families: str = _UNTRAINED) -> list[Figure]:
    """Of sizes that nobody trains on, a task each; searches take as long as they do for users."""
    found = [_beside(known, _AT_EASE, None) for known in annealed(families, seconds, 1)]
    figures = []
    for each in found:
        over = each.over(_POLICY, BAR)
        figures += [
            Figure(f"{each.name}: plans over cost_fused's, {_POLICY}", "at most 1", over),
            *each.figures(),
            *(
                Figure(f"{each.name}: seconds a plan, {name}", "",
                       mean_of(each.tried[name].seconds), "s")
                for name in _AT_EASE
            ),
        ]  # fmt: skip
    return figures


def _beside(known: Headroom, names: Mapping[str, str], seconds: float | None) -> Headroom:
    """The same with what further sharders make of it: by what they are told as, their names."""
    say(f"what sharders make of {known.name}")
    policy = load_policy("cpu")
    # An oracle each: what one sharder has looked up would cost the next no time.
    sharders = {
        told: make_sharder(name, Means(shipped_oracle(), policy, seconds=seconds))
        for told, name in names.items()
    }
    return replace(known, tried={**known.tried, **_tried_by(sharders, known.tasks)})


def _in_all(found: Sequence[Headroom]) -> Iterator[Figure]:
    """Of all families together."""
    worst = [over for each in found if (over := each.over(_POLICY, BAR)) is not None]
    told = "policy over cost_fused, the family where it is worst"
    yield Figure(told, "at most 1", max(worst, default=None))
    for memory in FILLS:
        some = [each for each in found if each.choice.memory == memory]
        if not some:
            continue
        shares = [each.share(_POLICY) for each in some]
        if any(share is not None for share in shares):
            told = f"memory {memory}: share of the headroom, policy, mean of families"
            yield Figure(told, "at least 0.70", mean_of(shares))
        for name in _NAMES:
            goal = "at most 1.01" if name == _SEARCH else ""
            told = f"memory {memory}: plans over annealing's, {name}, mean of families"
            yield Figure(told, goal, mean_of(each.over(name) for each in some))
        ours = [each.over(_SEARCH, _PUBLISHED) for each in some]
        told = f"memory {memory}: plans of {_SEARCH} over neuroshard's, mean of families"
        if any(over is not None for over in ours):
            yield Figure(told, "at most 0.99", mean_of(ours))
    taken = {
        name: mean_of(s for each in found for s in each.tried[name].seconds) for name in _NAMES
    }
    for name in _NAMES:
        yield Figure(f"seconds a plan, {name}, mean of families", "", taken[name], "s")
    ratio = taken[_SEARCH] / taken[_PUBLISHED]
    yield Figure(f"seconds of {_SEARCH} over neuroshard's", "at most 0.05", ratio)


def mean_of(values: Iterable[float | None]) -> float:
    """Of those that are there."""
    return float(np.mean([value for value in values if value is not None]))


def annealed(families: str, seconds: float, tasks: int) -> list[Headroom]:
    """So many test tasks of each family, with plans of the bar and the yardstick: made on all cores
    of the Ray cluster, with so many seconds of annealing for each task.
    """
    asked = read_choices(families, "families")
    choices = [Choice(each.name, memory) for each in asked for memory in each.memories]
    say(f"plans of annealing for {tasks} tasks of each of {len(choices)} families")
    remote = ray.remote(num_cpus=1)(_annealed)
    found: list[Headroom] = ray.get([remote.remote(each, seconds, tasks) for each in choices])
    return found


def _annealed(choice: Choice, seconds: float, count: int) -> Headroom:
    oracle, tables = shipped_oracle(), tables_by_part(choice.family.tables())["test"]
    deck = Deck(oracle, [table.whole() for table in tables])
    tasks = draw_tasks(deck, choice.deals, count, _SEED)
    means = Means(oracle, seconds=seconds)
    sharders = {name: make_sharder(name, means) for name in (BAR, YARDSTICK)}
    return Headroom(choice, tasks, _tried_by(sharders, tasks))


def _tried_by(sharders: Mapping[str, Sharder], tasks: Sequence[ShardingTask]) -> dict[str, Tried]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OutsideTraining)  # whatever tables cost, all go by it
        made = make_plans(sharders, tasks)
        costs = maxima_of(estimated(made, tasks, shipped_oracle()))
    return {
        name: Tried(costs[name], [outcome.seconds or 0.0 for outcome in some])
        for name, some in made.items()
    }


def shipped_oracle() -> EstimatedCosts:
    """What prices these tasks."""
    return EstimatedCosts(load_model("cpu"), _BATCH_SIZE)
