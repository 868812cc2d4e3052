"""A plan that is measured while it is made, and then compared with its prediction."""

from dataclasses import replace
from pathlib import Path

from autoshard.benchmark import MeasurementStore, MeasureSettings
from autoshard.cost_model import EstimatedCosts, StepPredictor
from autoshard.cost_model.acquisition import measurable_piece
from autoshard.cost_model.measured_knowledge import MeasuredKnowledge
from autoshard.cost_model.repeated_measurements import (
    SEEDS,
    RepeatedMeasurements,
    evaluation_seeds,
    normalizer,
)
from autoshard.experiments.console import cli
from autoshard.experiments.console.ray_cluster import measuring_pool
from autoshard.experiments.evaluation.evaluator import measure_step
from autoshard.sharders import SharderContext, make_measuring
from autoshard.workload import ShardingPlan, ShardingTask

FIRST_SEED = 1000  # from here on: the index batches by which a plan is compared with its prediction


def measured_plan(
    sharder: str, task: ShardingTask, context: SharderContext, store: Path
) -> tuple[ShardingPlan, EstimatedCosts, list[str]]:
    """Plans while measuring, then measures the plan with other index batches.

    Args:
        sharder: Name of the sharder.
        task: Task to plan.
        context: What the sharder requires, with the oracle by what is known beforehand.
        store: File that keeps measurements.

    Returns:
        The plan, the oracle by all measurements, and the lines of the report.
    """
    model = context.costs.model
    MeasurementStore(store).close()  # fails before the work if it cannot be used
    with measuring_pool(store) as pool:
        settings = MeasureSettings(task.batch_size, task.operator)
        seeds = [FIRST_SEED + seed for seed in evaluation_seeds(SEEDS)]
        knowledge = MeasuredKnowledge(
            pool, model, settings, tables=task.tables, unseen=seeds, notify=cli.note
        )
        lines = _stand_ins(task, knowledge)
        before = knowledge.shards
        plan = make_measuring(sharder, replace(context, measurer=knowledge)).shard(task)
        lines.append(
            f"measured: {knowledge.shards - before} shards in {knowledge.seconds:.0f} s; "
            f"{knowledge.shards} of such batches are known by now"
        )
        oracle = knowledge.informed(context.costs)
        repeats = RepeatedMeasurements(
            pool, settings, seeds, None, normalizer(model, pool), cli.note
        )
        found = measure_step(repeats, task, plan, repeats=SEEDS)
    if found is None:
        return plan, oracle, [*lines, "measured: a shard of the plan could not be"]
    (low, high), predicted = found.interval_ms, StepPredictor(oracle, task).of(plan).expected_ms
    lines.append(
        f"measured: a step takes {found.mean_ms:.2f} ms (95% CI {low:.2f} to {high:.2f} ms; "
        f"objective {task.objective}); pred/meas {predicted / found.mean_ms:.3f}"
    )
    return plan, oracle, lines


def _stand_ins(task: ShardingTask, knowledge: MeasuredKnowledge) -> list[str]:
    """Returns a line about tables that no device has memory to measure."""
    pieces = [measurable_piece(table, knowledge.fits) for table in task.tables]
    parts = sum(p.table is t and p.width < t.dim for p, t in zip(pieces, task.tables, strict=True))
    lower = sum(p.table is not t for p, t in zip(pieces, task.tables, strict=True))
    if not parts and not lower:
        return []
    return [
        f"note: {parts + lower} tables do not fit into a device that measures: {parts} are learned "
        f"from some of their columns, {lower} from tables with fewer rows"
    ]
