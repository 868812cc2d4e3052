"""Numbers that describe a piece: input features of cost models, and published cost proxies.

Features are the 21 published ones, and our own.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from autoshard.workload.access.lookups import lookups_in
from autoshard.workload.arrays import Floats
from autoshard.workload.tables.table import NUM_REUSE_BINS, Piece

# What the published heuristics balance, in any unit.
COST_PROXIES: dict[str, Callable[[Piece], float]] = {
    "dim": lambda piece: piece.width,
    "size": lambda piece: piece.width * piece.table.rows,
    "lookup": lambda piece: piece.width * piece.table.pooling_factor,
    "size_lookup": lambda piece: (
        piece.width * piece.table.pooling_factor * math.log(piece.table.rows + 1)
    ),
}
# Those of AutoShard and DreamShard; the size is in GB of fp32 weights.
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
    """Returns the features of each piece, [pieces, features], named by FEATURE_NAMES.

    `looked_up_bytes` counts a row at each use, `touched_bytes` once; both in fp32.
    `log_batch_size` counts a sample once for each feature of the table, as the operator's outputs
    do. `log_features` and `weighted` are 0 for a table with one feature and without weights.
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
