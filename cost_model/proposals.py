"""Learning from its own proposals: measure what sharders make of the model, and learn from that.

A search finds the mistakes of its model. So in each round sharders plan random tasks by the model
as it is, some of the plans' shards are measured, together with random shards that the networks
disagree on most, and the model is trained anew on all there is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.benchmark import Measurement
from autoshard.cost_model.oracle import EstimatedCosts
from autoshard.workload import (
    EmbeddingTable,
    Shard,
    Sharder,
    ShardingPlan,
    ShardingTask,
    random_shards,
)
from autoshard.workload.parts import tables_by_part

MakeSharder = Callable[[EstimatedCosts], Sharder]

_VALIDATION_SHARE = 0.15  # of a round's shards are of validation tables: they judge, not teach
_DOUBTED_SHARE = 0.3  # of a round's shards are taken for the networks' disagreement
CANDIDATES = 20  # random shards looked at for each one taken


@dataclass(frozen=True)
class PlanPrediction:
    """A plan's promised and measured milliseconds, a value a device."""

    predicted_ms: tuple[float, ...]
    measured_ms: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Mean over devices of measured over promised."""
        return float(np.mean(np.divide(self.measured_ms, self.predicted_ms)))

    @property
    def max_ratio(self) -> float:
        """The measured maximum over the promised one."""
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
    """At most `budget` shards that the model would learn most from.

    Args:
        oracle: the model as it is.
        sharders: make plans by it.
        tables: of which tasks are made; test tables are left out.
        make_tasks: random tasks of given tables.
        known: digests of shards that have been measured.
        budget: shards.
        seed: of what is drawn.
    """
    parts = tables_by_part(tables)
    rng = np.random.default_rng(seed)
    judged = round(budget * _VALIDATION_SHARE)
    chosen: dict[str, Shard] = {}
    for members, share in ((parts["validation"], judged), (parts["train"], budget - judged)):
        if not members or not share:
            continue
        before, proposed = len(chosen), proposals(oracle, sharders, make_tasks(members))
        uncertain = _uncertain(oracle, members, round(share * _DOUBTED_SHARE), known, seed)
        order = [proposed[n] for n in rng.permutation(len(proposed))]
        for shard in [*uncertain, *order]:
            if len(chosen) - before < share and shard.digest not in known:
                chosen.setdefault(shard.digest, shard)
    return list(chosen.values())


def proposals(
    oracle: EstimatedCosts, sharders: Sequence[MakeSharder], tasks: Sequence[ShardingTask]
) -> list[Shard]:
    """The different shards of all sharders' plans for the tasks."""
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
    """What the oracle promises for plans, and what comes of it. Idle devices are left out.

    A plan with a shard that could not be measured tells nothing, and is left out too.
    """
    shards = [[s for s in plan.shards(task) if s is not None] for task, plan in plans]
    flat = [shard for some in shards for shard in some]
    promised = iter(oracle.prices(flat).total_ms.tolist())
    level = oracle.model.provenance.reference_level
    measured = iter(answer.normalized_to(level).total_ms for answer in measure(flat))
    found = [
        PlanPrediction(tuple(next(promised) for _ in some), tuple(next(measured) for _ in some))
        for some in shards
    ]
    return [promise for promise in found if np.isfinite(promise.measured_ms).all()]


def most_uncertain(oracle: EstimatedCosts, candidates: Sequence[Shard], count: int) -> list[Shard]:
    """Those of the shards that the networks disagree on most."""
    if not candidates:
        return []
    doubts = oracle.prices(candidates).deviation.numpy()
    return [candidates[n] for n in np.argsort(-doubts)[:count]]


def _uncertain(
    oracle: EstimatedCosts,
    tables: Sequence[EmbeddingTable],
    count: int,
    known: set[str],
    seed: int,
) -> list[Shard]:
    """Random shards that the networks disagree on most."""
    if not count:
        return []
    most = max(1, len(tables) // 2)
    drawn = random_shards(tables, count * CANDIDATES, most, seed)
    return most_uncertain(oracle, [shard for shard in drawn if shard.digest not in known], count)
