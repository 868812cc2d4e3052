"""How often each row of a table is looked up, exactly while memory lasts and on a sample of rows
after that.

Rows are kept with their counts, in order of row number. When memory runs out, the most used rows
are *held*: they are kept whatever happens to others. Of all other rows, a sample is kept: those
whose hash is below a threshold. Threshold and held rows are halved as often as needed. What is kept
was counted from its first lookup on, so sums over rows are estimated without bias: a held row
counts for itself, any other for as many rows as the sample stands for. A row that becomes hot after
that is kept only if it is in the sample.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from autoshard.workload.arrays import Bools, Floats, Ints

Arrays: TypeAlias = Mapping[str, npt.NDArray[Any]]

_HELD_SHARE = 0.25  # of the kept rows
_MIN_LATER = 2**12  # new rows that are gathered before they are merged
_FULL = 2**64

# The finalizer of SplitMix64.
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


@dataclass(frozen=True)
class CountedRows:
    """Kept rows and their uses.

    Args:
        rows: Row numbers, ascending, [kept].
        uses: Lookups of each in each half of the data, [kept, halves].
        weights: Number of rows that each stands for, [kept].
    """

    rows: Ints
    uses: Ints
    weights: Floats


class RowCounts:
    """Counts of one table's rows in each half of the data."""

    def __init__(self, halves: int = 2) -> None:
        self._rows = np.zeros(0, np.int64)
        self._uses = np.zeros((0, halves), np.int64)
        self._held = np.zeros(0, np.int64)  # ascending
        self._threshold = _FULL
        self._later: list[tuple[Ints, Ints, int]] = []
        self._num_later = 0

    def __len__(self) -> int:
        """Returns the number of kept rows, and of those that are gathered, at most."""
        return len(self._rows) + self._num_later

    @property
    def sampled_share(self) -> float:
        """Returns the share of rows that are kept, apart from those held; 1: counts are exact."""
        return self._threshold / _FULL

    def add(self, rows: Ints, uses: Ints, half: int) -> None:
        """Adds uses of distinct rows, in ascending order."""
        if self._threshold < _FULL:
            kept = self._is_kept(rows)
            rows, uses = rows[kept], uses[kept]
        places = np.searchsorted(self._rows, rows)
        known = _at(self._rows, places) == rows
        self._uses[places[known], half] += uses[known]
        if not known.all():
            new = ~known
            self._later.append((rows[new], uses[new], half))
            self._num_later += int(new.sum())
            if self._num_later > max(_MIN_LATER, len(self._rows)):
                self.merge()

    def thin(self) -> None:
        """Drops about half of the kept rows."""
        self.merge()
        if self._threshold == _FULL:
            candidates, share = np.arange(len(self._rows)), _HELD_SHARE
        else:
            candidates, share = np.searchsorted(self._rows, self._held), 0.5
        count = int(share * len(candidates))
        least_used = np.argsort(self._uses[candidates].sum(1), kind="stable")
        held = np.sort(candidates[least_used[len(candidates) - count :]])
        self._held = self._rows[held]
        self._threshold //= 2
        self._drop_others()

    def join(self, other: "RowCounts") -> None:
        """Adds the counts of other data.

        What is kept was counted in all data: the smaller of both samples, and rows that both held
        or counted exactly.
        """
        self.merge()
        other.merge()
        if other._threshold < _FULL:
            exact = self._threshold == _FULL
            self._held = other._held if exact else np.intersect1d(self._held, other._held)
            self._threshold = min(self._threshold, other._threshold)
            self._drop_others()
        kept = slice(None) if self._threshold == _FULL else self._is_kept(other._rows)
        rows, uses = other._rows[kept], other._uses[kept]
        places = np.searchsorted(self._rows, rows)
        known = _at(self._rows, places) == rows
        self._uses[places[known]] += uses[known]
        self._insert(rows[~known], uses[~known])

    def counted(self) -> CountedRows:
        """Returns all kept rows."""
        self.merge()
        weights = np.full(len(self._rows), 1 / self.sampled_share)
        weights[_is_in(self._rows, self._held)] = 1.0
        return CountedRows(self._rows, self._uses, weights)

    def state(self) -> Arrays:
        """Returns arrays from which `restored` makes the same counts."""
        self.merge()
        sampling = np.array([self._threshold - 1], np.uint64)  # 2^64 itself does not fit
        return {"rows": self._rows, "uses": self._uses, "held": self._held, "sampling": sampling}

    @staticmethod
    def restored(state: Arrays) -> "RowCounts":
        """Returns the counts whose `state` this is."""
        counts = RowCounts()
        counts._rows, counts._uses = state["rows"], state["uses"]
        counts._held, counts._threshold = state["held"], int(state["sampling"][0]) + 1
        return counts

    def _is_kept(self, rows: Ints) -> Bools:
        """Returns which rows are in the sample, or held."""
        kept = np.asarray(_hash(rows) <= np.uint64(self._threshold - 1))
        others = np.flatnonzero(~kept)
        kept[others] = _is_in(rows[others], self._held)
        return kept

    def _drop_others(self) -> None:
        kept = self._is_kept(self._rows)
        self._rows, self._uses = self._rows[kept], self._uses[kept]

    def merge(self) -> None:
        """Joins rows that were gathered since the last time; one may have been gathered often."""
        if not self._later:
            return
        halves = self._uses.shape[1]
        rows = np.concatenate([rows for rows, _, _ in self._later])
        distinct, places = np.unique(rows, return_inverse=True)
        uses = np.zeros((len(distinct), halves), np.int64)
        first = 0
        for part, added, half in self._later:  # rows of a part are distinct
            uses[places[first : first + len(part)], half] += added
            first += len(part)
        self._insert(distinct, uses)
        self._later, self._num_later = [], 0

    def _insert(self, rows: Ints, uses: Ints) -> None:
        """Adds rows that are not there yet, in ascending order."""
        new = np.searchsorted(self._rows, rows) + np.arange(len(rows))
        old = np.ones(len(self._rows) + len(new), bool)
        old[new] = False
        all_rows = np.empty(len(old), np.int64)
        all_uses = np.empty((len(old), uses.shape[1]), np.int64)
        all_rows[new], all_rows[old] = rows, self._rows
        all_uses[new], all_uses[old] = uses, self._uses
        self._rows, self._uses = all_rows, all_uses


def _is_in(rows: Ints, ordered: Ints) -> Bools:
    """Returns which rows are among those of an ascending array."""
    return np.asarray(_at(ordered, np.searchsorted(ordered, rows)) == rows)


def _at(ordered: Ints, places: Ints) -> Ints:
    """Returns the entries at places, -1 beyond the end."""
    if not len(ordered):
        return np.full(len(places), -1, np.int64)
    return np.where(places < len(ordered), ordered[np.minimum(places, len(ordered) - 1)], -1)


def _hash(rows: Ints) -> npt.NDArray[np.uint64]:
    mixed = rows.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in _MIX:
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))
