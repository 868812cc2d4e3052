"""Whether plans that are priced lower train faster: real steps with TorchRec beside our prices."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy import stats

from autoshard.benchmark import MeasureSettings, PlanCost, price_plan
from autoshard.benchmark.rehearsal.rehearsal import stage
from autoshard.benchmark.rehearsal.turns import in_turns
from autoshard.benchmark.statistics import median_interval
from autoshard.cost_model import EstimatedCosts, OtherHardware, OutsideTraining, load_model
from autoshard.cost_model.shard_visits import SEEDS, ShardVisits, evaluation_seeds
from autoshard.experiments.console import cli
from autoshard.sharders import USUAL_HEURISTICS, Means, load_policy, make_sharder
from autoshard.workload import Device, ShardingPlan, ShardingTask, load_tables
from bench.figure import Figure
from bench.workbench import cpu_pool, say

# Of several sets of tables, one whose plans are priced far enough apart to be told from noise.
_TABLES, _RANKS, _BATCH_SIZE = "synthetic:20:2:small", 2, 8192
_OURS = ("cost_fused", "policy", "autoshard")
_THEIRS = ("torchrec", "torchrec_columns")
_PLANS = 12  # that differ
_DEFAULT = "torchrec_default"  # may split tables by rows, which has no price here
_TRAINING_S = 260.0  # six rounds: with three, noise decides
_DRAWS = 500  # of rounds, for intervals

Floats = npt.NDArray[np.float64]
# What a step might be, as its price is made of phases; the first tells best: ranks wait for each
# other in every all-to-all.
STEPS: Mapping[str, Callable[[PlanCost], float]] = {
    "each phase's slowest device": lambda cost: float(cost.phases_ms.max(0).sum()),
    "the slowest device's phases": lambda cost: float(cost.phases_ms.sum(1).max()),
    "the slowest device's computation": lambda cost: float(cost.phases_ms[:, :2].sum(1).max()),
}


def rehearsal_figures(folder: Path) -> list[Figure]:
    """Twelve plans of 20 tables on two cores: priced, measured, and trained in turns."""
    say(f"12 plans of {_TABLES} on {_RANKS} cores, then training by them")
    tables, devices = load_tables(_TABLES), Device.uniform(_RANKS, 2**33)
    with warnings.catch_warnings():  # what the model says of strangers is judged here
        warnings.simplefilter("ignore", OtherHardware)
        warnings.simplefilter("ignore", OutsideTraining)
        model = load_model("cpu")
        task = ShardingTask(tables, devices, _BATCH_SIZE, model.provenance.operator)
        oracle = EstimatedCosts(model, _BATCH_SIZE)
        named = _plans(task, oracle)
        plans = _different(task, named)
        prices = {
            "estimated": [oracle.plan_cost(plan, task) for plan in plans.values()],
            "measured": _measured(task, plans, folder),
        }
    with stage(_RANKS, "cpu") as ranks:
        rehearsed = in_turns(ranks, task, {**plans, _DEFAULT: None}, _TRAINING_S)
    rounds = {n: np.array([each.median_ms for each in r]) for n, r in rehearsed.items()}
    real = np.stack([rounds[name] for name in plans])
    for number, name in enumerate(plans):
        told = ", ".join(
            f"{what} {step(prices['measured'][number]):.2f}" for what, step in STEPS.items()
        )
        cli.console.print(f"{name}: {np.median(real[number]):.2f} ms a step; measured: {told}")
    figures = [
        Figure("share of their cores that others took of ranks that trained", "at most 0.05",
               float(np.mean([each.disturbed for some in rehearsed.values() for each in some]))),
    ]  # fmt: skip
    for kind, costs in prices.items():
        for what, step in STEPS.items():
            goal = "at least 0.9" if what == next(iter(STEPS)) else ""
            figures += _agreement(f"{kind} price, {what}", goal, [step(c) for c in costs], real)
    own = [STEPS["the slowest device's phases"](cost) for cost in prices["measured"]]
    figures.append(
        Figure("a step of training over its measured price, mean of plans", "",
               float(np.mean(_levels(real).mean(axis=1) * np.median(real) / own)))
    )  # fmt: skip
    trained = {name: rounds[like] for name, plan in named.items() for like in _like(plan, plans)}
    trained[_DEFAULT] = rounds[_DEFAULT]
    best = min(
        (trained[name] for name in USUAL_HEURISTICS), key=lambda some: float(np.median(some))
    )
    others = {"the best heuristic's": best}
    others |= {f"{name}'s": trained[name] for name in (_DEFAULT, *_THEIRS)}
    return [*figures, *(_ratio(name, trained["autoshard"], o) for name, o in others.items())]


def _plans(task: ShardingTask, oracle: EstimatedCosts) -> dict[str, ShardingPlan]:
    means = Means(oracle, load_policy("cpu"))
    names = (*USUAL_HEURISTICS, *_OURS, *_THEIRS)
    return {name: make_sharder(name, means).shard(task) for name in names}


def _different(task: ShardingTask, named: Mapping[str, ShardingPlan]) -> dict[str, ShardingPlan]:
    """One of those that are the same, and random ones until there are enough."""
    plans: dict[str, ShardingPlan] = {}
    for name, plan in named.items():
        if not _like(plan, plans):
            plans[name] = plan
    for seed in range(_PLANS - len(plans)):
        plans[f"random {seed}"] = make_sharder("random", Means(seed=seed)).shard(task)
    return plans


def _like(plan: ShardingPlan, plans: Mapping[str, ShardingPlan]) -> list[str]:
    """What the same plan is called among others, if it is there: devices are alike."""
    parts = _parts(plan)
    return [name for name, other in plans.items() if _parts(other) == parts]


def _parts(plan: ShardingPlan) -> frozenset[frozenset[tuple[str, int]]]:
    """What lies together, whichever device it is and whichever columns they are."""
    return frozenset(
        frozenset((p.table, p.width) for p in plan.placements if p.device == device)
        for device in range(plan.num_devices)
    )


def _measured(
    task: ShardingTask, plans: Mapping[str, ShardingPlan], folder: Path
) -> list[PlanCost]:
    """What each plan's shards and all-to-alls measure."""
    settings = MeasureSettings(task.batch_size, task.operator)
    with cpu_pool(folder / "rehearsal.db", most_devices=_RANKS) as pool:
        visits = ShardVisits(pool, settings, evaluation_seeds(SEEDS))
        shards = [s for plan in plans.values() for s in plan.shards(task) if s is not None]
        visits.measure(shards, SEEDS)
        costs = []
        for plan in plans.values():
            exchange = pool.exchange(plan.columns(task), task.batch_size)
            both = (exchange.forward_ms, exchange.backward_ms)
            costs.append(price_plan(plan, task, visits, both))
    return costs


def _agreement(name: str, goal: str, prices: Sequence[float], real: Floats) -> list[Figure]:
    """Rank correlations of prices and steps, [plans, rounds]."""
    levels = _levels(real)
    rng = np.random.default_rng(0)
    drawn = rng.integers(levels.shape[1], size=(_DRAWS, levels.shape[1]))

    def spearman(rounds: npt.NDArray[np.int64]) -> float:
        return float(stats.spearmanr(prices, np.median(levels[:, rounds], axis=1)).statistic)

    low, high = np.quantile([spearman(rounds) for rounds in drawn], (0.025, 0.975))
    steps = np.median(levels, axis=1)
    return [
        Figure(f"Spearman's rank correlation with steps of training: {name}", goal,
               float(stats.spearmanr(prices, steps).statistic), "", (float(low), float(high))),
        Figure(f"Kendall tau with steps of training: {name}", "",
               float(stats.kendalltau(prices, steps).statistic)),
    ]  # fmt: skip


def _levels(real: Floats) -> Floats:
    """Steps over the mean of all plans in the same round: what slows a round is not a plan's."""
    return np.asarray(real / real.mean(axis=0))


def _ratio(name: str, ours: Floats, theirs: Floats) -> Figure:
    ratios = ours / theirs
    return Figure(f"a step of training by autoshard's plan over {name}", "",
                  float(np.median(ratios)), "", median_interval(ratios.tolist()))  # fmt: skip
