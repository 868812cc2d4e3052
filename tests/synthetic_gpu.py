"""Measurements of a GPU that does not exist, with other coefficients and effects than the prior's.

It stands in for a measured GPU where models are learned from its shards. Rows of narrow tables
waste a part of each memory transaction, the L2 cache holds so many bytes and no more, small
operators do not fill the GPU, and hot rows make the backward pass wait: the prior knows none of it.
"""

from collections.abc import Sequence

import numpy as np

from autoshard.cost_model import CostDataset
from autoshard.workload import EmbeddingTable, OperatorOptions, Shard
from autoshard.workload.access.lookups import lookups_in
from autoshard.workload.arrays import Floats

HARDWARE = "cuda: NVIDIA H200 sm90, 139 GiB"
_MEMORY, _L2 = 4.8e9 * 0.55, 4.8e9 * 2.2  # bytes per ms
_SECTOR = 64  # bytes that memory moves at least
_L2_BYTES = 35e6
_FILLED_MS = 0.15  # work of a GPU that is half filled
_NOISE = 0.03


def measured(shards: Sequence[Shard], batch_size: int, rng: np.random.Generator) -> CostDataset:
    """Returns shards with what they take on this GPU."""
    true_ms = np.array([_ms([p.table for p in shard.pieces], batch_size) for shard in shards])
    costs_ms = true_ms * np.exp(_NOISE * rng.standard_normal(true_ms.shape))
    return CostDataset(
        shards=tuple(shards),
        batch_sizes=(batch_size,) * len(shards),
        costs_ms=costs_ms,
        errors=np.full(len(shards), _NOISE),
        repeats_ms=tuple((total,) for total in costs_ms.sum(1).tolist()),
        operator=OperatorOptions(),
        hardware=HARDWARE,
        versions="torch 2.13.0",
    )


def random_tables(rng: np.random.Generator, count: int) -> list[EmbeddingTable]:
    """Returns so many tables of all sizes and kinds of access."""
    return [
        EmbeddingTable(
            f"t{number}",
            int(10 ** rng.uniform(3, 7.5)),
            int(rng.integers(2, 64)) * 4,
            round(float(10 ** rng.uniform(0, 1.8)), 2),
            zipf_alpha=round(float(rng.uniform(0, 1.4)), 2),
        )
        for number in range(count)
    ]


def _ms(tables: Sequence[EmbeddingTable], batch_size: int) -> Floats:
    found = lookups_in(tables, batch_size)
    lookups, distinct = found.lookups.astype(float), found.distinct_rows.astype(float)
    dims = np.array([table.dim for table in tables], float)
    rows = np.ceil(4 * dims / _SECTOR) * _SECTOR
    missed = np.minimum(1.0, distinct * rows / _L2_BYTES)  # of repeated lookups
    from_memory = distinct + (lookups - distinct) * 0.3 * missed
    out = 4 * batch_size * dims
    forward = (from_memory * rows + 8 * lookups + out) / _MEMORY + lookups * rows / _L2
    uses = lookups / np.maximum(distinct, 1)
    backward = (
        (2 * distinct * (rows + 8) + 24 * lookups + out) / _MEMORY
        + lookups * rows / _L2 * (1 + 0.2 * np.log2(1 + uses))
        + lookups * 2.0e-7
    )
    passes = np.array([forward.sum(), backward.sum()])
    return passes + _FILLED_MS * (1 - np.exp(-passes / _FILLED_MS)) + np.array([0.02, 0.07])
