"""What a model sees of a table: the 21 published features, and our own."""

from collections.abc import Sequence

import numpy as np

from autoshard.workload.lookups import lookups_in
from autoshard.workload.reuse import Floats
from autoshard.workload.tables import NUM_REUSE_BINS, Piece

# AutoShard's and DreamShard's: size is in GB of fp32 weights.
PUBLISHED_FEATURES = (
    "dim",
    "rows",
    "pooling_factor",
    "size_gb",
    *(f"reuse_{number}" for number in range(NUM_REUSE_BINS)),
)
OWN_FEATURES = (
    "log_dim",
    "log_rows",
    "log_lookups",
    "log_distinct_rows",
    "log_looked_up_bytes",
    "log_touched_bytes",
    "log_size_bytes",
    "log_batch_size",
    "log_features",
    "weighted",
)
FEATURE_NAMES = PUBLISHED_FEATURES + OWN_FEATURES

_FLOAT_BYTES = 4


def piece_features(pieces: Sequence[Piece], batch_size: int) -> Floats:
    """Features of each slice in a batch of that size: [slices, features], named FEATURE_NAMES.

    `looked_up_bytes` counts a row at each of its uses, `touched_bytes` once; both in fp32. Samples
    (`log_batch_size`) count once for each feature of the table: so many outputs it has. A table
    with one feature and without weights has 0 as its `log_features` and `weighted`.
    """
    tables = list({id(piece.table): piece.table for piece in pieces}.values())
    numbers = {id(table): number for number, table in enumerate(tables)}
    of = np.array([numbers[id(piece.table)] for piece in pieces], np.int64)
    widths = np.array([piece.width for piece in pieces], float)
    rows, pooling, features, weighted = (
        np.array([getattr(table, name) for table in tables], float)[of]
        for name in ("rows", "pooling_factor", "features", "weighted")
    )
    batch = lookups_in(tables, batch_size)
    lookups, distinct = batch.lookups[of].astype(float), batch.distinct_rows[of].astype(float)
    size, row_bytes = rows * widths * _FLOAT_BYTES, widths * _FLOAT_BYTES
    logarithms = np.log1p(
        [
            widths,
            rows,
            lookups,
            distinct,
            lookups * row_bytes,
            distinct * row_bytes,
            size,
            batch_size * features,
        ]
    )
    columns = [widths, rows, pooling, size / 1e9, *batch.bins[of].T, *logarithms]
    return np.stack([*columns, np.log(features), weighted], axis=1)
