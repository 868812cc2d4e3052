"""Counts the lookups of a model's tables in a few batches."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from autoshard.integration.models.bags import BagTable
from autoshard.workload.access.reuse import histogram
from autoshard.workload.arrays import Ints
from autoshard.workload.errors import UserError
from autoshard.workload.profiling.jagged import features_of, joined_rows

# Maximum number of steps that are counted. Of 10,240 lookups of 100,000 rows by a Zipf law of 1.1,
# one batch puts 0.8 % of rows into other bins than 64 batches do, and four put 0.4 %.
GLOBAL_BATCHES = 4


@dataclass(frozen=True)
class _Joined:
    """The batches of all ranks in one step: rows of each feature, and number of samples."""

    rows: Mapping[str, Ints]
    samples: int


def counted(
    tables: Iterable[BagTable], batches: Iterable[Any], world_size: int
) -> dict[str, dict[str, Any]]:
    """Returns the lookups of each table in these batches, as fields of EmbeddingTable.

    A shard computes the samples of all ranks. So `world_size` consecutive batches are joined before
    rows are counted. At most GLOBAL_BATCHES steps are read from `batches`.
    """
    steps = list(islice(_joined(batches, world_size), GLOBAL_BATCHES))
    if not steps:
        raise UserError(
            f"batches: a step of {world_size} ranks takes {world_size} batches with samples: "
            "give at least as many"
        )
    return {table.name: _use_of(table, steps) for table in tables}


def _joined(batches: Iterable[Any], world_size: int) -> Iterator[_Joined]:
    remaining = iter(batches)
    while True:
        parts = [features_of(batch) for batch in islice(remaining, world_size)]
        samples = sum(part.stride() for part in parts)
        if len(parts) < world_size or not samples:
            return
        yield _Joined(joined_rows(parts), samples)


def _use_of(table: BagTable, steps: Sequence[_Joined]) -> dict[str, Any]:
    uses, lookups, samples = [], 0, 0
    for step in steps:
        missing = [key for key in table.config.feature_names if key not in step.rows]
        if missing:
            raise UserError(
                f"table {table.name}: its feature {missing[0]} is not in the batches, which have "
                f"{', '.join(sorted(step.rows)[:4])}{', ...' if len(step.rows) > 4 else ''}"
            )
        rows = np.concatenate([step.rows[key] for key in table.config.feature_names])
        _check_rows(table, rows)
        uses.append(np.unique(rows, return_counts=True)[1].astype(np.int64))
        lookups += len(rows)
        samples += step.samples
    if not lookups:
        return {"pooling_factor": 0.0}
    return {
        "pooling_factor": lookups / samples,
        "reuse": tuple(histogram(np.concatenate(uses)).tolist()),
        "reuse_batch_size": round(samples / len(steps)),
    }


def _check_rows(table: BagTable, rows: Ints) -> None:
    if len(rows) and not 0 <= rows.min() <= rows.max() < table.config.num_embeddings:
        off = rows.min() if rows.min() < 0 else rows.max()
        raise UserError(
            f"table {table.name}: the batches look up row {off} of "
            f"{', '.join(table.config.feature_names[:4])}, and it has "
            f"{table.config.num_embeddings} rows"
        )
