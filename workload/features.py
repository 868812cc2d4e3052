"""What a model sees of a table: the 21 published features, and our own."""

from collections.abc import Sequence

import numpy as np

from autoshard.workload.reuse import Floats, spectrum_of
from autoshard.workload.tables import NUM_REUSE_BINS, TableSlice

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


def slice_features(slices: Sequence[TableSlice], batch_size: int) -> Floats:
    """Features of each slice in a batch of that size: [slices, features], named FEATURE_NAMES.

    `looked_up_bytes` counts a row at each of its uses, `touched_bytes` once; both in fp32. Samples
    (`log_batch_size`) count once for each feature of the table: so many outputs it has. A table
    with one feature and without weights has 0 as its `log_features` and `weighted`.
    """
    features = np.empty((len(slices), len(FEATURE_NAMES)))
    for row, piece in zip(features, slices, strict=True):
        table, width = piece.table, piece.width
        spectrum = spectrum_of(table, batch_size)
        size = table.rows * width * _FLOAT_BYTES
        row[:4] = width, table.rows, table.pooling_factor, size / 1e9
        row[4:21] = spectrum.bins()
        row_bytes = width * _FLOAT_BYTES
        row[21:-2] = np.log1p(
            [
                width,
                table.rows,
                spectrum.lookups,
                spectrum.distinct_rows,
                spectrum.lookups * row_bytes,
                spectrum.distinct_rows * row_bytes,
                size,
                batch_size * table.features,
            ]
        )
        row[-2:] = np.log(table.features), table.weighted
    return features
