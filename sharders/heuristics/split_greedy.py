"""Greedy placement after large tables are split, for tasks in which whole tables do not fit."""

from collections.abc import Sequence

import numpy as np

from autoshard.cost_model import EstimatedCosts
from autoshard.cost_model.pricing.prediction import Placed
from autoshard.sharders.heuristics.grid_greedy import GridGreedy
from autoshard.workload import ShardingTask
from autoshard.workload.packing.units import PlacementUnit, bytes_of_units

_SHARES = (1.1, 1.3, np.inf)  # limits of columns of a device, relative to the mean
_USUAL = 1.3  # of these
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
    if sum(_sizes(task, greedy.masks.units)) > sum(task.usable_bytes.tolist()):
        return []  # pieces take no less
    for parts in _PARTS:
        finer = _cut(greedy, task, largest // parts)
        if len(finer) == len(cut):
            continue
        cut = finer
        (plan,) = greedy.best([cut])
        if not plan.lack:
            found.append(plan.placed())
        if found and (len(found) == enough or plan.lack):
            break
    return found


def _cut(greedy: GridGreedy, task: ShardingTask, limit: int) -> list[PlacementUnit]:
    """Returns the units of a task, those with more bytes than the limit in pieces."""
    found, masks = list[PlacementUnit](), greedy.masks
    for unit, size in zip(masks.units, _sizes(task, masks.units), strict=True):
        pieces = [unit]
        while size > limit and all(
            masks.may_split(piece, len(pieces) + n) for n, piece in enumerate(pieces)
        ):
            pieces = [half for piece in pieces for half in piece.halves()]
            size = max(_sizes(task, pieces))
        found += pieces
    return found


def _sizes(task: ShardingTask, units: Sequence[PlacementUnit]) -> list[int]:
    return [int(size) for size in bytes_of_units(task.operator, task.batch_size, units)]
