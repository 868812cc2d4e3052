"""Hit rates of caches that hold some rows of a table in fast memory, the others being in slower.

FBGEMM's cache over unified memory looks up each *distinct* row of a batch once, before the batch is
computed, however often the batch uses the row. Hit rates here are therefore the share of a batch's
distinct rows that the cache holds at its start. Of the rows that are missing, all come in that find
room: rows of the current batch are not evicted. A batch of one lookup gives the hit rate of single
lookups.

Lookups are taken to be independent of each other, with the frequencies of `row_classes`. Caches are
taken to be fully associative, where FBGEMM's has sets of 32 rows, and to have run for a long time.
"""

import math
from collections.abc import Callable

import numpy as np

from autoshard.workload.access.hot_rows import row_classes
from autoshard.workload.access.reuse import lookups_of
from autoshard.workload.arrays import Floats
from autoshard.workload.errors import FieldError
from autoshard.workload.tables.table import EmbeddingTable

_BISECTIONS = 60
_SURE = 1 - 2.0**-53  # the largest probability whose logarithm of the rest is finite


def lfu_hit_rate(table: EmbeddingTable, rows_cached: float, batch_size: int) -> float:
    """Returns the share of a batch's distinct rows that a cache of the most used rows holds.

    Such is the cache that evicts the least frequently used row, in the long run.

    Args:
        table: The table.
        rows_cached: Rows that the cache has room for, 0 to all.
        batch_size: Samples of a batch.
    """
    _check_cached(table, rows_cached)
    distinct, hits = lfu_hits(table, np.array([rows_cached]), batch_size)
    return min(1.0, float(hits[0]) / distinct) if distinct else 0.0


def lfu_hits(table: EmbeddingTable, rows_cached: Floats, batch_size: int) -> tuple[float, Floats]:
    """Returns the distinct rows of a batch, and how many of them caches of the most used rows hold.

    Args:
        table: The table.
        rows_cached: Rows that each cache has room for, [caches].
        batch_size: Samples of a batch.
    """
    rows, used = _used_in_batch(table, batch_size)
    before = np.cumsum(rows) - rows
    held = np.clip(rows_cached[:, None] - before, 0.0, rows)  # [caches, classes]
    return float(rows @ used), np.asarray(held @ used)


def lru_hit_rate(table: EmbeddingTable, rows_cached: float, batch_size: int) -> float:
    """Returns the share of a batch's distinct rows that a cache of the last used rows holds.

    Che's approximation, for batches: a row is held if it was used within the last T batches, where
    T is such that the expected number of such rows fills the cache. If the cache has less room than
    a batch has distinct rows, the rows that hit stay, and of the others a random part comes in.

    Args:
        table: The table.
        rows_cached: Rows that the cache has room for, 0 to all.
        batch_size: Samples of a batch.
    """
    _check_cached(table, rows_cached)
    rows, used = _used_in_batch(table, batch_size)
    if rows_cached == 0:
        return 0.0
    if rows_cached >= rows[used > 0].sum():
        return 1.0

    def in_last(batches: float) -> Floats:
        """Returns the probability that a row was used in the last batches, the oldest in part."""
        whole = math.floor(batches)
        unused = np.exp(whole * np.log1p(-used)) * (1 - (batches - whole) * used)
        return np.asarray(1 - unused, dtype=np.float64)

    def with_part(inserted: float) -> Floats:
        """Returns the probability of being held if this share of missing rows comes in.

        It is the c for which c = used * (c + (1 - c) * inserted).
        """
        return used * inserted / (1 - used * (1 - inserted))

    if rows_cached < rows @ used:
        held = with_part(_solve(lambda part: float(rows @ with_part(part)), rows_cached, 0.0, 1.0))
    else:
        longest = 1.0
        while rows @ in_last(longest) < rows_cached and longest < 2.0**_BISECTIONS:
            longest *= 2
        within = _solve(lambda last: float(rows @ in_last(last)), rows_cached, 1.0, longest)
        held = in_last(within)
    return _hit_rate(rows, used, held)


def _used_in_batch(table: EmbeddingTable, batch_size: int) -> tuple[Floats, Floats]:
    """Returns rows of each class, and the probability that a batch uses one of them, [classes]."""
    rows, share = row_classes(table, batch_size)
    lookups = lookups_of(table, batch_size)
    used = -np.expm1(lookups * np.log1p(-np.minimum(share, _SURE)))
    return rows, np.minimum(used, _SURE)


def _hit_rate(rows: Floats, used: Floats, held: Floats) -> float:
    distinct, hits = float(rows @ used), float((rows * used) @ held)
    return min(1.0, hits / distinct) if distinct else 0.0


def _solve(size: Callable[[float], float], target: float, low: float, high: float) -> float:
    """Returns where an increasing function has the target value, by bisection."""
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if size(middle) < target else (low, middle)
    return high


def _check_cached(table: EmbeddingTable, rows_cached: float) -> None:
    if not 0 <= rows_cached <= table.rows:
        raise FieldError(
            "rows_cached",
            f"of table {table.name} must lie between 0 and {table.rows}, got {rows_cached}",
        )
