"""Greedy placement after tables are split: where whole tables do not fit into devices, or where
some are so costly that no other placement of whole tables makes devices even.
"""

from collections.abc import Callable, Sequence

import numpy as np

from autoshard.cost_model import EstimatedCosts
from autoshard.cost_model.pricing.prediction import Placed
from autoshard.sharders.heuristics.grid_greedy import GridGreedy
from autoshard.workload import ShardingTask
from autoshard.workload.arrays import Floats, Ints
from autoshard.workload.packing.units import PlacementUnit, bytes_of_units

_Sizes = Callable[[Sequence[PlacementUnit]], Floats | Ints]
_SHARES = (1.1, 1.3, np.inf)  # limits of columns of a device, relative to the mean
_USUAL = 1.3  # of these
_ALONE = (1.0, 0.6)  # limits of the cost of a piece alone, relative to what a device takes if even
_WORTH = 0.75  # cost of a half at most, relative to the whole: lookups are repeated by each
_PARTS = (2, 4, 8, 16, 32)  # largest pieces are so many times smaller than a device's memory


def split_greedy(oracle: EstimatedCosts, task: ShardingTask, thorough: bool = True) -> list[Placed]:
    """Returns the plans with the coarsest pieces that fit, and with those half as large; maybe
    none.

    Args:
        oracle: Cost oracle.
        task: The task.
        thorough: Whether several limits of columns are tried, and smaller pieces: six times the
            work.
    """
    greedy = GridGreedy(oracle, task, _SHARES if thorough else (_USUAL,))
    enough, found = 2 if thorough else 1, list[Placed]()
    largest = int(task.usable_bytes.max())
    cut: list[PlacementUnit] = []

    def sizes(units: Sequence[PlacementUnit]) -> Ints:
        return bytes_of_units(task.operator, task.batch_size, units)

    needed = sum(sizes(greedy.masks.units).tolist())  # may be more than 64 bits hold
    if needed > sum(task.usable_bytes.tolist()):
        return []  # pieces take no less
    for parts in _PARTS:
        finer = _cut(greedy, sizes, largest // parts)
        if len(finer) == len(cut):
            continue
        cut = finer
        (plan,) = greedy.best([cut])
        if not plan.lack:
            found.append(plan.placed())
        if found and (len(found) == enough or plan.lack):
            break
    return found


def cut_greedy(
    oracle: EstimatedCosts, task: ShardingTask, even_ms: float, alone_ms: _Sizes
) -> list[Placed]:
    """Returns plans with the costliest tables in pieces that devices can share evenly; none if no
    table is that costly, or if no plan fits.

    Args:
        oracle: Cost oracle.
        task: The task.
        even_ms: What each device takes if tables are spread evenly.
        alone_ms: Returns what each unit takes on a device of its own.
    """
    greedy, found = GridGreedy(oracle, task, _SHARES), list[Placed]()
    pieces = len(greedy.masks.units)
    for share in _ALONE:
        cut = _cut(greedy, alone_ms, share * even_ms, _WORTH)
        if len(cut) > pieces:
            (plan,) = greedy.best([cut])
            found += [] if plan.lack else [plan.placed()]
        pieces = len(cut)
    return found


def _cut(
    greedy: GridGreedy, sizes_of: _Sizes, limit: float, most: float = 1.0
) -> list[PlacementUnit]:
    """Returns the units of a task, those that are larger than the limit in pieces, as long as a
    half is at most this share of the whole.
    """
    found, masks = list[PlacementUnit](), greedy.masks
    for unit, size in zip(masks.units, sizes_of(masks.units), strict=True):
        pieces = [unit]
        while size > limit and all(
            masks.may_split(piece, len(pieces) + n) for n, piece in enumerate(pieces)
        ):
            finer = [half for piece in pieces for half in piece.halves()]
            before, size = size, max(sizes_of(finer))
            if size > most * before:
                break
            pieces = finer
        found += pieces
    return found
