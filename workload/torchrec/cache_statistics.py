"""Access statistics of a table as TorchRec's planner takes them for caches over slower memory."""

import numpy as np
from torchrec.distributed.types import CacheStatistics

from autoshard.workload.errors import UserError
from autoshard.workload.reuse import lookups_of
from autoshard.workload.row_access import curve_ranks
from autoshard.workload.tables import EmbeddingTable

_SIZES = 101


class AccessStatistics(CacheStatistics):  # type: ignore[misc]  # TorchRec has no types
    """Statistics of a profiled table, for `CacheParams(stats=)`.

    As TorchRec counts, a row is looked up once in a batch. The cache holds the most used rows, as
    LFU does in the long run.
    """

    def __init__(self, table: EmbeddingTable) -> None:
        access = table.access
        if access is None or table.reuse_batch_size is None:
            raise UserError(f"table {table.name} has no access statistics: profile its data")
        self._distinct, self._rows = access.distinct_rows, table.rows
        self._ranks = np.concatenate([[0], curve_ranks(table.rows)])
        members = np.diff(self._ranks)
        # Rows between two points of the curve are used alike: the share of them that a batch uses.
        uses = lookups_of(table, table.reuse_batch_size) * np.diff([0.0, *access.curve])
        used = members * -np.expm1(-uses / np.maximum(members, 1))
        self._hits = np.concatenate([[0.0], np.cumsum(used) / used.sum()])

    @property
    def expected_lookups(self) -> float:
        """Distinct rows in a batch."""
        return self._distinct

    def expected_miss_rate(self, clf: float) -> float:
        """Share of a batch's distinct rows outside of the most used `clf` of all rows."""
        return 1 - float(np.interp(clf * self._rows, self._ranks, self._hits))

    @property
    def cacheability(self) -> float:
        """Mean miss rate over all sizes of the cache, over that of uniform accesses."""
        rates = [self.expected_miss_rate(clf) for clf in np.linspace(0, 1, _SIZES).tolist()]
        return min(1.0, 2 * float(np.trapezoid(rates, dx=1 / (_SIZES - 1))))
