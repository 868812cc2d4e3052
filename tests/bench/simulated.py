"""Intervals and choices of plans where the truth is drawn from the model's own posterior.

What a plan is predicted to gain is the best of many guesses, so a search may promise too much even
if the posterior is right. Here it is right by construction: what is left is the search's share.
"""

import warnings
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import NamedTuple

import numpy as np

from autoshard.cost_model import (
    CostModel,
    EstimatedCosts,
    OtherHardware,
    OutsideTraining,
    StepPredictor,
    load_model,
)
from autoshard.cost_model.threads import one_thread
from autoshard.envs import RandomTaskSampler, TableCatalog
from autoshard.experiments.evaluation.ratio import relative
from autoshard.experiments.evaluation.task_sets import sample_tasks
from autoshard.sharders import USUAL_HEURISTICS, SharderContext, load_policy, make_sharder
from autoshard.workload import ShardingPlan, ShardingTask, load_tables
from autoshard.workload.tables.parts import tables_by_part
from bench.metric import Metric, mean_and_interval
from bench.workbench import say

_SOURCES = ("synthetic:400:9:small", "zipf:400:9", "hot:400:9")
_TASKS, _TABLES, _DEVICES, _BATCH_SIZE = 1000, 60, 4, 1024
_FILL, _SEED = 0.1, 3
_TRUTH_SEED = 1  # of scenarios, other than those that predictions are made with
_OURS, _START = "autoshard", "cost_fused"


class _Drawn(NamedTuple):
    covered: bool  # whether the interval of the ratio to the best heuristic held
    over_start: float  # true step time over that of the greedy plan
    over_predicted: float  # true over predicted step time


def simulated_metrics() -> list[Metric]:
    """Plans 1,000 tasks for a machine that was not measured, and prices them by a drawn truth."""
    say(f"{_TASKS:,} tasks with a simulated truth")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OtherHardware)
        warnings.simplefilter("ignore", OutsideTraining)
        found = load_model("cpu")
        assert found.machines is not None
        # The mean machine, with the uncertainty of machines that were left out of training.
        drawn = list(_tasks_drawn(CostModel(found.machines.mean, found.provenance)))
    covered = float(np.mean([each.covered for each in drawn]))
    ratio = relative([each.over_start for each in drawn], [1.0] * len(drawn))
    assert ratio is not None
    true, of_true = mean_and_interval([each.over_predicted for each in drawn])
    what = "simulated truth"
    return [
        Metric(f"coverage of 90 % intervals of the ratio to the best heuristic, {what}",
               "0.85 to 0.95", covered),
        Metric(f"step time, {_OURS} over {_START}, {what}", "at most 1", ratio.value, "",
               (ratio.low, ratio.high)),
        Metric(f"true over predicted step time of {_OURS}, {what}", "0.97 to 1.03",
               true, "", of_true),
    ]  # fmt: skip


@one_thread()
def _tasks_drawn(model: CostModel) -> Iterator[_Drawn]:
    policy = load_policy("cpu")
    sampler = RandomTaskSampler((_TABLES,) * 2, (_DEVICES,) * 2, (_FILL,) * 2)
    for number, source in enumerate(_SOURCES):
        oracle = EstimatedCosts(model, _BATCH_SIZE)
        context = SharderContext(oracle, policy)
        sharders = {n: make_sharder(n, context) for n in (_OURS, _START, *USUAL_HEURISTICS)}
        pieces = [table.whole() for table in tables_by_part(load_tables(source))["test"]]
        tasks = sample_tasks(TableCatalog(oracle, pieces), sampler, _SEED)
        for task in islice(tasks, len(range(number, _TASKS, len(_SOURCES)))):
            yield _drawn(oracle, task, {n: each.shard(task) for n, each in sharders.items()})


def _drawn(oracle: EstimatedCosts, task: ShardingTask, plans: Mapping[str, ShardingPlan]) -> _Drawn:
    predictor, truth = StepPredictor(oracle, task), StepPredictor(oracle, task, _TRUTH_SEED)
    predicted = {name: predictor.of(plan) for name, plan in plans.items()}
    true_ms = {name: float(truth.of(plan).drawn_ms[0]) for name, plan in plans.items()}
    best = min(USUAL_HEURISTICS, key=lambda name: predicted[name].expected_ms)
    interval = predicted[_OURS].over(predicted[best])
    return _Drawn(
        interval.low <= true_ms[_OURS] / true_ms[best] <= interval.high,
        true_ms[_OURS] / true_ms[_START],
        true_ms[_OURS] / predicted[_OURS].expected_ms,
    )
