"""Access statistics of a table as TorchRec's planner takes them for caches over slower memory."""

from typing import Literal, TypeAlias

import numpy as np
from torchrec.distributed.types import CacheStatistics

from autoshard.workload.access.caches import lfu_hit_rate, lru_hit_rate
from autoshard.workload.access.reuse import lookups_of
from autoshard.workload.errors import FieldError, UserError
from autoshard.workload.tables.table import EmbeddingTable

Eviction: TypeAlias = Literal["lfu", "lru"]

_HIT_RATES = {"lfu": lfu_hit_rate, "lru": lru_hit_rate}
_SIZES = 101


class AccessStatistics(CacheStatistics):  # type: ignore[misc]  # TorchRec has no types
    """Statistics of a profiled table, for `CacheParams(stats=)`.

    As TorchRec counts, a row is looked up once in a batch.

    Args:
        table: Table with access statistics.
        eviction: What the cache evicts: the row that was used least frequently (`lfu`, which holds
            the most used rows in the long run) or least recently (`lru`, FBGEMM's default).
    """

    def __init__(self, table: EmbeddingTable, eviction: Eviction = "lfu") -> None:
        if table.access is None or table.reuse_batch_size is None:
            raise UserError(f"table {table.name} has no access statistics: profile its data")
        if eviction not in _HIT_RATES:
            raise FieldError("eviction", f"must be lfu or lru, got {eviction!r}")
        self._table, self._distinct = table, table.access.distinct_rows
        self._eviction, self._curve = eviction, table.access.curve
        self._batch_size, self._hit_rate = table.reuse_batch_size, _HIT_RATES[eviction]

    @property
    def expected_lookups(self) -> float:
        """Distinct rows in a batch."""
        return self._distinct

    def expected_miss_rate(self, clf: float) -> float:
        """Share of a batch's distinct rows that a cache of `clf` of all rows does not hold."""
        return 1 - self._hit_rate(self._table, clf * self._table.rows, self._batch_size)

    def stable_fingerprint(self) -> tuple[object, ...]:
        """Returns name, version and inputs of the statistics, by which TorchRec 1.9 knows a plan
        again.
        """
        lookups = lookups_of(self._table, self._batch_size)
        inputs = (self._eviction, self._table.rows, lookups, self._distinct, *self._curve)
        return ("autoshard.AccessStatistics", 1, *inputs)

    @property
    def cacheability(self) -> float:
        """Mean miss rate over all sizes of the cache, over that of uniform accesses."""
        rates = [self.expected_miss_rate(clf) for clf in np.linspace(0, 1, _SIZES).tolist()]
        return min(1.0, 2 * float(np.trapezoid(rates, dx=1 / (_SIZES - 1))))
