"""Selects training data from the cost model's own proposals, and checks its predictions of plans.

Sharders exploit the errors of their cost model. So in each round they plan random tasks, and some
shards of their plans are measured, together with random shards of high uncertainty.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.benchmark import Measurement
from autoshard.cost_model.pricing.oracle import EstimatedCosts
from autoshard.workload import (
    EmbeddingTable,
    Shard,
    Sharder,
    ShardingPlan,
    ShardingTask,
    random_shards,
)
from autoshard.workload.tables.parts import tables_by_part

MakeSharder = Callable[[EstimatedCosts], Sharder]

_VALIDATION_SHARE = 0.15  # share of a round's shards that are of validation tables
_UNCERTAIN_SHARE = 0.3  # share of a round's shards selected by uncertainty
CANDIDATES = 20  # random shards for each one that is selected by uncertainty


@dataclass(frozen=True)
class PlanPrediction:
    """Predicted and measured milliseconds of a plan, one value per device."""

    predicted_ms: tuple[float, ...]
    measured_ms: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Mean over devices of measured over predicted."""
        return float(np.mean(np.divide(self.measured_ms, self.predicted_ms)))

    @property
    def max_ratio(self) -> float:
        """Measured maximum over predicted maximum."""
        return max(self.measured_ms) / max(self.predicted_ms)


def select_shards_to_measure(
    oracle: EstimatedCosts,
    sharders: Sequence[MakeSharder],
    tables: Sequence[EmbeddingTable],
    make_tasks: Callable[[Sequence[EmbeddingTable]], Sequence[ShardingTask]],
    known: set[str],
    budget: int,
    seed: int,
) -> list[Shard]:
    """Returns at most `budget` shards that the model would learn most from.

    Args:
        oracle: Oracle with the current model.
        sharders: Make sharders by an oracle.
        tables: Tables of tasks; test tables are left out.
        make_tasks: Returns random tasks of given tables.
        known: Digests of measured shards.
        budget: Maximum number of shards.
        seed: Seed of all sampling.
    """
    parts = tables_by_part(tables)
    rng = np.random.default_rng(seed)
    validation = round(budget * _VALIDATION_SHARE)
    chosen: dict[str, Shard] = {}
    for members, share in (
        (parts["validation"], validation),
        (parts["train"], budget - validation),
    ):
        if not members or not share:
            continue
        before, proposed = len(chosen), proposals(oracle, sharders, make_tasks(members))
        uncertain: list[Shard] = []
        if count := round(share * _UNCERTAIN_SHARE):
            drawn = random_shards(members, count * CANDIDATES, max(1, len(members) // 2), seed)
            fresh = [shard for shard in drawn if shard.digest not in known]
            uncertain = most_uncertain(oracle, fresh, count)
        order = [proposed[n] for n in rng.permutation(len(proposed))]
        for shard in [*uncertain, *order]:
            if len(chosen) - before < share and shard.digest not in known:
                chosen.setdefault(shard.digest, shard)
    return list(chosen.values())


def proposals(
    oracle: EstimatedCosts, sharders: Sequence[MakeSharder], tasks: Sequence[ShardingTask]
) -> list[Shard]:
    """Returns the distinct shards of all sharders' plans for the tasks."""
    found = {
        shard.digest: shard
        for task in tasks
        for make in sharders
        for shard in make(oracle).shard(task).shards(task)
        if shard is not None
    }
    return list(found.values())


def compare_predictions(
    oracle: EstimatedCosts,
    plans: Sequence[tuple[ShardingTask, ShardingPlan]],
    measure: Callable[[Sequence[Shard]], Sequence[Measurement]],
) -> list[PlanPrediction]:
    """Predicts and measures plans, idle devices excepted.

    Plans with a shard that cannot be measured are left out.
    """
    shards = [[s for s in plan.shards(task) if s is not None] for task, plan in plans]
    flat = [shard for of_plan in shards for shard in of_plan]
    predicted = iter(oracle.prices(flat).total_ms.tolist())
    level = oracle.model.provenance.reference_level
    measured = iter(answer.normalized_to(level).total_ms for answer in measure(flat))
    found = [
        PlanPrediction(tuple(next(predicted) for _ in plan), tuple(next(measured) for _ in plan))
        for plan in shards
    ]
    return [plan for plan in found if np.isfinite(plan.measured_ms).all()]


def most_uncertain(oracle: EstimatedCosts, candidates: Sequence[Shard], count: int) -> list[Shard]:
    """Returns the shards with the largest relative deviation."""
    if not candidates:
        return []
    deviations = oracle.prices(candidates).deviation.numpy()
    return [candidates[n] for n in np.argsort(-deviations)[:count]]
