"""What is counted of one table, and the table that it describes."""

from typing import Any, NamedTuple

import numpy as np

from autoshard.workload.access.reuse import bin_of
from autoshard.workload.arrays import Floats, Ints
from autoshard.workload.errors import UserError
from autoshard.workload.profiling.row_counts import Arrays, CountedRows, RowCounts
from autoshard.workload.tables.row_access import MAX_BLOCKS, RowAccess, block_rows, curve_ranks
from autoshard.workload.tables.table import MAX_ROWS, NUM_REUSE_BINS, EmbeddingTable

_INT32 = 2**31
_HOT_USES = 32  # in the first half of the data: their number is known to a fifth


class TableBatch(NamedTuple):
    """Lookups of a batch in one table.

    Args:
        rows: Rows that are looked up, in any order, [lookups].
        lengths: Lookups of each sample, over all features, [samples].
    """

    rows: Ints
    lengths: Ints


class TableCounts:
    """Counts of one table's lookups.

    Args:
        name: Name of the table, for errors.
        batch_size: Samples of the batches in which reuse is counted. Smaller batches count only as
            long as there is no such batch.
        rows: Rows of the table; None: one more than the highest row looked up.
    """

    def __init__(self, name: str, batch_size: int, rows: int | None = None) -> None:
        self.rows = RowCounts()
        self._name, self._batch_size, self._num_rows = name, batch_size, rows
        self._blocks = np.zeros(MAX_BLOCKS, np.int64)
        self._sums = _Sums()

    def add(self, batch: TableBatch, half: int) -> None:
        """Adds a batch of the first (0) or second (1) half of the data."""
        rows, uses = self._distinct(batch.rows)
        if len(rows):
            self.rows.add(rows, uses, half)
            self._add_to_blocks(rows, uses)
        sums, samples = _Sums(), len(batch.lengths)
        sums.samples = sums.batch_samples = samples
        sums.batches = 1
        sums.lookups[half] = len(batch.rows)
        sums.squares = int((batch.lengths.astype(np.int64) ** 2).sum())
        sums.bins = np.bincount(bin_of(uses), minlength=NUM_REUSE_BINS)
        sums.has_full_batch = samples >= self._batch_size
        self._sums.join(sums)

    def join(self, other: "TableCounts") -> None:
        """Adds the counts of other data."""
        self.rows.join(other.rows)
        self._widen_blocks(other._sums.block_rows)
        other._widen_blocks(self._sums.block_rows)
        self._blocks = self._blocks + other._blocks
        self._sums.join(other._sums)

    def described(self, table: EmbeddingTable | None, dim: int) -> EmbeddingTable:
        """Returns the table with what was counted.

        Args:
            table: What is known of the table; None: it gets `dim` columns and one feature.
            dim: Columns.
        """
        sums, rows = self._sums, self.num_rows
        lookups = self.num_lookups
        usage: dict[str, Any] = {"pooling_factor": lookups / max(sums.samples, 1)}
        if sums.bins.any():
            usage["reuse"] = tuple((sums.bins / sums.bins.sum()).tolist())
            usage["reuse_batch_size"] = round(sums.batch_samples / sums.batches)
        if lookups:
            usage["access"] = self._access(lookups)
        if table is None:
            return EmbeddingTable(self._name, rows, dim, **usage)
        return EmbeddingTable(
            table.name, rows, table.dim, features=table.features, weighted=table.weighted, **usage
        )

    def hot_ids(self, limit: int) -> Ints:
        """Returns the rows that are used most, in the order of use: at most `limit`.

        Rows of a sample are left out, since as hot ones may be missing.
        """
        counted = self.rows.counted()
        uses = np.where(counted.weights > 1, 0, counted.uses.sum(1))
        order = np.argsort(-uses, kind="stable")[:limit]
        return np.asarray(counted.rows[order][uses[order] > 1])

    @property
    def num_rows(self) -> int:
        """Returns the rows of the table."""
        if self._num_rows is not None:
            return self._num_rows
        return max(self._sums.highest_row + 1, 1)

    @property
    def num_samples(self) -> int:
        """Returns the samples that were counted."""
        return self._sums.samples

    @property
    def num_lookups(self) -> int:
        """Returns the lookups that were counted."""
        return int(self._sums.lookups.sum())

    def state(self) -> Arrays:
        """Returns arrays from which `restore` makes the same counts."""
        return {**self.rows.state(), "blocks": self._blocks, **self._sums.state()}

    def restore(self, state: Arrays) -> None:
        """Takes the counts whose `state` this is."""
        self.rows = RowCounts.restored(state)
        self._blocks = state["blocks"]
        self._sums.restore(state)

    def _distinct(self, rows: Ints) -> tuple[Ints, Ints]:
        """Returns distinct rows, in ascending order, and their uses."""
        if not len(rows):
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._check(int(rows.min()), int(rows.max()))
        kind = np.int32 if self._sums.highest_row < _INT32 else np.int64  # half the time to sort
        found, uses = np.unique(rows.astype(kind, copy=False), return_counts=True)
        return found.astype(np.int64), uses

    def _check(self, lowest: int, highest: int) -> None:
        limit = MAX_ROWS if self._num_rows is None else self._num_rows
        if lowest < 0 or highest >= limit:
            off = lowest if lowest < 0 else highest
            raise UserError(f"table {self._name}: the data looks up row {off} of {limit} rows")
        sums = self._sums
        sums.highest_row = max(sums.highest_row, highest)

    def _add_to_blocks(self, rows: Ints, uses: Ints) -> None:
        self._widen_blocks(block_rows(int(rows[-1]) + 1))
        self._blocks += np.bincount(
            rows // self._sums.block_rows, weights=uses, minlength=MAX_BLOCKS
        ).astype(np.int64)

    def _widen_blocks(self, rows: int) -> None:
        """Makes blocks of at least so many rows, a power of two."""
        while self._sums.block_rows < rows:
            self._blocks, self._sums.block_rows = _paired(self._blocks), 2 * self._sums.block_rows

    def _access(self, lookups: int) -> RowAccess:
        sums, rows, counted = self._sums, self.num_rows, self.rows.counted()
        blocks, width = self._blocks, sums.block_rows
        while width < block_rows(rows):
            blocks, width = _paired(blocks), 2 * width
        mean = lookups / sums.samples
        return RowAccess(
            curve=tuple(_curve(counted, sums.lookups, rows).tolist()),
            blocks=tuple((blocks[: -(-rows // width)] / lookups).tolist()),
            coverage=min(1.0, float(counted.weights.sum()) / rows),
            lookups=lookups,
            distinct_rows=float(sums.bins.sum()) / sums.batches,
            pooling_variance=max(0.0, sums.squares / sums.samples - mean**2),
            drift=_drift(counted, sums.lookups),
        )


class _Sums:
    """Plain numbers that are counted of a table."""

    def __init__(self) -> None:
        self.samples = self.squares = 0
        self.highest_row = -1
        self.block_rows = 1
        self.lookups = np.zeros(2, np.int64)  # in each half of the data
        self.has_full_batch = False
        self._start_anew()

    def _start_anew(self) -> None:
        """Forgets the reuse of batches so far."""
        self.batches = self.batch_samples = 0
        self.bins = np.zeros(NUM_REUSE_BINS, np.int64)

    def join(self, other: "_Sums") -> None:
        """Adds those of other batches, apart from blocks. Full batches rule out smaller ones."""
        self.samples += other.samples
        self.squares += other.squares
        self.highest_row = max(self.highest_row, other.highest_row)
        self.lookups = self.lookups + other.lookups
        if other.has_full_batch and not self.has_full_batch:
            self.has_full_batch = True
            self._start_anew()
        if other.has_full_batch == self.has_full_batch:
            self.batches += other.batches
            self.batch_samples += other.batch_samples
            self.bins = self.bins + other.bins

    def state(self) -> Arrays:
        """Returns the numbers as arrays."""
        return {name: np.asarray(value) for name, value in vars(self).items()}

    def restore(self, state: Arrays) -> None:
        """Takes the numbers from arrays."""
        for name in vars(self):
            value = state[name]
            setattr(self, name, value if value.ndim else value.item())


def _paired(blocks: Ints) -> Ints:
    """Returns the counts of blocks of twice as many rows."""
    pairs = blocks.reshape(-1, 2).sum(1)
    return np.concatenate([pairs, np.zeros(len(blocks) - len(pairs), np.int64)])


def _curve(counted: CountedRows, lookups: Ints, rows: int) -> Floats:
    """Returns the share of lookups that the most used rows get, at `curve_ranks(rows)`.

    Rows are ranked by one half of the data and their lookups counted in the other, both ways: what
    is used often by chance is not in the other half.
    """
    ways = [(0, 1), (1, 0)] if lookups.all() else [(int(lookups.argmax()),) * 2]
    found = np.mean([_shares(counted, lookups, rows, *way) for way in ways], axis=0)
    found[-1] = 1.0  # all rows
    return np.asarray(np.minimum(found, 1.0))


def _shares(counted: CountedRows, lookups: Ints, rows: int, ranked: int, judged: int) -> Floats:
    """Returns shares of lookups in the half `judged` of rows that are ranked by half `ranked`."""
    uses = counted.uses[:, judged] * counted.weights
    sampled = counted.weights > 1
    if uses[sampled].any():  # the sample stands for all lookups that are not in held rows
        uses[sampled] *= (lookups[judged] - uses[~sampled].sum()) / uses[sampled].sum()
    # Rows that are used alike in one half are of one rank; those that are not are the last.
    classes, place = np.unique(-counted.uses[:, ranked], return_inverse=True)
    members = np.bincount(place, weights=counted.weights)[classes < 0]
    gained = np.bincount(place, weights=uses)[classes < 0]
    ranks = np.concatenate([[0.0], np.cumsum(members), [max(rows, members.sum())]])
    shares = np.concatenate([[0.0], np.cumsum(gained) / lookups[judged], [1.0]])
    return np.asarray(np.interp(curve_ranks(rows), ranks, shares))


def _drift(counted: CountedRows, lookups: Ints) -> float | None:
    """Returns the share of lookups that hot rows of the first half lost in the second."""
    first, second = counted.uses[:, 0], counted.uses[:, 1]
    # Rows are hot by chance, too. Of Poisson's uses, those of rows with more than n in the first
    # half are in the mean as many as those in the second half of rows with at least n.
    before = counted.weights @ np.where(first > _HOT_USES, first, 0) / max(lookups[0], 1)
    after = counted.weights @ np.where(first >= _HOT_USES, second, 0) / max(lookups[1], 1)
    if not before or not lookups[1]:
        return None
    return float(max(0.0, 1 - after / before))
