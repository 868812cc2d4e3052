"""Step times of sharders relative to annealing, in families of tasks.

All step times are predicted by the cost model. Annealing is no bound, but it optimises the
complete objective of a task and takes as long as it is given.
"""

import statistics
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import ray

from autoshard.cost_model import EstimatedCosts, OutsideTraining, load_model
from autoshard.cost_model.pricing.mixed_costs import costs_of_machines
from autoshard.envs import TableCatalog
from autoshard.envs.task_families import ALL, FAMILIES, FILLS, Choice, read_choices
from autoshard.experiments.evaluation.planners import estimated, make_plans, steps_of
from autoshard.experiments.evaluation.ratio import relative
from autoshard.experiments.evaluation.task_sets import sample_tasks
from autoshard.sharders import SharderContext, load_policy, make_sharder
from autoshard.workload import Sharder, ShardingTask
from autoshard.workload.tables.parts import tables_by_part
from bench.metric import Metric
from bench.workbench import say

_BATCH_SIZE = 1024
_NEGLIGIBLE = 1e-6  # relative headroom that counts as none
_TASKS, _SEED = 2, 5  # per family and memory fill
_SECONDS = 60.0  # time of annealing per task
_QUICK = 0.5  # seconds of autoshard per task
BAR, YARDSTICK = "cost_fused", "annealing"
_POLICY = "policy"
_SEARCH, _PUBLISHED = f"autoshard in {_QUICK:g} s", "neuroshard"
_NAMES = {_POLICY: "policy", _SEARCH: "autoshard", _PUBLISHED: "neuroshard"}
_AT_EASE = {_POLICY: "policy", "autoshard": "autoshard"}
_UNTRAINED = ",".join(name for name, family in FAMILIES.items() if not family.trained)


@dataclass(frozen=True)
class Tried:
    """Step time of each task in ms (None without a plan), and planning time in seconds."""

    plan_ms: Sequence[float | None]
    seconds: Sequence[float]


@dataclass(frozen=True)
class Headroom:
    """Tasks of a family, and the results of each sharder by its name."""

    choice: Choice
    tasks: Sequence[ShardingTask]
    tried: Mapping[str, Tried]

    @property
    def name(self) -> str:
        """Returns the name of family and memory fill."""
        return f"{self.choice.name}, {self.choice.memory}"

    def share(self, name: str) -> float | None:
        """Returns the share of annealing's gain over cost_fused that a sharder reaches.

        Only tasks count for which all three have plans; None if there is no such task or no gain.
        """
        rows = (self.tried[each].plan_ms for each in (BAR, name, YARDSTICK))
        step_ms = np.array(list(zip(*rows, strict=True)), float)  # None becomes NaN
        bar, ours, least = step_ms[~np.isnan(step_ms).any(1)].sum(0)
        return float((bar - ours) / (bar - least)) if bar - least > _NEGLIGIBLE * bar else None

    def over(self, name: str, other: str = YARDSTICK) -> float | None:
        """Returns the ratio of two sharders' step times; None without common tasks."""
        found = relative(self.tried[name].plan_ms, self.tried[other].plan_ms)
        return None if found is None else found.value

    def metrics(self) -> list[Metric]:
        """Returns the metrics of this family."""
        overs = [
            Metric(f"{self.name}: step time, {name} over annealing", "", self.over(name))
            for name in self.tried
            if name != YARDSTICK
        ]
        without = [
            Metric(f"{self.name}: tasks without a plan, {name}",
                   "" if name == BAR else "0", self.tried[name].plan_ms.count(None))
            for name in (BAR, _POLICY)
        ]  # fmt: skip
        share = Metric(f"{self.name}: share of headroom, {_POLICY}", "", self.share(_POLICY))
        return [*overs, share, *without]


def headroom_metrics(
    seconds: float = _SECONDS, tasks: int = _TASKS, families: str = ALL
) -> list[Metric]:
    """Measures each family with loose and tight memory. `seconds`: of annealing per task."""
    found = [_beside(known, _NAMES, _QUICK) for known in annealed(families, seconds, tasks)]
    return [*_in_all(found), *(metric for each in found for metric in each.metrics())]


def size_metrics(seconds: float = _SECONDS, families: str = _UNTRAINED) -> list[Metric]:
    """Measures task sizes that training does not use, one task each, without a time limit."""
    found = [_beside(known, _AT_EASE, None) for known in annealed(families, seconds, 1)]
    metrics = []
    for each in found:
        over = each.over(_POLICY, BAR)
        metrics += [
            Metric(f"{each.name}: step time, {_POLICY} over cost_fused", "at most 1", over),
            *each.metrics(),
            *(
                Metric(f"{each.name}: planning time, {name}", "",
                       mean_of(each.tried[name].seconds), "s")
                for name in _AT_EASE
            ),
        ]  # fmt: skip
    return metrics


def _beside(known: Headroom, names: Mapping[str, str], seconds: float | None) -> Headroom:
    """Adds the results of further sharders. `names`: sharder name by label."""
    say(f"plans of {known.name}")
    policy = load_policy("cpu")
    # An oracle each: it caches features, which would make the next sharder faster.
    sharders = {
        label: make_sharder(name, SharderContext(oracle_of(known.choice), policy, seconds=seconds))
        for label, name in names.items()
    }
    return replace(known, tried={**known.tried, **_tried_by(sharders, known.choice, known.tasks)})


def _in_all(found: Sequence[Headroom]) -> Iterator[Metric]:
    """Yields means over families."""
    worst = [over for each in found if (over := each.over(_POLICY, BAR)) is not None]
    name = "step time, policy over cost_fused, worst family"
    yield Metric(name, "at most 1", max(worst, default=None))
    for memory in FILLS:
        families = [family for family in found if family.choice.memory == memory]
        if not families:
            continue
        shares = [family.share(_POLICY) for family in families]
        if any(share is not None for share in shares):
            name = f"memory {memory}: share of headroom, policy, mean over families"
            yield Metric(name, "at least 0.70", mean_of(shares))
        for label in _NAMES:
            target = "at most 1.01" if label == _SEARCH else ""
            name = f"memory {memory}: step time, {label} over annealing, mean over families"
            yield Metric(name, target, ratio_of(family.over(label) for family in families))
        ours = [family.over(_SEARCH, _PUBLISHED) for family in families]
        name = f"memory {memory}: step time, {_SEARCH} over neuroshard, mean over families"
        if any(over is not None for over in ours):
            yield Metric(name, "at most 0.99", ratio_of(ours))
    seconds = {
        label: mean_of(s for each in found for s in each.tried[label].seconds) for label in _NAMES
    }
    for label in _NAMES:
        yield Metric(f"planning time, {label}, mean over families", "", seconds[label], "s")
    ratio = seconds[_SEARCH] / seconds[_PUBLISHED]
    yield Metric(f"planning time, {_SEARCH} over neuroshard", "at most 0.05", ratio)


def mean_of(values: Iterable[float | None]) -> float:
    """Returns the mean of values other than None."""
    return float(np.mean([value for value in values if value is not None]))


def ratio_of(ratios: Iterable[float | None]) -> float:
    """Returns the geometric mean of ratios other than None."""
    return statistics.geometric_mean(ratio for ratio in ratios if ratio is not None)


def annealed(families: str, seconds: float, tasks: int) -> list[Headroom]:
    """Draws test tasks of each family and plans them with cost_fused and annealing, on all cores.

    Args:
        families: As `ppo_shard.py --families`.
        seconds: Of annealing per task.
        tasks: Number of tasks per family and memory fill.
    """
    selected = read_choices(families, "families")
    choices = [Choice(family.name, memory) for family in selected for memory in family.memories]
    say(f"plans of annealing for {tasks} tasks of each of {len(choices)} families")
    remote = ray.remote(num_cpus=1)(_annealed)
    found: list[Headroom] = ray.get([remote.remote(choice, seconds, tasks) for choice in choices])
    return found


def _annealed(choice: Choice, seconds: float, count: int) -> Headroom:
    oracle, tables = oracle_of(choice), tables_by_part(choice.family.tables())["test"]
    catalog = TableCatalog(oracle, [table.whole() for table in tables])
    tasks = list(islice(sample_tasks(catalog, choice.task_sampler, _SEED), count))
    context = SharderContext(oracle, seconds=seconds)
    sharders = {name: make_sharder(name, context) for name in (BAR, YARDSTICK)}
    return Headroom(choice, tasks, _tried_by(sharders, choice, tasks))


def _tried_by(
    sharders: Mapping[str, Sharder], choice: Choice, tasks: Sequence[ShardingTask]
) -> dict[str, Tried]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OutsideTraining)  # all sharders use the same predictions
        made = make_plans(sharders, tasks)
        costs = steps_of(estimated(made, tasks, oracle_of(choice)))
    return {
        name: Tried(costs[name], [outcome.seconds or 0.0 for outcome in outcomes])
        for name, outcomes in made.items()
    }


def oracle_of(choice: Choice) -> EstimatedCosts:
    """Returns the oracle of a family, which knows several machines if devices are mixed."""
    if choice.family.mixed:
        return costs_of_machines(load_model("cpu"), _BATCH_SIZE)
    return shipped_oracle()


def shipped_oracle() -> EstimatedCosts:
    """Returns an oracle of the shipped model."""
    return EstimatedCosts(load_model("cpu"), _BATCH_SIZE)
