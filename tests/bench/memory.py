"""Slower memory: estimated hit rates beside simulated ones, and what is read from it by a choice.

The pool has the published lookups, distinct rows and reuse of dlrm_datasets in sum. How many rows
tables have, and how tables differ, is not published: `synthetic_tables` chooses it. All tables have
the same width, so that bytes and accesses have the same shares.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from cache_simulation import differences

from autoshard.workload import (
    EmbeddingTable,
    OperatorOptions,
    fast_rows,
    slow_share,
    synthetic_tables,
)
from autoshard.workload.access.lookups import lookups_in
from autoshard.workload.access.memory_tiers import even_rows, whole_table_rows
from bench.metric import Metric
from bench.workbench import say

_ROWS = 20_000
_BATCHES = {300: 1_000, 4_096: 300, 16_384: 100}  # lookups of a batch, simulated batches
_TABLES, _BATCH_SIZE, _DIM = 856, 65_536, 64
_BUDGETS = (0.01, 0.05, 0.10)  # of the bytes of all rows
_OPERATOR = OperatorOptions()
_PUBLISHED = Path(__file__).parents[3] / "shared/data/dlrm_datasets/locality_stats_2021.txt"
_OFTEN = "(4, 8]"  # the first bin of rows that count as used often


def slower_memory_metrics() -> list[Metric]:
    """Differences from simulated caches, and shares of accesses to slow memory."""
    return [*_cache_metrics(), *_choice_metrics()]


def _cache_metrics() -> list[Metric]:
    largest: dict[str, float] = {}
    for lookups, batches in _BATCHES.items():
        say(f"caches of {_ROWS:,} rows, batches of {lookups:,} lookups")
        for eviction, _, _, estimate, simulated in differences(_ROWS, lookups, batches):
            largest[eviction] = max(largest.get(eviction, 0.0), abs(estimate - simulated))
    return [
        Metric(
            f"{eviction.upper()} caches: largest difference of estimated and simulated hit rate",
            "at most 0.02",
            difference,
        )
        for eviction, difference in largest.items()
    ]


def _choice_metrics() -> list[Metric]:
    say(f"rows of {_TABLES} tables in fast memory")
    pool = [replace(t, dim=_DIM) for t in synthetic_tables(_TABLES, 0, "full")]
    total = _bytes([table.rows for table in pool])
    metrics = []
    for budget in _BUDGETS:
        for name, share in _shares(pool, budget * total).items():
            label = f"dlrm_datasets, {budget:.0%} of bytes in fast memory: slow accesses, {name}"
            metrics.append(Metric(label, "", share))
    return metrics + _published_metrics(pool)


def _shares(pool: Sequence[EmbeddingTable], budget: float) -> Mapping[str, float]:
    chosen = {
        "our choice": fast_rows(pool, budget, _OPERATOR, _BATCH_SIZE),
        "best even split": even_rows(pool, budget, _OPERATOR),
        "whole tables": whole_table_rows(pool, budget, _OPERATOR),
    }
    return {name: slow_share(pool, rows, _BATCH_SIZE) for name, rows in chosen.items()}


def _published_metrics(pool: Sequence[EmbeddingTable]) -> list[Metric]:
    """Holds the choice to the published histograms, where they are: they need no sizes of tables.

    If tables have only the rows that the batch used, and fast memory has room for as many rows as
    were used more than four times, these rows are the best choice, and their lookups are published.
    """
    if not _PUBLISHED.exists():
        return []
    used, _, lookups = _PUBLISHED.read_text().split("\n\n")[0].partition("Ratio of index")
    often, slow = 1 - _below(used), _below(lookups)
    counts = lookups_in(pool, _BATCH_SIZE).distinct_rows.tolist()
    tables = [replace(t, rows=count) for t, count in zip(pool, counts, strict=True)]
    rows = fast_rows(tables, often * _bytes(counts), _OPERATOR, _BATCH_SIZE)
    label = "dlrm_datasets, rows with more than 4 uses in fast memory: slow accesses"
    return [
        Metric(f"{label}, published", "", slow),
        Metric(f"{label}, our choice", "", slow_share(tables, rows, _BATCH_SIZE)),
    ]


def _below(histogram: str) -> float:
    """Returns the sum of a published histogram below the bin of rows that are used often."""
    bins = re.findall(r"^(\(.*): ([\d.]+)$", histogram, re.MULTILINE)
    names = [name for name, _ in bins]
    return sum(float(share) for _, share in bins[: names.index(_OFTEN)])


def _bytes(rows: Sequence[int]) -> int:
    return _OPERATOR.stored_bytes(sum(rows), _DIM)
