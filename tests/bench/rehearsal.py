"""Price of training against rehearsed steps, for plans of all kinds.

Tables are of families that the overhead was not fitted on. AUTOSHARD_REHEARSALS names a store that
keeps rehearsals between runs, so that all settings can be rehearsed one day after another;
AUTOSHARD_SETTINGS says which of them as a slice (":6" those with small batches, "6:" those with
large ones), by default the first without and all with a store.
"""

import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import stats

from autoshard.benchmark import MeasurementStore
from autoshard.benchmark.rehearsals.times import Rehearsal
from autoshard.cost_model import EstimatedCosts
from autoshard.experiments.console import cli
from autoshard.experiments.console.machine import MachineOptions
from autoshard.experiments.evaluation.ratio import relative
from autoshard.integration.rehearsal.rank_group import Effort, RankGroup
from autoshard.sharders import USUAL_HEURISTICS, SharderContext, load_policy, make_sharder
from autoshard.sharders.heuristics.random_plans import plans_of_all_ways
from autoshard.workload import Device, Objective, ShardingPlan, ShardingTask, load_tables
from autoshard.workload.arrays import Floats
from bench.metric import Metric
from bench.workbench import say

STORE = os.environ.get("AUTOSHARD_REHEARSALS")
_OURS = ("cost", "cost_fused", "policy", "neuroshard", "autoshard")
_THEIRS = ("torchrec", "torchrec_columns", "torchrec_all")
_DEFAULT = "torchrec_default"  # what TorchRec's planner makes of these ranks: no rows on CPUs
_COMPARED = (
    "torchrec",
    "torchrec_all",
    _DEFAULT,
    "neuroshard",
)  # with autoshard and the best heuristic
_MANY_RANKS = 4
_PLANS = 24  # distinct plans
_DRAWS = 500  # bootstrap samples of plans
_ROUNDS = 2  # of each plan
_BEST, _BEST_ROUNDS = 5, 5  # good plans differ by little: these, and those that are compared
_TURNS_S = 120.0


class Setting(NamedTuple):
    """Tables, ranks and batch of one comparison."""

    tables: str
    ranks: int
    batch_size: int

    @property
    def name(self) -> str:
        """How metrics name it."""
        return f"{self.tables} on {self.ranks}, batch {self.batch_size}"


class Found(NamedTuple):
    """The rehearsed plans of a setting, and their prices.

    Args:
        steps: Rehearsed step of each priced plan, [plans].
        prices: Price of the same plans by the objective `step`, [plans].
        operators: Their price by operators alone, [plans].
        of_sharders: Rehearsals of the plans that are compared, by sharder.
        heuristic: The heuristic with the least step.
        seconds: Time that all of it took, without rounds that the store had.
    """

    steps: Floats
    prices: Floats
    operators: Floats
    of_sharders: Mapping[str, Rehearsal]
    heuristic: str
    seconds: float

    def ratio(self, other: str) -> float:
        """Returns the step of `autoshard` over another sharder's."""
        return self.of_sharders["autoshard"].step_ms / self.of_sharders[other].step_ms

    def ratio_interval(self, other: str) -> tuple[float, float]:
        """Returns the interval of `ratio` over rounds."""
        widths = [self.of_sharders[name].half_width for name in ("autoshard", other)]
        ratio, half = self.ratio(other), math.hypot(*widths)
        return ratio * (1 - half), ratio * (1 + half)


SETTINGS = tuple(
    Setting(f"{family}:{tables}:71", ranks, batch_size)
    for batch_size in (1024, 8192)
    for tables, ranks in ((40, 4), (20, 2), (60, 8))
    for family in ("hot", "zipf")
)
_WHICH = os.environ.get("AUTOSHARD_SETTINGS", ":" if STORE else ":1")
_CHOSEN = SETTINGS[slice(*(int(end) if end else None for end in _WHICH.split(":")))]


def rehearsal_metrics(folder: Path) -> list[Metric]:
    """Agreement of turns with ranks at once, and of prices with rehearsed plans."""
    store = Path(STORE) if STORE else folder / "rehearsal.db"
    metrics = turns_metrics()
    rehearsed = {each: rehearse(each, store) for each in _CHOSEN}
    for setting, found in rehearsed.items():
        metrics += setting_metrics(setting, found)
    draw(rehearsed, store.with_name("price-of-training.png"))
    return metrics + all_metrics(rehearsed)


def draw(rehearsed: Mapping[Setting, Found], path: Path) -> None:
    """Draws prices and rehearsed steps of all plans of each setting."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 6.0), layout="constrained")
    axes = figure.subplots()
    for setting, found in rehearsed.items():
        axes.plot(found.prices, found.steps, "o", markersize=3, label=setting.name)
    every = np.concatenate([found.prices for found in rehearsed.values()])
    ends = [every.min(), every.max()]
    axes.plot(ends, ends, color="black", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="price in ms", ylabel="rehearsed step in ms")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("{x:g}")
    axes.legend(fontsize="small")
    figure.savefig(path)
    say(f"the picture is in {path}")


def turns_metrics() -> list[Metric]:
    """Two ranks at once against turns, and the noise of turns."""
    say("two ranks at once and in turns")
    task = _task(Setting("synthetic:20:72:small", 2, 8192))
    plan = make_sharder("size_lookup").shard(task)
    found: dict[bool, Rehearsal] = {}
    for in_turns in (False, True):
        with closing(RankGroup(2, "cpu", in_turns)) as ranks:
            effort = Effort(min_rounds=6)
            found[in_turns] = ranks.train_interleaved(task, {"": plan}, effort)[""]
    # At once, ranks slow each other down, and the reference, too.
    undisturbed = replace(
        found[False], in_turns=True, level_ms=found[True].reference_ms, dense_ms=None
    )
    turns_ms = replace(found[True], dense_ms=None).step_ms
    say(f"noise of turns in {_TURNS_S:.0f} s")
    task = _task(Setting("synthetic:20:72:small", 4, 1024))
    plan = make_sharder("size_lookup").shard(task)
    with closing(RankGroup(4, "cpu")) as ranks:
        noisy = ranks.train_interleaved(task, {"": plan}, Effort(seconds=_TURNS_S))[""]
    return [
        Metric("step of two ranks: at once over turns", "",
               found[False].step_ms / turns_ms),
        Metric("step of two ranks: at once over turns, without the reference's slowdown",
               "0.95 to 1.05", undisturbed.step_ms / turns_ms),
        Metric("half width of a step's interval after two minutes, 20 tables on 4 ranks",
               "at most 0.01", noisy.half_width),
    ]  # fmt: skip


def rehearse(setting: Setting, path: Path) -> Found:
    """Rehearses plans of all kinds."""
    began = time.monotonic()
    task, oracle = _task(setting), _oracle(setting, path)
    plans, of_sharders = _plans(task, oracle)
    of_sharders[_DEFAULT] = _DEFAULT
    say(f"{len(plans)} plans of {setting.name}")
    with MeasurementStore(path) as store, closing(RankGroup(setting.ranks, "cpu")) as ranks:
        every: dict[str, ShardingPlan | None] = {**plans, _DEFAULT: None}
        levels_ms = oracle.model.levels_ms
        rehearsed = ranks.train_interleaved(task, every, Effort(_ROUNDS), store, levels_ms)
        heuristic = min(USUAL_HEURISTICS, key=lambda name: rehearsed[of_sharders[name]].step_ms)
        compared = {of_sharders[name] for name in ("autoshard", heuristic, *_COMPARED)}
        compared |= set(sorted(every, key=lambda name: rehearsed[name].step_ms)[:_BEST])
        best = {name: plan for name, plan in every.items() if name in compared}
        effort = Effort(_BEST_ROUNDS)
        rehearsed |= ranks.train_interleaved(task, best, effort, store, levels_ms)
    prices = {name: oracle.plan_cost(plan, task).step_ms for name, plan in plans.items()}
    operators = EstimatedCosts(oracle.model.for_objective(Objective()), setting.batch_size)
    nothing = float("nan")  # operators alone do not know copies
    alone = {
        name: nothing if plan.copied else operators.step_ms(plan, task)
        for name, plan in plans.items()
    }
    for name, each in rehearsed.items():
        cli.console.print(
            f"  {name}: {each.step_ms:.2f} ms (±{each.half_width:.1%}), price "
            f"{prices.get(name, float('nan')):.2f}, operators {alone.get(name, float('nan')):.2f}"
        )
    return Found(
        np.array([rehearsed[name].step_ms for name in plans]),
        np.array([prices[name] for name in plans]),
        np.array([alone[name] for name in plans]),
        {sharder: rehearsed[name] for sharder, name in of_sharders.items()},
        heuristic,
        time.monotonic() - began,
    )


def setting_metrics(setting: Setting, found: Found) -> list[Metric]:
    """Returns how well prices of a setting predict, and how plans compare."""
    ratios, known = found.steps / found.prices, ~np.isnan(found.operators)
    metrics = [
        Metric("Spearman correlation of price and rehearsed step", "at least 0.9",
               _spearman([found.prices], [found.steps]), "",
               _interval([found.prices], [found.steps])),
        Metric("the same with the price of operators, plans without copies", "",
               _spearman([found.operators[known]], [found.steps[known]])),
        Metric("rehearsed step over price, mean", "0.97 to 1.03", float(ratios.mean())),
        Metric("rehearsed step over price, deviation", "at most 0.04", float(ratios.std())),
        Metric("step of the plan with the least price over the least step", "at most 1.01",
               float(found.steps[found.prices.argmin()] / found.steps.min())),
        Metric("time, without rounds that the store had", "", found.seconds, "s"),
    ]  # fmt: skip
    for other, name, target in _rivals(found):
        ratio = f"rehearsed step, autoshard over {name}"
        metrics.append(Metric(ratio, target, found.ratio(other), "", found.ratio_interval(other)))
    return [replace(each, name=f"{setting.name}: {each.name}") for each in metrics]


def all_metrics(rehearsed: Mapping[Setting, Found]) -> list[Metric]:
    """Returns the same of all settings together; ratios of those with 4 ranks or more."""
    prices = [found.prices for found in rehearsed.values()]
    steps = [found.steps for found in rehearsed.values()]
    large = [found for setting, found in rehearsed.items() if setting.ranks >= _MANY_RANKS]
    metrics = [
        Metric("all settings: Spearman correlation of price and rehearsed step",
               "at least 0.9", _spearman(prices, steps), "", _interval(prices, steps)),
    ]  # fmt: skip
    for number, (_, name, target) in enumerate(_rivals(large[0])):
        ratios = [found.ratio(_rivals(found)[number][0]) for found in large]
        over = relative(ratios, [1.0] * len(ratios))
        assert over is not None
        metrics.append(
            Metric(f"settings with 4 and 8 ranks: rehearsed step, autoshard over {name}",
                   target, over.value, "", (over.low, over.high))
        )  # fmt: skip
    return metrics


def _rivals(found: Found) -> tuple[tuple[str, str, str], ...]:
    """Returns sharders that `autoshard` is compared with, their names in metrics, and targets."""
    return (
        (found.heuristic, "best heuristic", "below 0.95"),
        (_DEFAULT, _DEFAULT, "below 0.85"),
        ("torchrec_all", "torchrec_all", "at most 0.90"),
        ("torchrec", "torchrec", ""),
        ("neuroshard", "neuroshard", "below 1"),
    )


def _task(setting: Setting) -> ShardingTask:
    tables, devices = load_tables(setting.tables), Device.uniform(setting.ranks, 2**33)
    return ShardingTask(tables, devices, setting.batch_size, objective=Objective("step"))


def _oracle(setting: Setting, store: Path) -> EstimatedCosts:
    model = MachineOptions(store=store).model_for()
    return EstimatedCosts(model.for_objective(Objective("step")), setting.batch_size)


def _plans(
    task: ShardingTask, oracle: EstimatedCosts
) -> tuple[dict[str, ShardingPlan], dict[str, str]]:
    """Returns distinct plans by name, and for each sharder the name of its plan."""
    context = SharderContext(oracle, load_policy("cpu"))
    plans: dict[str, ShardingPlan] = {}
    of_sharders: dict[str, str] = {}
    for name in (*USUAL_HEURISTICS, *_OURS, *_THEIRS):
        plan = make_sharder(name, context).shard(task)
        of_sharders[name] = _like(plan, plans) or name
        plans.setdefault(of_sharders[name], plan)
    drawn = islice(plans_of_all_ways(task), _PLANS - len(plans))
    plans |= {f"random {number}": plan for number, plan in enumerate(drawn)}
    return plans, of_sharders


def _like(plan: ShardingPlan, plans: Mapping[str, ShardingPlan]) -> str | None:
    """Returns the name of an equal plan; device numbers do not matter."""
    parts = _parts(plan)
    return next((name for name, other in plans.items() if _parts(other) == parts), None)


def _parts(plan: ShardingPlan) -> frozenset[frozenset[tuple[str, int]]]:
    """Returns the sets of slices on devices, as names and widths, and that of copies, as 0.

    What is by rows is on all devices, and has the width of the table.
    """
    held = [
        frozenset((p.table, p.width) for p in plan.placements if device in p.devices)
        for device in range(plan.num_devices)
    ]
    return frozenset({*held, frozenset((name, 0) for name in plan.copied)})


def _spearman(prices: Sequence[Floats], steps: Sequence[Floats]) -> float:
    """Returns the correlation of ranks within each setting, [settings][plans]."""
    ranks = [np.concatenate([stats.rankdata(some) for some in of]) for of in (prices, steps)]
    return float(stats.pearsonr(*ranks).statistic)


def _interval(prices: Sequence[Floats], steps: Sequence[Floats]) -> tuple[float, float]:
    """Returns the 95 % interval over plans of `_spearman`."""
    rng, found = np.random.default_rng(0), []
    for _ in range(_DRAWS):
        drawn = [rng.integers(len(some), size=len(some)) for some in steps]
        every = list(zip(drawn, prices, steps, strict=True))
        found.append(_spearman([p[n] for n, p, _ in every], [s[n] for n, _, s in every]))
    low, high = np.quantile(found, (0.025, 0.975))
    return float(low), float(high)
