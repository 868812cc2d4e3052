"""Measurements of a single plan: while it is made, and afterwards against its prediction."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from autoshard.benchmark import MeasurementStore, MeasureSettings
from autoshard.benchmark.backends import RequestedKind
from autoshard.cost_model import EstimatedCosts, StepPredictor
from autoshard.cost_model.learning.measured_knowledge import MeasuredKnowledge, MixedKnowledge
from autoshard.cost_model.pricing.acquisition import measurable_piece
from autoshard.cost_model.pricing.repeated_measurements import (
    SEEDS,
    KnownCost,
    RepeatedMeasurements,
    evaluation_seeds,
    normalizer,
)
from autoshard.experiments.console import cli
from autoshard.experiments.console.machine import check_measured_hardware
from autoshard.experiments.console.ray_cluster import measuring_pool
from autoshard.experiments.evaluation.posterior import (
    Pricing,
    StepPosterior,
    digest_on,
    digests_of,
)
from autoshard.sharders import SharderContext, make_measuring
from autoshard.workload import ShardingPlan, ShardingTask
from autoshard.workload.arrays import Floats

FIRST_SEED = 1000  # first index batch by which a plan is compared with its prediction


def measured_plan(
    sharder: str,
    task: ShardingTask,
    context: SharderContext,
    store: Path,
    devices: RequestedKind = "auto",
) -> tuple[ShardingPlan, EstimatedCosts, list[str]]:
    """Plans while measuring, then measures the plan with other index batches.

    Args:
        sharder: Name of the sharder.
        task: Task to plan.
        context: What the sharder requires, with the oracle by earlier measurements.
        store: File that keeps measurements.
        devices: Kind of devices that measure.

    Returns:
        The plan, the oracle by all measurements, and the lines of the report.
    """
    models = {name: part.model for name, part in context.costs.of_kinds().items()}
    MeasurementStore(store).close()  # fails before the work if it cannot be used
    with measuring_pool(store, devices) as cluster_pool:
        pools = {name: cluster_pool.of_hardware(name) for name in models}
        for name, pool in pools.items():
            check_measured_hardware(models[name], pool.devices()[0].hardware)
        settings = MeasureSettings(task.batch_size, task.operator)
        seeds = [FIRST_SEED + seed for seed in evaluation_seeds(SEEDS)]
        of_kinds = {
            name: MeasuredKnowledge(
                pool, models[name], settings, tables=task.tables, unseen=seeds, notify=cli.note
            )
            for name, pool in pools.items()
        }
        (knowledge,) = of_kinds.values() if len(of_kinds) == 1 else (MixedKnowledge(of_kinds),)
        pieces = [measurable_piece(table, knowledge.fits) for table in task.tables]
        pairs = list(zip(pieces, task.tables, strict=True))
        slices = sum(piece.table is table and piece.width < table.dim for piece, table in pairs)
        smaller = sum(piece.table is not table for piece, table in pairs)
        lines = []
        if slices or smaller:
            lines.append(
                f"note: {slices + smaller} tables do not fit into a device that measures: {slices} "
                f"are learned from some of their columns, {smaller} from tables with fewer rows"
            )
        before = knowledge.shards
        plan = make_measuring(sharder, replace(context, measurer=knowledge)).shard(task)
        lines.append(
            f"measured: {knowledge.shards - before} shards in {knowledge.seconds:.0f} s; "
            f"{knowledge.shards} shards with this batch size are known"
        )
        oracle = knowledge.informed(context.costs)
        repeats = {
            name: RepeatedMeasurements(
                pool,
                settings,
                seeds,
                None,
                normalizer(models[name], pool),
                cli.note,
                overhead=models[name].counted_overhead,
            )
            for name, pool in pools.items()
        }
        steps_ms = measure_step(repeats, task, plan, repeats=SEEDS)
    if steps_ms is None:
        return plan, oracle, [*lines, "measured: a shard of the plan could not be measured"]
    mean_ms, (low, high) = steps_ms.mean(), np.quantile(steps_ms, (0.025, 0.975))
    predicted_ms = StepPredictor(oracle, task).of(plan).expected_ms
    lines.append(
        f"measured: a step takes {mean_ms:.2f} ms (95% CI {low:.2f} to {high:.2f} ms; "
        f"objective {task.objective}); pred/meas {predicted_ms / mean_ms:.3f}"
    )
    return plan, oracle, lines


def measure_step(
    measuring: Mapping[str, RepeatedMeasurements],
    task: ShardingTask,
    plan: ShardingPlan,
    repeats: int,
) -> Floats | None:
    """Measures each shard of a plan `repeats` times; returns posterior samples of its step, in ms.

    Args:
        measuring: Measures shards of each hardware, by its name; "" if devices are equal.
        task: Task of the plan.
        plan: The plan.
        repeats: Measurements of each shard.

    Returns:
        None if a shard cannot be measured.
    """
    named = task.hardware or ("",) * len(task.devices)
    shards = [(s, name) for s, name in zip(plan.shards(task), named, strict=True) if s is not None]
    known: dict[str, KnownCost] = {}
    for name, of_kind in measuring.items():
        of_kind.measure([shard for shard, on in shards if on == name], repeats)
        known |= {digest_on(digest, name): cost for digest, cost in of_kind.known().items()}
    digests = digests_of(task, plan)
    if not known.keys() >= set(digests):
        return None
    pricing = Pricing.of(task, [plan], next(iter(measuring.values())).common_ms)
    posterior = StepPosterior(known, {"": [digests]}, [pricing])
    return posterior.steps_ms[""]
