"""Random changes of a plan: moves, swaps, splits and joins."""

import numpy as np

from autoshard.sharders.search.column_plan import Changes, ColumnPlan, stacked
from autoshard.workload.arrays import Floats, Ints

_SHARES = {"move": 0.3, "swap": 0.4, "split": 0.2, "join": 0.1}
_HALVED = 0.5  # share of splits into halves; the others move any part
_PRESSURE = 4.0  # total probability by pressure over that of uniform selection


class Proposer:
    """Samples changes of a plan in its current state.

    Args:
        plan: Plan with more than one device.
        rng: Random generator.
    """

    def __init__(self, plan: ColumnPlan, rng: np.random.Generator) -> None:
        self._plan, self._rng = plan, rng
        self._splittable = bool((plan.max_slices > 1).any())

    def draw(self, count: int, pressure: Floats) -> Changes:
        """Samples at most `count` changes, more of devices with a high pressure, [devices]."""
        tables, devices = self._plan.widths.nonzero()
        weights = np.cumsum(1 + _PRESSURE * len(tables) * (pressure / pressure.sum())[devices])
        draws = self._rng.random(count) * weights[-1]
        parts = np.minimum(np.searchsorted(weights, draws, side="right"), len(tables) - 1)
        shares = np.array(list(_SHARES.values()))
        ends = np.cumsum(np.floor(shares / shares.sum() * count).astype(int))[:-1]
        move, swap, split, join = np.split(parts, ends)
        changes = [self._moves(tables[move], devices[move])]
        changes.append(self._swaps(tables, devices, swap))
        if self._splittable:
            changes.append(self._splits(tables[split], devices[split]))
            changes.append(self._joins(tables, devices, len(join)))
        found = stacked(changes)
        return found.chosen(self._rng.permutation(len(found)))

    def _elsewhere(self, devices: Ints) -> Ints:
        others = self._rng.integers(self._plan.devices - 1, size=len(devices))
        return np.asarray(others + (others >= devices))

    def _moves(self, tables: Ints, devices: Ints, targets: Ints | None = None) -> Changes:
        """Moves pieces to other devices, where they join pieces of the same table."""
        targets = self._elsewhere(devices) if targets is None else targets
        widths = self._plan.widths
        gets = widths[tables, devices] + widths[tables, targets]
        return _of_one(devices, targets, tables, np.zeros_like(gets), gets)

    def _splits(self, tables: Ints, devices: Ints) -> Changes:
        """Moves halves or random parts of pieces to other devices."""
        widths = self._plan.widths
        held = widths[tables, devices]
        wide = (held > 1) & (self._plan.max_slices[tables] > 1)
        tables, devices, held = tables[wide], devices[wide], held[wide]
        targets = self._elsewhere(devices)
        any_part = 1 + (self._rng.random(len(held)) * (held - 1)).astype(np.int64)
        goes = np.where(self._rng.random(len(held)) < _HALVED, held - held // 2, any_part)
        return _of_one(devices, targets, tables, held - goes, widths[tables, targets] + goes)

    def _joins(self, tables: Ints, devices: Ints, count: int) -> Changes:
        """Moves pieces to devices with another piece of the same table."""
        several = np.flatnonzero(self._plan.parts[tables] > 1)
        if not len(several):
            return self._moves(tables[:0], devices[:0])
        shuffled = self._rng.permutation(several)
        by_table = shuffled[np.argsort(tables[shuffled], kind="stable")]
        owners = tables[by_table]
        following = np.roll(by_table, -1)  # in a cycle over the pieces of each table
        ends = np.flatnonzero(owners != np.roll(owners, -1))
        following[ends] = by_table[np.concatenate([[0], ends[:-1] + 1])[: len(ends)]]
        chosen = self._rng.integers(len(by_table), size=min(count, len(by_table)))
        here, there = by_table[chosen], following[chosen]
        return self._moves(tables[here], devices[here], devices[there])

    def _swaps(self, tables: Ints, devices: Ints, parts: Ints) -> Changes:
        """Swaps pieces of two tables, unless a device has both tables."""
        widths = self._plan.widths
        others = self._rng.integers(len(tables), size=len(parts))
        table, other = tables[parts], tables[others]
        first, second = devices[parts], devices[others]
        apart = (first != second) & (widths[table, second] == 0) & (widths[other, first] == 0)
        table, other, first, second = (rows[apart] for rows in (table, other, first, second))
        nothing = np.zeros_like(table)
        return Changes(
            first, second, table, nothing, widths[table, first],
            other, widths[other, second],
        )  # fmt: skip


def _of_one(first: Ints, second: Ints, table: Ints, keeps: Ints, gets: Ints) -> Changes:
    nothing = np.zeros_like(table)
    return Changes(first, second, table, keeps, gets, nothing - 1, nothing)
