"""A plan that is measured while it is made, and then held against what it promised."""

from dataclasses import replace
from pathlib import Path

from autoshard.benchmark import MeasurementStore, MeasureSettings
from autoshard.cost_model import EstimatedCosts, TaskOutlook
from autoshard.cost_model.telling import held_piece
from autoshard.experiments.judging.judge import judge_plan
from autoshard.experiments.judging.knowledge import Knowledge
from autoshard.experiments.judging.shard_visits import (
    SEEDS,
    ShardVisits,
    judging_seeds,
    plan_pool,
    told_as,
)
from autoshard.sharders import Means, make_measuring
from autoshard.workload import ShardingPlan, ShardingTask

JUDGED = 1000  # from here on are the index batches by which a plan is held against its promise


def measured_plan(
    sharder: str, task: ShardingTask, means: Means, store: Path
) -> tuple[ShardingPlan, EstimatedCosts, list[str]]:
    """A plan that was measured while it was made, what is known by then, and what is said of it.

    Args:
        sharder: its name.
        task: what is planned.
        means: with an oracle, by what is known beforehand.
        store: where measurements are kept.
    """
    assert means.oracle is not None
    model = means.oracle.model
    MeasurementStore(store).close()  # one that cannot be used is told at once
    with plan_pool(store) as pool:
        settings = MeasureSettings(task.batch_size, task.operator)
        seeds = [JUDGED + seed for seed in judging_seeds(SEEDS)]
        knowledge = Knowledge(pool, model, settings, tables=task.tables, unseen=seeds)
        said = _standing_in(task, knowledge)
        before = knowledge.shards
        plan = make_measuring(sharder, replace(means, measurer=knowledge)).shard(task)
        said.append(
            f"measured: {knowledge.shards - before} shards in {knowledge.seconds:.0f} s; "
            f"{knowledge.shards} of such batches are known by now"
        )
        oracle = knowledge.informed(means.oracle)
        judging = ShardVisits(pool, settings, seeds, told=told_as(model, pool))
        found = judge_plan(judging, task, plan, visits=SEEDS)
    if found is None:
        return plan, oracle, [*said, "measured: a shard of the plan could not be"]
    (low, high), promise = found.interval_ms, TaskOutlook(oracle, task).of(plan)
    said.append(
        f"measured: a step takes {found.mean_ms:.2f} ms ({task.objective}; 95 % interval {low:.2f} "
        f"to {high:.2f} ms), which is {found.mean_ms / promise.expected_ms:.3f} of what was "
        "promised"
    )
    return plan, oracle, said


def _standing_in(task: ShardingTask, knowledge: Knowledge) -> list[str]:
    """What is said of tables that no device can hold for measuring."""
    pieces = [held_piece(table, knowledge.fits) for table in task.tables]
    parts = sum(p.table is t and p.width < t.dim for p, t in zip(pieces, task.tables, strict=True))
    lower = sum(p.table is not t for p, t in zip(pieces, task.tables, strict=True))
    if not parts and not lower:
        return []
    return [
        f"note: {parts + lower} tables do not fit into a device that measures: {parts} are learned "
        f"from some of their columns, {lower} from tables with fewer rows"
    ]
