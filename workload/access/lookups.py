"""Lookups, distinct rows and reuse bins of batches, for many tables at once.

The results equal those of each table's spectrum. Most tables do not need it: the spectrum adds only
the uses of rows within their bins, which features do not depend on.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.workload.access.reuse import Access, access_of, spectrum_by, stay_in_bins, whole_rows
from autoshard.workload.arrays import Floats, Ints
from autoshard.workload.tables.table import NUM_REUSE_BINS, EmbeddingTable

_MAX_KNOWN = 2**16  # cached accesses: about 50 MB


@dataclass(frozen=True)
class Lookups:
    """Lookups and distinct rows of each table, and shares of distinct rows in reuse bins, [tables,
    bins].
    """

    lookups: Ints
    distinct_rows: Ints
    bins: Floats


_known: dict[Access, tuple[int, Floats]] = {}  # distinct rows, and their shares in the bins


def lookups_in(tables: Sequence[EmbeddingTable], batch_size: int) -> Lookups:
    """Returns what a batch of `batch_size` samples looks up in each table."""
    accesses = [access_of(table, batch_size) for table in tables]
    new = [access for access in dict.fromkeys(accesses) if access not in _known]
    if len(_known) + len(new) > _MAX_KNOWN:
        _known.clear()
        new = list(dict.fromkeys(accesses))
    _known.update(zip(new, _counted(new), strict=True))
    found = [_known[access] for access in accesses]
    return Lookups(
        np.array([access.lookups for access in accesses], np.int64),
        np.array([distinct for distinct, _ in found], np.int64),
        np.array([bins for _, bins in found]).reshape(len(tables), NUM_REUSE_BINS),
    )


def _counted(accesses: Sequence[Access]) -> list[tuple[int, Floats]]:
    """Returns the distinct rows of each batch, and the share of them in each bin."""
    lookups = np.array([access.lookups for access in accesses], np.int64)
    rows = np.zeros((len(accesses), NUM_REUSE_BINS), np.int64)
    used = np.flatnonzero(lookups)
    if len(used):
        rows[used] = whole_rows([accesses[number] for number in used.tolist()])
    distinct = rows.sum(1)
    bins = rows / np.maximum(distinct, 1)[:, None]
    for number in used[~stay_in_bins(rows[used], lookups[used])].tolist():
        spectrum = spectrum_by(accesses[number])
        distinct[number], bins[number] = spectrum.distinct_rows, spectrum.bins()
    return list(zip(distinct.tolist(), bins, strict=True))
