"""Price of training against rehearsed steps, for plans of all kinds.

Tables are of families that the overhead was not fitted on. `STORE` keeps rehearsals between runs,
so that settings may be spread over sessions.
"""

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
from autoshard.benchmark.rehearsal.rehearsal import Effort, RankGroup
from autoshard.benchmark.rehearsal.times import Rehearsal
from autoshard.cost_model import EstimatedCosts
from autoshard.experiments.console import cli
from autoshard.experiments.console.machine import MachineOptions
from autoshard.sharders import USUAL_HEURISTICS, SharderContext, load_policy, make_sharder
from autoshard.sharders.random_plans import random_plans
from autoshard.workload import Device, Objective, ShardingPlan, ShardingTask, load_tables
from autoshard.workload.arrays import Floats
from bench.metric import Metric
from bench.workbench import say

STORE = os.environ.get("AUTOSHARD_REHEARSALS")  # a store that is kept
_OURS = ("cost", "cost_fused", "policy", "neuroshard", "autoshard")
_THEIRS = ("torchrec", "torchrec_columns")
_DEFAULT = "torchrec_default"  # may shard by rows and copy, which the cost model does not price
_PLANS = 24  # distinct plans
_DRAWS = 500  # bootstrap samples of plans
_ROUNDS = 3
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


SETTINGS = tuple(
    Setting(f"{family}:{tables}:71", ranks, batch_size)
    for tables, ranks in ((20, 2), (40, 4), (60, 8))
    for batch_size in (1024, 8192)
    for family in ("hot", "zipf")
)
_USUAL = (SETTINGS[4],)  # 40 on 4, batch 1,024


def rehearsal_metrics(folder: Path) -> list[Metric]:
    """Agreement of turns with ranks at once, and plans of two settings."""
    store = Path(STORE) if STORE else folder / "rehearsal.db"
    metrics, points = turns_metrics(), dict[str, tuple[Floats, Floats]]()
    for setting in _USUAL:
        found, points[setting.name] = setting_metrics(setting, store)
        metrics += found
    draw(points, folder / "price-of-training.png")
    return metrics


def draw(points: Mapping[str, tuple[Floats, Floats]], path: Path) -> None:
    """Draws prices and rehearsed steps of all plans of each setting."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 6.0), layout="constrained")
    axes = figure.subplots()
    for name, (prices, steps) in points.items():
        axes.plot(prices, steps, "o", markersize=4, label=name)
    ends = [float(values.min()) for values, _ in points.values()]
    ends += [float(values.max()) for values, _ in points.values()]
    axes.plot([min(ends), max(ends)], [min(ends), max(ends)], color="black", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="price in ms", ylabel="rehearsed step in ms")
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


def setting_metrics(setting: Setting, path: Path) -> tuple[list[Metric], tuple[Floats, Floats]]:
    """Rehearses plans of all kinds; returns metrics, and prices and steps of priced plans."""
    began = time.monotonic()
    task, oracle = _task(setting), _oracle(setting, path)
    plans, of_sharders = _plans(task, oracle)
    say(f"{len(plans)} plans of {setting.name}")
    with MeasurementStore(path) as store, closing(RankGroup(setting.ranks, "cpu")) as ranks:
        every: dict[str, ShardingPlan | None] = {**plans, _DEFAULT: None}
        levels_ms = oracle.model.levels_ms
        rehearsed = ranks.train_interleaved(task, every, Effort(_ROUNDS), store, levels_ms)
    steps = {name: each.step_ms for name, each in rehearsed.items()}
    prices = {name: oracle.plan_cost(plan, task).step_ms for name, plan in plans.items()}
    operators = EstimatedCosts(oracle.model.for_objective(Objective()), setting.batch_size)
    alone = {name: operators.step_ms(plan, task) for name, plan in plans.items()}
    for name, step_ms in steps.items():
        cli.console.print(
            f"  {name}: {step_ms:.2f} ms (±{rehearsed[name].half_width:.1%}), price "
            f"{prices.get(name, float('nan')):.2f}, operators {alone.get(name, float('nan')):.2f}"
        )
    names = list(plans)
    real, priced = (np.array([of[name] for name in names]) for of in (steps, prices))
    best = min(steps[of_sharders[name]] for name in USUAL_HEURISTICS)
    ours = steps[of_sharders["autoshard"]]
    ratios = real / priced

    def metric(name: str, target: str, value: float, unit: str = "") -> Metric:
        return Metric(f"{setting.name}: {name}", target, value, unit)

    metrics = [
        Metric(f"{setting.name}: Spearman correlation of price and rehearsed step",
               "at least 0.9", _spearman(priced, real), "", _interval(priced, real)),
        metric("the same with the price of operators", "",
               _spearman(np.array([alone[name] for name in names]), real)),
        metric("rehearsed step over price, mean", "0.97 to 1.03", float(ratios.mean())),
        metric("rehearsed step over price, deviation", "at most 0.04", float(ratios.std())),
        metric("step of the plan with the least price over the least step", "at most 1.01",
               float(real[priced.argmin()] / real.min())),
        metric("rehearsed step, autoshard over best heuristic", "below 0.95", ours / best),
        metric("rehearsed step, autoshard over torchrec_default", "below 0.85",
               ours / steps[_DEFAULT]),
        metric("rehearsed step, autoshard over neuroshard", "below 1",
               ours / steps[of_sharders["neuroshard"]]),
        metric("time for this setting", "", time.monotonic() - began, "s"),
    ]  # fmt: skip
    return metrics, (priced, real)


def _task(setting: Setting) -> ShardingTask:
    tables, devices = load_tables(setting.tables), Device.uniform(setting.ranks, 2**33)
    return ShardingTask(tables, devices, setting.batch_size, objective=Objective("step"))


def _oracle(setting: Setting, store: Path) -> EstimatedCosts:
    model = MachineOptions().model_for("cpu", store)
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
    drawn = islice(random_plans(task), _PLANS - len(plans))
    plans |= {f"random {number}": plan for number, plan in enumerate(drawn)}
    return plans, of_sharders


def _like(plan: ShardingPlan, plans: Mapping[str, ShardingPlan]) -> str | None:
    """Returns the name of an equal plan; device numbers do not matter."""
    parts = _parts(plan)
    return next((name for name, other in plans.items() if _parts(other) == parts), None)


def _parts(plan: ShardingPlan) -> frozenset[frozenset[tuple[str, int]]]:
    """Returns the sets of slices on devices, as names and widths."""
    return frozenset(
        frozenset((p.table, p.width) for p in plan.placements if p.device == device)
        for device in range(plan.num_devices)
    )


def _spearman(prices: Floats, steps: Floats) -> float:
    return float(stats.spearmanr(prices, steps).statistic)


def _interval(prices: Floats, steps: Floats) -> tuple[float, float]:
    rng = np.random.default_rng(0)
    drawn = rng.integers(len(steps), size=(_DRAWS, len(steps)))
    found: Sequence[float] = [_spearman(prices[some], steps[some]) for some in drawn]
    low, high = np.quantile(found, (0.025, 0.975))
    return float(low), float(high)
