"""Hot and cold rows: the most used rows of a table on all devices, the others sharded.

A table with hot rows is two tables: a small one of its hot rows, of which each device has a copy,
and one of its cold rows, which lies like any other. The pooled outputs of both are added, which is
exact for sums. Cold rows are numbered by a hash of their ids, so that even blocks of them are used
alike, whatever the order of ids. With no hot rows, all rows are numbered so.
"""

from dataclasses import replace
from functools import lru_cache

import numpy as np

from autoshard.workload.access.reuse import histogram, popularity, spectrum_of
from autoshard.workload.arrays import Floats
from autoshard.workload.errors import FieldError
from autoshard.workload.tables.row_access import curve_ranks
from autoshard.workload.tables.table import EmbeddingTable, hot_name

_OFTEN = 4  # uses in a batch from which on a row is known to be used more than others
_MAX_KNOWN = 2**12  # tables


def hot_share(table: EmbeddingTable, count: int, batch_size: int) -> float:
    """Returns the share of lookups that the `count` most used rows of a table get.

    It is known from a profile (`EmbeddingTable.access`), or follows from the Zipf law. From reuse
    bins it is estimated: rows that a batch uses often are taken to be always used as often, and all
    others alike.

    Args:
        table: The table.
        count: Number of rows.
        batch_size: Samples of a batch.
    """
    if table.access is not None:
        return table.access.hottest(table.rows, count)
    ranks, shares = _curve(table, batch_size)
    return float(np.interp(count, ranks, shares))


def row_classes(table: EmbeddingTable, batch_size: int) -> tuple[Floats, Floats]:
    """Returns classes of a table's rows that are used alike, the most used rows first.

    They are known or estimated as in `hot_share`. Those of a profile may be out of order, as ranks
    come from one half of the data and shares from the other.

    Returns:
        Number of rows in each class, and the share of lookups that one of them gets, [classes].
    """
    if table.access is not None:
        ranks = np.append(0.0, curve_ranks(table.rows))
        shares = np.append(0.0, table.access.curve)
    else:
        ranks, shares = _curve(table, batch_size)
    members = np.diff(ranks)
    several = members > 0  # small tables have fewer rows than a curve has points
    return members[several], np.maximum(np.diff(shares)[several], 0.0) / members[several]


@lru_cache(_MAX_KNOWN)
def _curve(table: EmbeddingTable, batch_size: int) -> tuple[Floats, Floats]:
    """Returns numbers of rows, and the share of lookups that so many most used rows get."""
    if table.reuse is None:
        members, rates = popularity(table.rows, table.zipf_alpha or 0.0)
    else:
        spectrum = spectrum_of(table, batch_size)
        often = spectrum.uses > _OFTEN
        members, rates = spectrum.rows[often].astype(float), spectrum.uses[often].astype(float)
        order = np.argsort(-rates)
        others = table.rows - members.sum()
        left = spectrum.lookups - members @ rates
        members = np.append(members[order], max(others, 1.0))
        rates = np.append(rates[order], left / max(others, 1.0))
    lookups = np.cumsum(members * rates)
    shares = lookups / max(lookups[-1], np.finfo(float).tiny)
    return np.append(0.0, np.cumsum(members)), np.append(0.0, shares)


def cold_rows(table: EmbeddingTable, count: int, batch_size: int) -> EmbeddingTable:
    """Returns a table's cold rows as a table of the same name; all its rows if none are hot.

    Args:
        table: The table.
        count: Number of hot rows.
        batch_size: Samples of a batch, for which reuse of cold rows is given.
    """
    return hot_and_cold(table, count, batch_size)[1] if count else replace(table, access=None)


def hot_and_cold(
    table: EmbeddingTable, count: int, batch_size: int
) -> tuple[EmbeddingTable, EmbeddingTable]:
    """Returns a table's hot rows and its cold rows, each as a table of its own.

    That of cold rows keeps the table's name, so that a plan says where they are.

    Args:
        table: The table.
        count: Number of hot rows, at least 1.
        batch_size: Samples of a batch, for which reuse of cold rows is given.
    """
    if not 0 < count < table.rows:
        raise FieldError(
            "hot_rows",
            f"of table {table.name} must lie between 1 and {table.rows - 1}, got {count}",
        )
    return _parts(table, count, batch_size, hot_share(table, count, batch_size))


@lru_cache(_MAX_KNOWN)
def _parts(
    table: EmbeddingTable, count: int, batch_size: int, share: float
) -> tuple[EmbeddingTable, EmbeddingTable]:
    """Returns `hot_and_cold`; tables that differ in `access` alone are equal."""
    alike = replace(table, trace=None, access=None)
    spectrum = spectrum_of(table, batch_size)
    order = np.argsort(-spectrum.uses, kind="stable")
    uses, rows = spectrum.uses[order], spectrum.rows[order]
    cold = np.cumsum(uses * rows) > share * spectrum.lookups
    reuse = histogram(uses[cold], rows[cold]) if cold.any() else None
    hot = replace(
        alike, name=hot_name(table.name), rows=count, pooling_factor=table.pooling_factor * share
    )
    rest = replace(
        alike,
        rows=table.rows - count,
        pooling_factor=table.pooling_factor * (1 - share),
        zipf_alpha=None if reuse is not None else alike.zipf_alpha,
        reuse=None if reuse is None else tuple(reuse.tolist()),
        reuse_batch_size=None if reuse is None else batch_size,
    )
    return hot, rest
