"""Which rows of which tables fast memory holds, if the others are read from slower memory.

The choice is fixed, as RecShard's (https://arxiv.org/abs/2201.10095): the most used rows of each
table. Each lookup reads its row where it lies, so time goes by the bytes that lookups read from
slow memory. Other choices under the same budget serve for comparison.
"""

import math
from collections.abc import Sequence

import numpy as np

from autoshard.workload.access.hot_rows import hot_share, row_classes
from autoshard.workload.arrays import Floats
from autoshard.workload.errors import FieldError
from autoshard.workload.tables.operators import OperatorOptions
from autoshard.workload.tables.table import EmbeddingTable


def fast_rows(
    tables: Sequence[EmbeddingTable],
    budget_bytes: float,
    operator: OperatorOptions,
    batch_size: int,
) -> tuple[int, ...]:
    """Returns how many of the most used rows of each table to keep in fast memory, [tables].

    Minimises the bytes that lookups read from slow memory, with weights and optimizer state of
    fast rows within the budget: rows that are read most for their size come first. No choice reads
    less, up to one row.

    Args:
        tables: Tables that share the fast memory.
        budget_bytes: Fast memory for rows.
        operator: Type of the weights and optimizer.
        batch_size: Samples of a batch.
    """
    _check_budget(budget_bytes)
    classes = [_concave(*row_classes(table, batch_size)) for table in tables]
    number = np.repeat(np.arange(len(tables)), [len(rows) for rows, _ in classes])
    rows = np.concatenate([_whole(rows) for rows, _ in classes]) if classes else np.zeros(0)
    share = np.concatenate([share for _, share in classes]) if classes else np.zeros(0)
    row_bytes = _row_bytes(tables, operator)[number]
    order = np.argsort(-share * _columns_read(tables)[number] / row_bytes, kind="stable")
    rows, row_bytes, number = rows[order], row_bytes[order], number[order]
    left = budget_bytes - (np.cumsum(rows * row_bytes) - rows * row_bytes)
    taken = np.clip(left // row_bytes, 0, rows)
    return _counts(tables, np.bincount(number, taken, len(tables)).astype(float))


def even_rows(
    tables: Sequence[EmbeddingTable], budget_bytes: float, operator: OperatorOptions
) -> tuple[int, ...]:
    """Returns rows of each table if the same share of all is in fast memory, [tables]."""
    _check_budget(budget_bytes)
    rows = np.array([table.rows for table in tables], float)
    total = float(rows @ _row_bytes(tables, operator))
    return _counts(tables, np.floor(rows * min(1.0, budget_bytes / max(total, 1.0))))


def whole_table_rows(
    tables: Sequence[EmbeddingTable], budget_bytes: float, operator: OperatorOptions
) -> tuple[int, ...]:
    """Returns rows of each table, none or all, [tables]: those read most for their size first."""
    _check_budget(budget_bytes)
    rows = np.array([table.rows for table in tables], float)
    sizes = rows * _row_bytes(tables, operator)
    found, left = np.zeros(len(tables)), budget_bytes
    for number in np.argsort(-_columns_read(tables) / sizes, kind="stable").tolist():
        if sizes[number] <= left:
            found[number] = rows[number]
            left -= sizes[number]
    return _counts(tables, found)


def slow_share(tables: Sequence[EmbeddingTable], rows: Sequence[int], batch_size: int) -> float:
    """Returns the share of the bytes that lookups read which come from slow memory.

    For tables of the same width it is the share of lookups.

    Args:
        tables: The tables.
        rows: Most used rows of each table in fast memory, [tables].
        batch_size: Samples of a batch.
    """
    read = _columns_read(tables)
    hot = [hot_share(t, count, batch_size) for t, count in zip(tables, rows, strict=True)]
    return float(read @ (1 - np.array(hot)) / read.sum()) if read.sum() else 0.0


def _columns_read(tables: Sequence[EmbeddingTable]) -> Floats:
    """Returns the numbers that lookups of a sample read of each table, [tables]."""
    return np.array([table.pooling_factor * table.dim for table in tables], float)


def _row_bytes(tables: Sequence[EmbeddingTable], operator: OperatorOptions) -> Floats:
    return np.array([operator.stored_bytes(1, table.dim) for table in tables], float)


def _whole(rows: Floats) -> Floats:
    """Returns classes of whole rows, whose ends are the nearest to those of `rows`."""
    return np.diff(np.round(np.cumsum(rows)), prepend=0.0)


def _concave(rows: Floats, share: Floats) -> tuple[Floats, Floats]:
    """Joins classes until none is used more than the one before it.

    Then rows that are read most for their size are also the first ones of their table.
    """
    if (np.diff(share) <= 0).all():
        return rows, share
    joined: list[tuple[float, float]] = []  # rows, and lookups of all of them
    for count, lookups in zip(rows.tolist(), (rows * share).tolist(), strict=True):
        while joined and joined[-1][1] * count < lookups * joined[-1][0]:
            before = joined.pop()
            count, lookups = count + before[0], lookups + before[1]
        joined.append((count, lookups))
    members, uses = np.array(joined).T
    return members, uses / members


def _counts(tables: Sequence[EmbeddingTable], rows: Floats) -> tuple[int, ...]:
    return tuple(min(int(n), table.rows) for n, table in zip(rows, tables, strict=True))


def _check_budget(budget_bytes: float) -> None:
    if not 0 <= budget_bytes < math.inf:
        raise FieldError("budget_bytes", f"must be a number of at least 0, got {budget_bytes}")
