"""NeuroShard: beam search over column splits around a greedy placement.

After "Pre-train and Search: Efficient Embedding Table Sharding with Pre-trained Neural Cost
Models" (Zha et al., MLSys 2023), with this project's cost model, constraints and objective. Unlike
the published version, equal pieces are tried once, halves may differ slightly in width, and the
greedy also runs without a limit of columns, because a few wide tables exceed every limit.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from autoshard.cost_model import EstimatedCosts
from autoshard.cost_model.threads import one_thread
from autoshard.sharders.heuristics.grid_greedy import GridGreedy
from autoshard.workload import ShardingPlan, ShardingTask
from autoshard.workload.packing.admission import RuleMasks
from autoshard.workload.packing.pack import does_not_fit
from autoshard.workload.packing.units import PlacementUnit, bytes_of_units

# As published: the defaults of `shard` and `_table_wise_shard` in neuroshard/neurosharder.py of
# github.com/daochenzha/neuroshard, there `n`, `k`, `max_length`, `search_steps` and `threshold_*`.
_CANDIDATES = 10  # number of the costliest pieces, and of the largest ones, that are split
_BEAM = 3  # cuts that are kept after a step
_STEPS = 10  # consecutive splits
_GRID = 11  # limits of columns
_MIN_SHARE, _MAX_SHARE = 1.0, 1.5  # first and last limit, relative to the mean

_SHARES = (*np.linspace(_MIN_SHARE, _MAX_SHARE, _GRID).tolist(), np.inf)


class NeuroShardSharder:
    """Splits the costliest or largest pieces in a beam search, and places all pieces greedily.

    Args:
        oracle: Predicts costs.
    """

    def __init__(self, oracle: EstimatedCosts) -> None:
        self._oracle = oracle

    @one_thread()
    def shard(self, task: ShardingTask) -> ShardingPlan:
        """Returns a valid plan; raises PlanError, which says what is missing, if none is found."""
        self._oracle.check(task)
        greedy = GridGreedy(self._oracle, task, _SHARES)
        cuts = _Cuts(self._oracle, task, greedy.masks)
        (whole,) = greedy.best([greedy.masks.units])
        beam, best = [whole], whole
        for _ in range(_STEPS):
            tried = cuts.after([plan.units for plan in beam])
            if not tried:
                break
            beam = sorted(greedy.best(tried), key=lambda plan: plan.rank)[:_BEAM]
            best = min(best, beam[0], key=lambda plan: plan.rank)
        if best.lack:
            raise does_not_fit(task, split=True)
        # Pieces of a table on the same device become one, which changes their cost.
        found = (ShardingPlan.of_pieces(task, p.placed()) for p in (whole, best) if not p.lack)
        return min(found, key=lambda plan: self._oracle.step_ms(plan, task))


class _Cuts:
    """Generates cuts of a task's tables. Pieces of a table with equal widths are one object."""

    def __init__(self, oracle: EstimatedCosts, task: ShardingTask, masks: RuleMasks) -> None:
        self._oracle, self._task, self._masks = oracle, task, masks
        self._pieces: dict[tuple[str, int], PlacementUnit] = {}

    def after(self, cuts: Sequence[Sequence[PlacementUnit]]) -> list[list[PlacementUnit]]:
        """Returns the distinct cuts that split one more piece."""
        found: dict[frozenset[tuple[PlacementUnit, int]], list[PlacementUnit]] = {}
        for cut in cuts:
            for unit in self._worth_splitting(cut):
                rest = list(cut)
                rest.remove(unit)
                tried = rest + [self._unique(half) for half in unit.halves()]
                found.setdefault(frozenset(Counter(tried).items()), tried)
        return list(found.values())

    def _worth_splitting(self, cut: Sequence[PlacementUnit]) -> list[PlacementUnit]:
        distinct = list(dict.fromkeys(cut))
        costs = self._oracle.alone_ms(distinct)
        sizes = bytes_of_units(self._task.operator, self._task.batch_size, distinct)
        costliest, largest = (np.argsort(-by, kind="stable")[:_CANDIDATES] for by in (costs, sizes))
        pieces = Counter(piece.name for piece in cut)
        return [
            unit
            for number in dict.fromkeys([*costliest.tolist(), *largest.tolist()])
            if self._masks.may_split(unit := distinct[number], pieces[unit.name])
        ]

    def _unique(self, half: PlacementUnit) -> PlacementUnit:
        return self._pieces.setdefault((half.name, half.pieces[0].width), half)
