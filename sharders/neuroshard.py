"""NeuroShard's search: which tables to split by columns, in a beam around a greedy placement.

After "Pre-train and Search: Efficient Embedding Table Sharding with Pre-trained Neural Cost
Models" (Zha et al., MLSys 2023), for our cost model, rules and objective. Else than published,
slices that are the same are tried once, a table may be cut into halves that are not quite equal,
and the greedy also goes without a limit: few wide tables are within none.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from autoshard.cost_model import EstimatedCosts
from autoshard.cost_model.training import one_thread
from autoshard.sharders.grid_greedy import GridGreedy
from autoshard.workload import ShardingPlan, ShardingTask
from autoshard.workload.admission import RuleMasks
from autoshard.workload.packing import does_not_fit
from autoshard.workload.units import PlacementUnit, bytes_of_units

# As published: the defaults of `shard` and `_table_wise_shard` in neuroshard/neurosharder.py of
# github.com/daochenzha/neuroshard, there `n`, `k`, `max_length`, `search_steps` and `threshold_*`.
_CANDIDATES = 10  # of the costliest slices, and of the largest ones, that are tried to be halved
_BEAM = 3  # cuts that the next step goes on from
_STEPS = 10  # halvings one after another
_GRID = 11  # limits of columns
_MIN_SHARE, _MAX_SHARE = 1.0, 1.5  # the first limit and the last, of the mean of the devices

_SHARES = (*np.linspace(_MIN_SHARE, _MAX_SHARE, _GRID).tolist(), np.inf)


class NeuroShardSharder:
    """Halves one slice after another, the costliest or the largest; of all cuts on the way, the one
    counts that costs least when its slices are placed greedily.

    Args:
        oracle: prices devices.
    """

    def __init__(self, oracle: EstimatedCosts) -> None:
        self._oracle = oracle

    @one_thread()
    def shard(self, task: ShardingTask) -> ShardingPlan:
        """A valid plan; PlanError says what is missing where none is found."""
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
        # Slices of a table that meet on a device become one, which changes what they cost.
        found = (ShardingPlan.of_pieces(task, p.placed()) for p in (whole, best) if not p.lack)
        return min(found, key=lambda plan: self._oracle.step_ms(plan, task))


class _Cuts:
    """Ways to cut a task's tables. Slices of a table that are equally wide are one object: which
    columns they are does not matter until a plan is written down.
    """

    def __init__(self, oracle: EstimatedCosts, task: ShardingTask, masks: RuleMasks) -> None:
        self._oracle, self._task, self._masks = oracle, task, masks
        self._pieces: dict[tuple[str, int], PlacementUnit] = {}

    def after(self, cuts: Sequence[Sequence[PlacementUnit]]) -> list[list[PlacementUnit]]:
        """These with one slice halved, one of the costliest or of the largest; each cut once."""
        found: dict[frozenset[tuple[PlacementUnit, int]], list[PlacementUnit]] = {}
        for cut in cuts:
            for unit in self._worth_splitting(cut):
                rest = list(cut)
                rest.remove(unit)
                tried = rest + [self._the_only(half) for half in unit.halves()]
                found.setdefault(frozenset(Counter(tried).items()), tried)
        return list(found.values())

    def _worth_splitting(self, cut: Sequence[PlacementUnit]) -> list[PlacementUnit]:
        different = list(dict.fromkeys(cut))
        costs = self._oracle.alone_ms(different)
        sizes = bytes_of_units(self._task.operator, self._task.batch_size, different)
        costliest, largest = (np.argsort(-by, kind="stable")[:_CANDIDATES] for by in (costs, sizes))
        pieces = Counter(piece.name for piece in cut)
        return [
            unit
            for number in dict.fromkeys([*costliest.tolist(), *largest.tolist()])
            if self._masks.may_split(unit := different[number], pieces[unit.name])
        ]

    def _the_only(self, half: PlacementUnit) -> PlacementUnit:
        return self._pieces.setdefault((half.name, half.pieces[0].width), half)
