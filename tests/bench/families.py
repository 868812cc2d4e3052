"""Accuracy and plans for families of tables that are held out from the shipped model.

The model is trained on `wide` tables only, so all other families are test data.
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
    StepPredictor,
    load_model,
    read_costs,
    split,
)
from autoshard.cost_model.learning.evaluation import evaluate
from autoshard.cost_model.learning.measured_knowledge import MeasuredKnowledge
from autoshard.cost_model.models.checkpoint import PRETRAINED
from autoshard.cost_model.pricing.repeated_measurements import (
    SEEDS,
    RepeatedMeasurements,
    evaluation_seeds,
    normalizer,
)
from autoshard.experiments.evaluation.measured_plan import measure_step
from autoshard.sharders import (
    HEURISTICS,
    USUAL_HEURISTICS,
    SharderContext,
    load_policy,
    make_measuring,
    make_sharder,
)
from autoshard.workload import Device, ShardingPlan, ShardingTask, UserError, load_tables
from bench.metric import Metric
from bench.model import shipped_costs
from bench.workbench import cpu_pool, say

_DATA = PRETRAINED.parent / "families"
# Tables of the tasks: where a family has more, others than those measured to test the model.
FAMILIES: Mapping[str, str] = {
    "small": "synthetic:60:9:small",
    "full": "synthetic:60:9:full",
    "criteo": "criteo",
    "mlperf": "mlperf:dlrm-v2:1/64",
    "zipf": "zipf:60:9",
    "hot": "hot:60:9",
    "cold": "cold:40:9",
}
_LEARNED = ("zipf", "hot")  # measured for 60 seconds each
_MEASURED = ("small", "criteo", "mlperf", "zipf", "hot")  # on CPUs: the others take minutes a plan
_DEVICES, _BATCH_SIZE, _FILL = 4, 1024, 0.5
_SECONDS = 60.0
_NAMES = ("policy", "autoshard")


def family_metrics() -> list[Metric]:
    """Tests the shipped model on measured shards of each family, and predicts plans."""
    metrics: list[Metric] = []
    training = split(shipped_costs())["train"]
    model = _shipped_model()
    for name in FAMILIES:
        data = read_costs([_DATA / f"{name}.parquet"], level=model.provenance.reference_level)
        found = evaluate(model.compute, training, data)
        metrics += [
            Metric(f"{name}, held out: median error", "", found.score.median_error),
            Metric(f"{name}, held out: Kendall tau", "", found.score.kendall_tau),
            Metric(f"{name}, held out: coverage of 90 % intervals",
                   "0.85 to 0.95", found.coverage_90),
        ]  # fmt: skip
    for name, source in FAMILIES.items():
        with _out_of_distribution():
            metrics += _estimated(name, task_of(source))
    return metrics


def _estimated(name: str, task: ShardingTask) -> list[Metric]:
    oracle = EstimatedCosts(_shipped_model(), _BATCH_SIZE)
    context, predictor = SharderContext(oracle, load_policy("cpu")), StepPredictor(oracle, task)
    expected = {
        sharder: predictor.of(make_sharder(sharder, context).shard(task)).expected_ms
        for sharder in (*HEURISTICS, "cost_fused", *_NAMES)
    }
    expected["best heuristic"] = min(expected[heuristic] for heuristic in HEURISTICS)
    targets = {("autoshard", "best heuristic"): "", ("autoshard", "cost_fused"): "at most 1",
               ("policy", "cost_fused"): "at most 1.01"}  # fmt: skip
    return [
        Metric(f"{name}: expected step time, {ours} over {theirs}", target,
               expected[ours] / expected[theirs])
        for (ours, theirs), target in targets.items()
    ]  # fmt: skip


def measured_family_metrics(folder: Path) -> list[Metric]:
    """Measures plans by the shipped model for held-out families."""
    metrics: list[Metric] = []
    names = (*USUAL_HEURISTICS, "cost_fused", *_NAMES)
    for family in _MEASURED:
        say(f"plans for {FAMILIES[family]}")
        task, oracle = task_of(FAMILIES[family]), EstimatedCosts(_shipped_model(), _BATCH_SIZE)
        context = SharderContext(oracle, load_policy("cpu"))
        with _out_of_distribution(), cpu_pool(folder / f"{family}.db") as pool:
            settings = MeasureSettings(_BATCH_SIZE, task.operator)
            repeats = RepeatedMeasurements(pool, settings, evaluation_seeds(SEEDS))
            plans = {name: make_sharder(name, context).shard(task) for name in names}
            step_ms = {name: _step_ms(repeats, task, plan) for name, plan in plans.items()}
        step_ms["best heuristic"] = min(step_ms[heuristic] for heuristic in USUAL_HEURISTICS)
        targets = {("policy", "best heuristic"): "", ("autoshard", "best heuristic"): "",
                   ("autoshard", "cost_fused"): "at most 0.99"}  # fmt: skip
        metrics += [
            Metric(f"{family}: measured step time, {ours} over {theirs}", target,
                   step_ms[ours] / step_ms[theirs])
            for (ours, theirs), target in targets.items()
        ]  # fmt: skip
    return metrics


def correction_metrics(folder: Path) -> list[Metric]:
    """Measures plans and predictions after 60 s of measuring, as by `shard.py --measure`."""
    metrics: list[Metric] = []
    model = _shipped_model()
    for family in _LEARNED:
        say(f"measuring while planning for {FAMILIES[family]}")
        task, oracle = task_of(FAMILIES[family]), EstimatedCosts(model, _BATCH_SIZE)
        with _out_of_distribution(), cpu_pool(folder / f"{family}-corrections.db") as pool:
            settings = MeasureSettings(_BATCH_SIZE, task.operator)
            knowledge = MeasuredKnowledge(pool, model, settings, tables=task.tables)
            context = SharderContext(
                oracle, load_policy("cpu"), knowledge, measure_seconds=_SECONDS
            )
            plan = make_measuring("autoshard", context).shard(task)
            predicted = StepPredictor(knowledge.informed(oracle), task).of(plan).expected_ms
            before = make_sharder("cost_fused", context).shard(task)
            normalize = normalizer(model, pool)
            judging = RepeatedMeasurements(
                pool, settings, evaluation_seeds(SEEDS), normalize=normalize
            )
            ours, theirs = (_step_ms(judging, task, each) for each in (plan, before))
        metrics += [
            Metric(f"{family}, {_SECONDS:.0f} s of measuring: predicted over measured",
                   "0.97 to 1.03", predicted / ours),
            Metric(f"{family}, {_SECONDS:.0f} s of measuring: step time, "
                   "autoshard over cost_fused without measuring", "at most 0.95", ours / theirs),
        ]  # fmt: skip
    return metrics


def task_of(source: str) -> ShardingTask:
    """Returns a task whose tables fill at most half of the devices' memory."""
    tables, operator = load_tables(source), _shipped_model().provenance.operator
    sizes = [operator.memory((table.whole(),), _BATCH_SIZE).total for table in tables]
    memory = int(max(sum(sizes) / _DEVICES / _FILL, 1.1 * max(sizes)))
    return ShardingTask(tables, Device.uniform(_DEVICES, memory), _BATCH_SIZE, operator)


def _step_ms(repeats: RepeatedMeasurements, task: ShardingTask, plan: ShardingPlan) -> float:
    found = measure_step({"": repeats}, task, plan, repeats=SEEDS)
    if found is None:
        raise UserError("a shard of a plan could not be measured, so its metrics are not available")
    return float(found.mean())


@cache
def _shipped_model() -> CostModel:
    """Returns the shipped model; ignores the warning of other hardware."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OtherHardware)
        return load_model("cpu")


@contextmanager
def _out_of_distribution() -> Iterator[None]:
    """Ignores warnings of out-of-distribution tables, which these metrics test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OutsideTraining)
        yield
