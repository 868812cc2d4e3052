"""What batches' lookups in many tables come to: all that features tell of them.

The same as by each table's spectrum. Mostly that need not be found: only how often rows are used
inside of their bins is left to find, and features do not tell it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.workload.reuse import (
    Access,
    Floats,
    Whole,
    access_of,
    spectrum_by,
    stay_in_bins,
    whole_rows,
)
from autoshard.workload.tables import NUM_REUSE_BINS, EmbeddingTable

_MAX_KNOWN = 2**16  # ways to look rows up that are remembered: about 50 MB


@dataclass(frozen=True)
class Lookups:
    """Of each table's batch: how many lookups, in how many distinct rows, and the share of these
    in each of the 17 reuse bins [tables, bins].
    """

    lookups: Whole
    distinct_rows: Whole
    bins: Floats


_known: dict[Access, tuple[int, Floats]] = {}  # distinct rows, and their shares in the bins


def lookups_in(tables: Sequence[EmbeddingTable], batch_size: int) -> Lookups:
    """What a batch of `batch_size` samples looks up in each of these tables."""
    accesses = [access_of(table, batch_size) for table in tables]
    new = [access for access in dict.fromkeys(accesses) if access not in _known]
    if len(_known) + len(new) > _MAX_KNOWN:
        _known.clear()
        new = list(dict.fromkeys(accesses))
    _known.update(zip(new, _found(new), strict=True))
    found = [_known[access] for access in accesses]
    return Lookups(
        np.array([access.lookups for access in accesses], np.int64),
        np.array([distinct for distinct, _ in found], np.int64),
        np.array([bins for _, bins in found]).reshape(len(tables), NUM_REUSE_BINS),
    )


def _found(accesses: Sequence[Access]) -> list[tuple[int, Floats]]:
    """Distinct rows of each batch, and the share of them in each bin."""
    lookups = np.array([access.lookups for access in accesses], np.int64)
    rows = np.zeros((len(accesses), NUM_REUSE_BINS), np.int64)
    some = np.flatnonzero(lookups)
    if len(some):
        rows[some] = whole_rows([accesses[number] for number in some.tolist()])
    distinct = rows.sum(1)
    bins = rows / np.maximum(distinct, 1)[:, None]
    for number in some[~stay_in_bins(rows[some], lookups[some])].tolist():
        spectrum = spectrum_by(accesses[number])
        distinct[number], bins[number] = spectrum.distinct_rows, spectrum.bins()
    return list(zip(distinct.tolist(), bins, strict=True))
