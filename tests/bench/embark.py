"""Tables in the manner of EMBark's models: T180, T200 and T510 (RecSys 2024, NVIDIA).

Their names give the numbers of tables. Parameters, columns and mean lookups are as remembered of
NVIDIA's report on the paper, and could not be looked up again. How rows and lookups are spread over
tables, and that rows are used by a Zipf law, is our choice: the report does not say.
"""

from dataclasses import dataclass

import numpy as np

from autoshard.workload import EmbeddingTable

_ROWS_SIGMA, _LOOKUPS_SIGMA = 1.6, 1.0  # of logarithms, as of our synthetic tables
_ZIPF = 1.05
_SEED = 1


@dataclass(frozen=True)
class _Model:
    """A model: its number of tables, parameters, columns that tables may have, mean lookups."""

    tables: int
    parameters: float
    dims: tuple[int, ...]
    lookups: float


_MODELS = {
    "T180": _Model(180, 70e9, (32, 128), 80.0),
    "T200": _Model(200, 100e9, (128,), 20.0),
    "T510": _Model(510, 110e9, (128,), 5.0),
}


def embark_tables(name: str) -> tuple[EmbeddingTable, ...]:
    """Returns the tables of a model, the same each time."""
    model, rng = _MODELS[name], np.random.default_rng(_SEED)
    dims = rng.choice(model.dims, model.tables)
    weights = rng.lognormal(0.0, _ROWS_SIGMA, model.tables)
    rows = weights * model.parameters / (weights @ dims)
    lookups = rng.lognormal(0.0, _LOOKUPS_SIGMA, model.tables)
    lookups = np.maximum(1.0, lookups * model.lookups / lookups.mean())
    return tuple(
        EmbeddingTable(f"t{n}", max(1, int(row)), int(dim), round(float(each), 2), _ZIPF)
        for n, (row, dim, each) in enumerate(zip(rows, dims, lookups, strict=True))
    )
