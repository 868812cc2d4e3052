"""Correlation of predicted and measured costs of plans with TorchRec training steps."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy import stats

from autoshard.benchmark import MeasureSettings, PlanCost, price_plan
from autoshard.benchmark.rehearsal.rehearsal import Effort, RankGroup
from autoshard.benchmark.statistics import median_interval
from autoshard.cost_model import EstimatedCosts, OtherHardware, OutsideTraining, load_model
from autoshard.cost_model.repeated_measurements import SEEDS, RepeatedMeasurements, evaluation_seeds
from autoshard.experiments.console import cli
from autoshard.sharders import USUAL_HEURISTICS, SharderContext, load_policy, make_sharder
from autoshard.workload import Device, ShardingPlan, ShardingTask, load_tables
from autoshard.workload.arrays import Floats
from bench.metric import Metric
from bench.workbench import cpu_pool, say

# Tables whose plans differ in cost by more than noise.
_TABLES, _RANKS, _BATCH_SIZE = "synthetic:20:2:small", 2, 8192
_OURS = ("cost_fused", "policy", "autoshard")
_THEIRS = ("torchrec", "torchrec_columns")
_PLANS = 12  # distinct plans
_DEFAULT = "torchrec_default"  # may shard row-wise, which the cost model does not price
_TRAINING_S = 260.0  # six rounds: with three, noise decides
_DRAWS = 500  # bootstrap samples of rounds

# How phases may compose to a step. In the first, ranks wait for each other in every all-to-all.
STEPS: Mapping[str, Callable[[PlanCost], float]] = {
    "slowest device per phase": lambda cost: float(cost.phases_ms.max(0).sum()),
    "slowest device, all phases": lambda cost: float(cost.phases_ms.sum(1).max()),
    "slowest device, compute only": lambda cost: float(cost.phases_ms[:, :2].sum(1).max()),
}


def rehearsal_metrics(folder: Path) -> list[Metric]:
    """Predicts, measures and trains twelve plans of 20 tables on two cores."""
    say(f"12 plans of {_TABLES} on {_RANKS} cores, then training by them")
    tables, devices = load_tables(_TABLES), Device.uniform(_RANKS, 2**33)
    with warnings.catch_warnings():  # out-of-distribution tables are part of this test
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
    with closing(RankGroup(_RANKS, "cpu")) as ranks:
        rehearsed = ranks.train_interleaved(
            task, {**plans, _DEFAULT: None}, Effort(seconds=_TRAINING_S)
        )
    rounds = {name: np.array(each.round_ms) for name, each in rehearsed.items()}
    real = np.stack([rounds[name] for name in plans])
    for number, name in enumerate(plans):
        composed = ", ".join(
            f"{what} {step(prices['measured'][number]):.2f}" for what, step in STEPS.items()
        )
        cli.console.print(
            f"{name}: {np.median(real[number]):.2f} ms per step; measured: {composed}"
        )
    metrics = [
        Metric("share of the ranks' cores used by other processes", "at most 0.05",
               float(np.mean([each.disturbed for each in rehearsed.values()]))),
    ]  # fmt: skip
    for kind, costs in prices.items():
        for what, step in STEPS.items():
            target = "at least 0.9" if what == next(iter(STEPS)) else ""
            metrics += _agreement(f"{kind} cost, {what}", target, [step(c) for c in costs], real)
    own = [STEPS["slowest device, all phases"](cost) for cost in prices["measured"]]
    metrics.append(
        Metric("training step time over measured cost, mean of plans", "",
               float(np.mean(_levels(real).mean(axis=1) * np.median(real) / own)))
    )  # fmt: skip
    trained = {name: rounds[like] for name, plan in named.items() for like in _like(plan, plans)}
    trained[_DEFAULT] = rounds[_DEFAULT]
    best = min(
        (trained[name] for name in USUAL_HEURISTICS), key=lambda steps: float(np.median(steps))
    )
    others = {"best heuristic": best, **{name: trained[name] for name in (_DEFAULT, *_THEIRS)}}
    return [*metrics, *(_ratio(name, trained["autoshard"], o) for name, o in others.items())]


def _plans(task: ShardingTask, oracle: EstimatedCosts) -> dict[str, ShardingPlan]:
    context = SharderContext(oracle, load_policy("cpu"))
    names = (*USUAL_HEURISTICS, *_OURS, *_THEIRS)
    return {name: make_sharder(name, context).shard(task) for name in names}


def _different(task: ShardingTask, named: Mapping[str, ShardingPlan]) -> dict[str, ShardingPlan]:
    """Returns the distinct plans, and random ones up to the required number."""
    plans: dict[str, ShardingPlan] = {}
    for name, plan in named.items():
        if not _like(plan, plans):
            plans[name] = plan
    for seed in range(_PLANS - len(plans)):
        plans[f"random {seed}"] = make_sharder("random", SharderContext(seed=seed)).shard(task)
    return plans


def _like(plan: ShardingPlan, plans: Mapping[str, ShardingPlan]) -> list[str]:
    """Returns the names of equal plans; device numbers do not matter."""
    parts = _parts(plan)
    return [name for name, other in plans.items() if _parts(other) == parts]


def _parts(plan: ShardingPlan) -> frozenset[frozenset[tuple[str, int]]]:
    """Returns the sets of slices on devices, as names and widths."""
    return frozenset(
        frozenset((p.table, p.width) for p in plan.placements if p.device == device)
        for device in range(plan.num_devices)
    )


def _measured(
    task: ShardingTask, plans: Mapping[str, ShardingPlan], folder: Path
) -> list[PlanCost]:
    """Measures the shards and all-to-alls of each plan."""
    settings = MeasureSettings(task.batch_size, task.operator)
    with cpu_pool(folder / "rehearsal.db", max_devices=_RANKS) as pool:
        repeats = RepeatedMeasurements(pool, settings, evaluation_seeds(SEEDS))
        shards = [s for plan in plans.values() for s in plan.shards(task) if s is not None]
        repeats.measure(shards, SEEDS)
        costs = []
        for plan in plans.values():
            exchange = pool.exchange(plan.columns(task), task.batch_size)
            both = (exchange.forward_ms, exchange.backward_ms)
            costs.append(price_plan(plan, task, repeats, both))
    return costs


def _agreement(name: str, target: str, prices: Sequence[float], real: Floats) -> list[Metric]:
    """Returns rank correlations of costs and training steps, shape [plans, rounds]."""
    levels = _levels(real)
    rng = np.random.default_rng(0)
    drawn = rng.integers(levels.shape[1], size=(_DRAWS, levels.shape[1]))

    def spearman(rounds: npt.NDArray[np.int64]) -> float:
        return float(stats.spearmanr(prices, np.median(levels[:, rounds], axis=1)).statistic)

    low, high = np.quantile([spearman(rounds) for rounds in drawn], (0.025, 0.975))
    steps = np.median(levels, axis=1)
    return [
        Metric(f"Spearman correlation with training step time: {name}", target,
               float(stats.spearmanr(prices, steps).statistic), "", (float(low), float(high))),
        Metric(f"Kendall tau with training step time: {name}", "",
               float(stats.kendalltau(prices, steps).statistic)),
    ]  # fmt: skip


def _levels(real: Floats) -> Floats:
    """Normalises steps to the mean of all plans in the same round."""
    return np.asarray(real / real.mean(axis=0))


def _ratio(name: str, ours: Floats, theirs: Floats) -> Metric:
    ratios = ours / theirs
    return Metric(f"training step time, autoshard over {name}", "",
                  float(np.median(ratios)), "", median_interval(ratios.tolist()))  # fmt: skip
