"""Hit rates against exact simulations, and rows of fast memory against all choices."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from cache_simulation import (
    CACHED_SHARES,
    SKEWS,
    differences,
    simulated_lru_of_lookups,
    zipf_shares,
)

from autoshard.workload import (
    EmbeddingTable,
    OperatorOptions,
    UserError,
    fast_rows,
    lfu_hit_rate,
    lru_hit_rate,
    slow_share,
    synthetic_tables,
)
from autoshard.workload.access.hot_rows import row_classes
from autoshard.workload.access.memory_tiers import even_rows, whole_table_rows
from autoshard.workload.arrays import Floats
from autoshard.workload.tables.row_access import RowAccess, block_rows, curve_ranks

ROWS = 20_000
OPERATOR = OperatorOptions()
Choice = Callable[[list[EmbeddingTable], float, OperatorOptions], tuple[int, ...]]


def zipf(alpha: float, pooling_factor: float = 1.0) -> EmbeddingTable:
    return EmbeddingTable("zipf", ROWS, 16, pooling_factor, zipf_alpha=alpha)


def profiled(shares: Floats, dim: int = 16, pooling_factor: float = 1.0) -> EmbeddingTable:
    """A table with statistics of rows that get these shares of lookups, the most used first."""
    rows = len(shares)
    blocks = np.add.reduceat(shares, np.arange(0, rows, block_rows(rows)))
    curve = np.cumsum(shares)[curve_ranks(rows) - 1]
    access = RowAccess(tuple(curve), tuple(blocks), 1.0, 10**6, 0.0)
    return EmbeddingTable(f"p{dim}", rows, dim, pooling_factor, access=access)


def stored_bytes(tables: list[EmbeddingTable], rows: tuple[int, ...]) -> int:
    return sum(OPERATOR.stored_bytes(n, t.dim) for t, n in zip(tables, rows, strict=True))


# In 300 lookups, a batch has fewer distinct rows than most caches; in 4,096, it has more.
@pytest.mark.parametrize(("lookups", "batches"), [(300, 300), (4096, 80)])
def test_hit_rates_are_those_of_simulated_caches(lookups: int, batches: int) -> None:
    found = list(differences(ROWS, lookups, batches))
    assert len(found) == 2 * len(SKEWS) * len(CACHED_SHARES)
    for eviction, skew, cached, estimate, simulated in found:
        assert estimate == pytest.approx(simulated, abs=0.02), (eviction, skew, cached)


@pytest.mark.parametrize(("skew", "cached"), product(SKEWS, CACHED_SHARES))
def test_a_batch_of_one_lookup_is_the_usual_lru_cache(skew: float, cached: float) -> None:
    count = round(cached * ROWS)
    simulated = simulated_lru_of_lookups(zipf_shares(ROWS, skew), count, 100_000)
    assert lru_hit_rate(zipf(skew), count, 1) == pytest.approx(simulated, abs=0.02)


def test_a_row_counts_once_in_a_batch() -> None:
    """One row gets half of the lookups, and each of 100 others 0.5 %."""
    table = profiled(np.array([0.5, *[0.005] * 100]))
    assert lfu_hit_rate(table, 1, 1) == pytest.approx(0.5)
    others = 100 * (1 - 0.995**1000)
    assert lfu_hit_rate(table, 1, 1000) == pytest.approx(1 / (1 + others))
    # That row is in each batch, so it never leaves; the others hardly fit.
    assert lru_hit_rate(table, 1.01, 1000) == pytest.approx(1 / (1 + others), rel=0.02)


@pytest.mark.parametrize("alpha", [0.6, 1.2])
def test_profiles_and_laws_give_the_same_hit_rates(alpha: float) -> None:
    table = profiled(zipf_shares(ROWS, alpha))
    for cached, hit_rate in product((20, 200, 2000), (lru_hit_rate, lfu_hit_rate)):
        expected = hit_rate(zipf(alpha), cached, 1024)
        assert hit_rate(table, cached, 1024) == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("hit_rate", [lru_hit_rate, lfu_hit_rate])
def test_hit_rates_grow_from_nothing_to_all(
    hit_rate: Callable[[EmbeddingTable, float, int], float],
) -> None:
    (binned,) = synthetic_tables(1, 3, "small")
    for table in (zipf(0.0, 3.0), zipf(1.3, 3.0), binned):
        sizes = np.linspace(0, table.rows, 40)
        rates = [hit_rate(table, size, 256) for size in sizes]
        assert rates[0] == 0
        assert rates[-1] == pytest.approx(1)
        assert (np.diff(rates) > -1e-9).all()
    assert hit_rate(EmbeddingTable("one", 1, 4, 1.0), 1, 8) == 1
    assert hit_rate(zipf(1.0, 0.0), 5, 8) in (0, 1)  # no lookups: nothing hits, nothing misses


def test_uniform_rows_are_held_as_often_as_there_is_room() -> None:
    for size in (20, 2000, 19_000):
        assert lfu_hit_rate(zipf(0.0), size, 4096) == pytest.approx(size / ROWS)
        assert lru_hit_rate(zipf(0.0), size, 4096) == pytest.approx(size / ROWS)


@pytest.mark.parametrize("rows", [-1, ROWS + 1, float("nan")])
def test_caches_hold_some_of_the_rows(rows: float) -> None:
    for hit_rate in (lru_hit_rate, lfu_hit_rate):
        with pytest.raises(UserError, match=f"table zipf must lie between 0 and {ROWS}, got"):
            hit_rate(zipf(1.0), rows, 64)


@pytest.mark.parametrize("seed", range(6))
def test_no_choice_reads_less_from_slow_memory(seed: int) -> None:
    """Up to the last row that does not fit; with rows of one size, not even that."""
    rng = np.random.default_rng(seed)
    dims = [16, 16, 16] if seed % 2 else [4, 16, 32]
    tables = [
        profiled(np.sort(rng.dirichlet(np.full(6, 0.5)))[::-1], dim, rng.uniform(1, 9))
        for dim in dims
    ]
    read = np.array([table.pooling_factor * table.dim for table in tables])
    largest = max(
        part * row_classes(table, 64)[1].max()
        for part, table in zip(read / read.sum(), tables, strict=True)
    )
    for budget in np.linspace(0, stored_bytes(tables, (6, 6, 6)), 23).tolist():
        found = fast_rows(tables, budget, OPERATOR, 64)
        assert stored_bytes(tables, found) <= budget
        choices = list(product(range(7), repeat=3))
        fitting = [rows for rows in choices if stored_bytes(tables, rows) <= budget]
        least = min(slow_share(tables, rows, 64) for rows in fitting)
        tolerance = 1e-9 if seed % 2 else largest
        assert slow_share(tables, found, 64) <= least + tolerance


def test_a_hot_class_behind_a_cold_one_counts() -> None:
    """A curve whose shares were counted in other data than its ranks need not be concave."""
    odd = profiled(np.array([0.02, 0.9, 0.08]))
    even = replace(profiled(np.array([0.4, 0.3, 0.3])), name="even")
    budget = OPERATOR.stored_bytes(2, 16)
    assert fast_rows([odd, even], budget, OPERATOR, 64) == (2, 0)


@pytest.mark.parametrize("choice", [even_rows, whole_table_rows])
def test_no_usual_choice_reads_less(choice: Choice) -> None:
    tables = [*synthetic_tables(20, 1, "small"), zipf(1.1, 9.0)]
    total = stored_bytes(tables, tuple(table.rows for table in tables))
    for share in (0.0, 0.01, 0.1, 0.5, 1.0):
        ours = fast_rows(tables, share * total, OPERATOR, 1024)
        other = choice(tables, share * total, OPERATOR)
        assert stored_bytes(tables, ours) <= share * total
        assert stored_bytes(tables, other) <= share * total
        assert slow_share(tables, ours, 1024) <= slow_share(tables, other, 1024) + 1e-6
        assert all(0 <= n <= table.rows for n, table in zip(other, tables, strict=True))
    assert slow_share(tables, ours, 1024) == pytest.approx(0)


def test_usual_choices_by_hand() -> None:
    wide = EmbeddingTable("wide", 100, 32, 1.0)
    narrow = EmbeddingTable("narrow", 200, 4, 1.0)
    tables = [wide, narrow]
    total = stored_bytes(tables, (100, 200))
    assert even_rows(tables, total / 4, OPERATOR) == (25, 50)
    # The wide table reads 32 numbers a lookup from 13,200 bytes, the narrow one 4 from 4,000.
    assert whole_table_rows(tables, total - 1, OPERATOR) == (100, 0)
    assert whole_table_rows(tables, 13_000, OPERATOR) == (0, 200)
    assert slow_share(tables, (100, 0), 64) == pytest.approx(4 / 36)
    assert slow_share(tables, (0, 50), 64) == pytest.approx((32 + 3) / 36)
    assert slow_share([replace(wide, pooling_factor=0.0)], (0,), 64) == 0


def test_budgets_are_numbers_of_bytes() -> None:
    assert fast_rows([], 10, OPERATOR, 64) == ()
    for budget in (-1, float("nan"), float("inf")):
        for refused in (
            lambda budget: fast_rows([zipf(1.0)], budget, OPERATOR, 64),
            lambda budget: even_rows([zipf(1.0)], budget, OPERATOR),
            lambda budget: whole_table_rows([zipf(1.0)], budget, OPERATOR),
        ):
            with pytest.raises(UserError, match="budget_bytes: must be a number of at least 0"):
                refused(budget)
