"""Limits the bytes that a search moves away from a plan in use."""

from collections.abc import Sequence

import numpy as np

from autoshard.workload import Piece, ShardingPlan, ShardingTask
from autoshard.workload.arrays import Bools, Ints
from autoshard.workload.packing.units import PlacementUnit

GONE = -1  # the device of pieces that are on none: split, or only looked at


class MoveBudget:
    """Limit of bytes on other devices than in the plan in use.

    Args:
        plan: The plan in use.
        max_bytes: Bytes of weights and optimizer state that may move.
        task: Of the plan.
    """

    def __init__(self, plan: ShardingPlan, max_bytes: int, task: ShardingTask) -> None:
        self._max_bytes, self._task = max_bytes, task
        self._placements = plan.by_table()
        self._moving = np.empty((0, len(task.devices)), np.int64)  # bytes, [pieces, devices]

    def extend(self, pieces: Sequence[PlacementUnit]) -> None:
        """Adds pieces, in the order of the search's own."""
        stored, devices = self._task.operator.stored_bytes, np.arange(len(self._task.devices))
        sizes = [sum(stored(s.table.rows, s.width) for s in piece.pieces) for piece in pieces]
        homes = np.array([self._home(piece.pieces[0]) for piece in pieces], np.int64)
        moves = (homes[:, None] != devices) & (homes[:, None] != GONE)
        moving = np.array(sizes, np.int64)[:, None] * moves
        self._moving = np.concatenate([self._moving, moving])

    def admits(self, pieces: Ints, homes: Ints) -> Bools:
        """Returns whether each piece may go to each device: [pieces, devices].

        Args:
            pieces: Numbers of pieces.
            homes: The device of each piece that there is, or `GONE`.
        """
        moved = self._moved_without(pieces, homes)[:, None] + self._moving[pieces]
        return np.asarray(moved <= self._max_bytes)

    def admits_swaps(self, here: int, mine: Ints, others: Ints, homes: Ints) -> Bools:
        """Returns whether each of mine, all on device `here`, may change places with each of the
        others: [mine, others].
        """
        there = homes[others]
        others_stay = self._moving[others, there]
        moved = self._moved_without(mine, homes)[:, None] - others_stay + self._moving[others, here]
        return np.asarray(moved + self._moving[mine][:, there] <= self._max_bytes)

    def _home(self, piece: Piece) -> int:
        """Returns the device of the piece in the plan in use; `GONE` for a block of rows, which
        does not move.
        """
        return next(
            (
                placement.device
                for placement in self._placements.get(piece.table.name, ())
                if placement.start <= piece.start < placement.start + placement.width
            ),
            GONE,
        )

    def _moved_without(self, pieces: Ints, homes: Ints) -> Ints:
        """Returns the bytes that lie elsewhere, each piece left out: [pieces]."""
        moved = np.where(homes == GONE, 0, self._moving[np.arange(len(homes)), homes])
        return np.asarray(moved.sum() - moved[pieces])
