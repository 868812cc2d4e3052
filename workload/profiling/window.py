"""Counts of a window of batches, in groups: what the price of a plan depends on, and its noise.

Rows are not counted one by one, as a profile does, so counting takes about as long as sorting each
table's lookups. Batches are what is sampled: lookups of a batch may depend on each other in any
way, and tables, too. So noise is judged by groups of consecutive batches, over all tables together.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from autoshard.workload.access.hot_rows import hot_share
from autoshard.workload.access.reuse import bin_of
from autoshard.workload.arrays import Floats, Ints
from autoshard.workload.errors import UserError
from autoshard.workload.profiling.table_counts import TableBatch
from autoshard.workload.tables.row_access import RowAccess, block_rows, curve_ranks
from autoshard.workload.tables.table import NUM_REUSE_BINS, EmbeddingTable

GROUPS = 20  # of a window: 19 degrees of freedom


class WindowCounts:
    """Counts of consecutive batches of some tables.

    Args:
        tables: The tables as they are known: what is not counted is kept.
        batch_size: Samples of a batch, of all ranks together.
        batches: Batches of the window, at least GROUPS.
        by_rows: Names of tables whose blocks of rows have prices in each group.
        hot_ids: Ids of the rows of tables that a plan copies to all devices.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingTable],
        batch_size: int,
        batches: int,
        by_rows: Collection[str] = (),
        hot_ids: Mapping[str, Ints] | None = None,
    ) -> None:
        if batches < GROUPS:
            raise UserError(f"a window needs at least {GROUPS} batches, got {batches}")
        self._tables, self._batch_size, self.batches = tables, batch_size, batches
        self._hot = {name: np.sort(ids) for name, ids in (hot_ids or {}).items()}
        shape = GROUPS, len(tables)
        self._bins = np.zeros((*shape, NUM_REUSE_BINS), np.int64)
        self._lookups, self._in_hot = np.zeros((2, *shape), np.int64)
        self._samples = np.zeros(GROUPS, np.int64)
        self._blocks = [
            np.zeros((GROUPS if table.name in by_rows else 1, _num_blocks(table)), np.int64)
            for table in tables
        ]
        self.counted = 0

    @property
    def is_full(self) -> bool:
        """Whether all batches of the window are counted."""
        return self.counted == self.batches

    @property
    def has_all_groups(self) -> bool:
        """Whether each group has a batch, which the noise of prices takes."""
        return bool(self._samples.all())

    def add(self, read: Callable[[str], TableBatch]) -> None:
        """Counts a batch of all tables.

        Args:
            read: Returns the lookups of a table in the batch, by its name. One table is held at a
                time.

        Raises:
            UserError: A table has no such row.
        """
        group, samples = self.counted * GROUPS // self.batches, 0
        for number, table in enumerate(self._tables):
            found = read(table.name)
            self._add_table(number, table, found.rows, group)
            samples = len(found.lengths)  # the same for all tables
        self._samples[group] += samples
        self.counted += 1

    def tables(self, group: int | None = None) -> tuple[EmbeddingTable, ...]:
        """Returns the tables as a group of batches uses them; None: as all counted ones do."""
        groups = slice(None) if group is None else slice(group, group + 1)
        samples = max(1, int(self._samples[groups].sum()))
        lookups = self._lookups[groups].sum(0) / samples
        bins = self._bins[groups].sum(0)
        return tuple(
            self._described(number, table, float(lookups[number]), bins[number], group)
            for number, table in enumerate(self._tables)
        )

    def _add_table(self, number: int, table: EmbeddingTable, rows: Ints, group: int) -> None:
        if not len(rows):
            return
        low, high = int(rows.min()), int(rows.max())
        if low < 0 or high >= table.rows:
            wrong = low if low < 0 else high
            raise UserError(
                f"table {table.name}: the batches look up row {wrong} of {table.rows} rows"
            )
        if high < 2**31:
            rows = rows.astype(np.int32, copy=False)  # half the time to sort
        ordered = np.sort(rows)
        ends = np.append(np.flatnonzero(ordered[1:] != ordered[:-1]) + 1, len(ordered))
        uses = np.bincount(np.diff(ends, prepend=0))  # distinct rows by their uses
        known = np.flatnonzero(uses)
        self._bins[group, number] += np.bincount(
            bin_of(known), weights=uses[known], minlength=NUM_REUSE_BINS
        ).astype(np.int64)
        self._lookups[group, number] += len(rows)
        blocks, width = self._blocks[number], block_rows(table.rows).bit_length() - 1
        blocks[group % len(blocks)] += np.bincount(rows >> width, minlength=blocks.shape[1])
        if table.name in self._hot:
            places = np.searchsorted(ordered, self._hot[table.name], "left")
            ends = np.searchsorted(ordered, self._hot[table.name], "right")
            self._in_hot[group, number] += int((ends - places).sum())

    def _described(
        self, number: int, table: EmbeddingTable, pooling: float, bins: Ints, group: int | None
    ) -> EmbeddingTable:
        if not bins.any():
            return replace(table, pooling_factor=0.0, trace=None)
        # What a group's price does not depend on is left as it was, to save time.
        has_access = group is None or len(self._blocks[number]) > 1 or table.name in self._hot
        return replace(
            table,
            pooling_factor=pooling,
            zipf_alpha=None,
            reuse=tuple((bins / bins.sum()).tolist()),
            reuse_batch_size=self._batch_size,
            trace=None,
            access=self._access(number, table, group) if has_access else table.access,
        )

    def _access(self, number: int, table: EmbeddingTable, group: int | None) -> RowAccess:
        blocks = self._blocks[number]
        counted = blocks.sum(0) if group is None else blocks[group % len(blocks)]
        ranks = curve_ranks(table.rows)
        known = table.access
        curve = np.array(
            known.curve if known else [hot_share(table, n, self._batch_size) for n in ranks]
        )
        if table.name in self._hot:
            groups = slice(None) if group is None else group
            hot, lookups = (
                int(each[groups, number].sum()) for each in (self._in_hot, self._lookups)
            )
            curve = _through(curve, ranks, len(self._hot[table.name]), hot / lookups)
        distinct = float(self._bins[:, number].sum()) / max(1, self.counted)
        return RowAccess(
            tuple(curve.tolist()),
            tuple((counted / counted.sum()).tolist()),
            known.coverage if known else min(1.0, distinct / table.rows),
            int(counted.sum()),
            distinct,
        )


def counted_batches(tables: Sequence[EmbeddingTable], batch_size: int) -> float | None:
    """Returns in how many batches the tables were profiled; None unless all were, in such batches.

    Tables without lookups need no profile.
    """
    used = [table for table in tables if table.pooling_factor]
    if not used or any(t.access is None or t.reuse_batch_size != batch_size for t in used):
        return None
    return min(
        table.access.lookups / (table.pooling_factor * batch_size)
        for table in used
        if table.access is not None
    )


def _num_blocks(table: EmbeddingTable) -> int:
    return -(-table.rows // block_rows(table.rows))


def _through(curve: Floats, ranks: Ints, count: int, share: float) -> Floats:
    """Returns the curve stretched so that `count` rows have this share of the lookups."""
    before = float(np.interp(count, ranks, curve))
    if not 0 < before < 1:
        return curve
    within = curve * (share / before)
    beyond = 1 - (1 - curve) * ((1 - share) / (1 - before))
    return np.where(ranks <= count, within, beyond)
