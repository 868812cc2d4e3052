"""What holds on families of tables that the shipped model has not learned from.

It learned from `wide` tables alone: all the others are left out, so none is tested on its own.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from autoshard.benchmark import MeasureSettings
from autoshard.cost_model import (
    CostModel,
    EstimatedCosts,
    OtherHardware,
    OutsideTraining,
    TaskOutlook,
    load_model,
    read_costs,
    split,
)
from autoshard.cost_model.checkpoint import PRETRAINED
from autoshard.cost_model.evaluation import evaluate
from autoshard.cost_model.measured_knowledge import MeasuredKnowledge
from autoshard.cost_model.shard_visits import SEEDS, ShardVisits, evaluation_seeds, normalizer
from autoshard.experiments.evaluation.evaluator import measure_step
from autoshard.sharders import (
    HEURISTICS,
    USUAL_HEURISTICS,
    Means,
    load_policy,
    make_measuring,
    make_sharder,
)
from autoshard.workload import Device, ShardingPlan, ShardingTask, UserError, load_tables
from bench.figure import Figure
from bench.model import shipped_costs
from bench.workbench import cpu_pool, say

_DATA = PRETRAINED.parent / "families"
# Tables that tasks are made of: others than those that were measured for the tests of the model,
# where a family has more.
FAMILIES: Mapping[str, str] = {
    "small": "synthetic:60:9:small",
    "full": "synthetic:60:9:full",
    "criteo": "criteo",
    "mlperf": "mlperf:dlrm-v2:1/64",
    "zipf": "zipf:60:9",
    "hot": "hot:60:9",
    "cold": "cold:40:9",
}
_LEARNED = ("zipf", "hot")  # by heart, in 60 seconds each
_MEASURED = ("small", "criteo", "mlperf", "zipf", "hot")  # on CPUs: the others take minutes a plan
_DEVICES, _BATCH_SIZE, _FILL = 4, 1024, 0.5
_SECONDS = 60.0
_NAMES = ("policy", "autoshard")


def family_figures() -> list[Figure]:
    """What the shipped model says of measured shards of each family, and of plans for it."""
    figures: list[Figure] = []
    training = split(shipped_costs())["train"]
    model = _shipped_model()
    for name in FAMILIES:
        data = read_costs([_DATA / f"{name}.parquet"], level=model.provenance.quiet)
        found = evaluate(model.compute, training, data)
        figures += [
            Figure(f"{name}, left out: median error", "", found.score.median_error),
            Figure(f"{name}, left out: Kendall tau", "", found.score.kendall_tau),
            Figure(f"{name}, left out: share of shards within their 90 % interval",
                   "0.85 to 0.95", found.coverage_90),
        ]  # fmt: skip
    for name, source in FAMILIES.items():
        with _strangers():
            figures += _estimated(name, task_of(source))
    return figures


def _estimated(name: str, task: ShardingTask) -> list[Figure]:
    oracle = EstimatedCosts(_shipped_model(), _BATCH_SIZE)
    means, outlook = Means(oracle, load_policy("cpu")), TaskOutlook(oracle, task)
    expected = {
        sharder: outlook.of(make_sharder(sharder, means).shard(task)).expected_ms
        for sharder in (*HEURISTICS, "cost_fused", *_NAMES)
    }
    bar = min(expected[heuristic] for heuristic in HEURISTICS)
    return [
        Figure(f"{name}: expected step over the best heuristic's, autoshard", "",
               expected["autoshard"] / bar),
        Figure(f"{name}: expected step over cost_fused's, autoshard", "at most 1",
               expected["autoshard"] / expected["cost_fused"]),
        Figure(f"{name}: expected step over cost_fused's, policy", "at most 1.01",
               expected["policy"] / expected["cost_fused"]),
    ]  # fmt: skip


def measured_family_figures(folder: Path) -> list[Figure]:
    """What plans by the shipped model measure, for families that it has not learned from."""
    figures: list[Figure] = []
    names = (*USUAL_HEURISTICS, "cost_fused", *_NAMES)
    for family in _MEASURED:
        say(f"plans for {FAMILIES[family]}")
        task, oracle = task_of(FAMILIES[family]), EstimatedCosts(_shipped_model(), _BATCH_SIZE)
        means = Means(oracle, load_policy("cpu"))
        with _strangers(), cpu_pool(folder / f"{family}.db") as pool:
            settings = MeasureSettings(_BATCH_SIZE, task.operator)
            visits = ShardVisits(pool, settings, evaluation_seeds(SEEDS))
            plans = {name: make_sharder(name, means).shard(task) for name in names}
            slowest = {name: _slowest_ms(visits, task, plan) for name, plan in plans.items()}
        bar = min(slowest[heuristic] for heuristic in USUAL_HEURISTICS)
        figures += [
            *(
                Figure(f"{family}: measured step over the best heuristic's, {name}", "",
                       slowest[name] / bar)
                for name in _NAMES
            ),
            Figure(f"{family}: measured step over cost_fused's, autoshard",
                   "at most 0.99", slowest["autoshard"] / slowest["cost_fused"]),
        ]  # fmt: skip
    return figures


def by_heart_figures(folder: Path) -> list[Figure]:
    """What 60 seconds of measuring make of promises and plans, as `shard.py --measure` does."""
    figures: list[Figure] = []
    model = _shipped_model()
    for family in _LEARNED:
        say(f"what tells most about {FAMILIES[family]}")
        task, oracle = task_of(FAMILIES[family]), EstimatedCosts(model, _BATCH_SIZE)
        with _strangers(), cpu_pool(folder / f"heart-{family}.db") as pool:
            settings = MeasureSettings(_BATCH_SIZE, task.operator)
            knowledge = MeasuredKnowledge(pool, model, settings, tables=task.tables)
            means = Means(oracle, load_policy("cpu"), knowledge, measure_seconds=_SECONDS)
            plan = make_measuring("autoshard", means).shard(task)
            promise = TaskOutlook(knowledge.informed(oracle), task).of(plan).expected_ms
            before = make_sharder("cost_fused", means).shard(task)
            normalize = normalizer(model, pool)
            judging = ShardVisits(pool, settings, evaluation_seeds(SEEDS), normalize=normalize)
            ours, theirs = (_slowest_ms(judging, task, each) for each in (plan, before))
        figures += [
            Figure(f"{family}, {_SECONDS:.0f} s of measuring: measured over promised",
                   "0.97 to 1.03", ours / promise),
            Figure(f"{family}, {_SECONDS:.0f} s of measuring: measured over cost_fused before",
                   "at most 0.95", ours / theirs),
        ]  # fmt: skip
    return figures


def task_of(source: str) -> ShardingTask:
    """The source's tables on devices with room for half as much again as they need, or more."""
    tables, operator = load_tables(source), _shipped_model().provenance.operator
    sizes = [operator.memory((table.whole(),), _BATCH_SIZE).total for table in tables]
    room = int(max(sum(sizes) / _DEVICES / _FILL, 1.1 * max(sizes)))
    return ShardingTask(tables, Device.uniform(_DEVICES, room), _BATCH_SIZE, operator)


def _slowest_ms(visits: ShardVisits, task: ShardingTask, plan: ShardingPlan) -> float:
    found = measure_step(visits, task, plan, visits=SEEDS)
    if found is None:
        raise UserError("a shard of a plan could not be measured: its figures cannot be told")
    return found.mean_ms


@cache
def _shipped_model() -> CostModel:
    """The shipped model; that it is of other hardware is why these figures are taken."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OtherHardware)
        return load_model("cpu")


@contextmanager
def _strangers() -> Iterator[None]:
    """Where tables may be strange: that is what is tested."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OutsideTraining)
        yield
