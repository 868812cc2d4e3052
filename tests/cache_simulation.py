"""Exact simulations of caches on drawn index batches, which estimates of hit rates are held to.

As FBGEMM's cache does, those of batches look up each distinct row of a batch once, and hits are the
rows held at its start.
"""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import product

import numpy as np

from autoshard.workload.access.caches import lfu_hit_rate, lru_hit_rate
from autoshard.workload.arrays import Floats, Ints
from autoshard.workload.tables.table import EmbeddingTable

SKEWS = (0.6, 0.8, 1.0, 1.2, 1.4)
CACHED_SHARES = (0.001, 0.01, 0.1)


def simulated_lru(shares: Floats, rows_cached: int, lookups: int, batches: int) -> float:
    """Hit rate of distinct rows by a cache that evicts the rows of the earliest last batch.

    Rows of the current batch stay. The first half of the batches fills the cache.
    """
    rng = np.random.default_rng(0)
    last, is_held = np.full(len(shares), -1), np.zeros(len(shares), bool)
    hits = distinct = 0
    for number in range(batches):
        rows = np.unique(_drawn(shares, lookups, rng))
        if 2 * number >= batches:
            hits, distinct = hits + is_held[rows].sum(), distinct + len(rows)
        last[rows] = number
        missing = rng.permutation(rows[~is_held[rows]])
        held = rng.permutation(np.flatnonzero(is_held))  # so that ties are broken at random
        evictable = held[last[held] < number]
        too_many = len(held) + len(missing) - rows_cached
        earliest = evictable[np.argsort(last[evictable], kind="stable")][: max(0, too_many)]
        is_held[earliest] = False
        is_held[missing[: rows_cached - len(held) + len(earliest)]] = True
    return float(hits / distinct)


def simulated_lfu(shares: Floats, rows_cached: int, lookups: int, batches: int) -> float:
    """Hit rate of distinct rows by a cache of the rows that were used most often until then.

    Counts begin after twenty times as many lookups.
    """
    rng = np.random.default_rng(0)
    counts = rng.multinomial(20 * batches * lookups, shares)
    hits = distinct = 0
    for _ in range(batches):
        rows, uses = np.unique(_drawn(shares, lookups, rng), return_counts=True)
        is_held = np.zeros(len(shares), bool)
        is_held[np.argpartition(-counts, rows_cached - 1)[:rows_cached]] = True
        hits, distinct = hits + is_held[rows].sum(), distinct + len(rows)
        counts[rows] += uses
    return float(hits / distinct)


def simulated_lru_of_lookups(shares: Floats, rows_cached: int, lookups: int) -> float:
    """Hit rate of single lookups by an LRU cache, in the second half of the lookups."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for number, row in enumerate(_drawn(shares, lookups, np.random.default_rng(0)).tolist()):
        if row in held:
            held.move_to_end(row)
            hits += 2 * number >= lookups
        else:
            held[row] = None
            if len(held) > rows_cached:
                held.popitem(last=False)
    return hits / (lookups / 2)


def differences(
    rows: int, lookups: int, batches: int
) -> Iterator[tuple[str, float, float, float, float]]:
    """Yields eviction, skew, cached share, estimate and simulated hit rate, over the grid.

    Args:
        rows: Rows of the table.
        lookups: Lookups of a batch.
        batches: Simulated batches.
    """
    for skew, cached in product(SKEWS, CACHED_SHARES):
        table = EmbeddingTable("t", rows, 16, 1.0, zipf_alpha=skew)
        shares, count = zipf_shares(rows, skew), round(cached * rows)
        for eviction, estimate, simulated in (
            ("lru", lru_hit_rate, simulated_lru),
            ("lfu", lfu_hit_rate, simulated_lfu),
        ):
            truth = simulated(shares, count, lookups, batches)
            yield eviction, skew, cached, estimate(table, count, lookups), truth


def zipf_shares(rows: int, alpha: float) -> Floats:
    """Share of lookups of each row, the most used first."""
    shares = np.arange(1, rows + 1, dtype=float) ** -alpha
    return np.asarray(shares / shares.sum(), dtype=np.float64)


def _drawn(shares: Floats, lookups: int, rng: np.random.Generator) -> Ints:
    below = np.cumsum(shares)
    rows = np.searchsorted(below, rng.random(lookups) * below[-1], side="right")
    return np.asarray(rows, dtype=np.int64)
