"""Costs with a known answer: a formula that is not additive, and data that follow it."""

from collections.abc import Callable, Sequence

import numpy as np

from autoshard.benchmark import Exchange, Measurement, MeasureSettings, ReferenceLevel, Timing
from autoshard.benchmark.measurement import Directions, ExchangeKey
from autoshard.cost_model import CostDataset, CostModel, Provenance
from autoshard.cost_model.learning.compute_training import train_compute
from autoshard.cost_model.learning.links import fit_links
from autoshard.cost_model.learning.training import TrainOptions
from autoshard.workload import (
    EmbeddingTable,
    OperatorOptions,
    Shard,
    random_exchanges,
    random_shards,
)
from autoshard.workload.access.reuse import spectrum_of
from autoshard.workload.tables.parts import Part

HARDWARE, VERSIONS = "a machine", "libraries"
REFERENCE_LEVEL = ReferenceLevel(0.8, 1.2)
_MIN_ERROR = 0.005


Dearer = Callable[[EmbeddingTable], float]  # what tables cost over what the formula says


def formula_ms(
    shard: Shard, batch_size: int, dearer: Dearer = lambda table: 1.0
) -> tuple[float, float]:
    """Forward and backward: starting costs, work adds up, and tables get in each other's way.

    Each feature has an output; weights have gradients of their own.
    """
    work = rows = weights = 0.0
    for piece in shard.pieces:
        spectrum = spectrum_of(piece.table, batch_size)
        each = spectrum.lookups * piece.width / 2e6 + batch_size * piece.table.features / 4e4
        work += dearer(piece.table) * each
        rows += spectrum.distinct_rows * piece.width / 1e6
        weights += each if piece.table.weighted else 0.0
    crowding = (1 + rows) ** 0.3
    return 0.2 + work * crowding, 0.1 + (1.5 * work + 0.5 * rows + weights) * crowding


def measurement(
    shard: Shard,
    batch_size: int = 1024,
    noise: float = 0.0,
    seed: int = 0,
    dearer: Dearer = lambda table: 1.0,
    operator: OperatorOptions | None = None,
) -> Measurement:
    """As if the formula had been measured, `noise` of it at random."""
    rng = np.random.default_rng([int(shard.digest[:8], 16), seed])
    factor = float(np.exp(noise * rng.standard_normal()))
    forward, backward = formula_ms(shard, batch_size, dearer)
    spread, error = Directions.of(0.01), Directions.of(max(noise, _MIN_ERROR))
    timing = Timing(
        forward * factor, backward * factor, spread, 20, 0, 0.0, 0.1, REFERENCE_LEVEL, error=error
    )
    settings = MeasureSettings(batch_size, operator or OperatorOptions(), seed)
    return Measurement(shard, settings, HARDWARE, VERSIONS, "ok", "d", "n", 1.0 + seed, timing)


def formula_data(
    tables: Sequence[EmbeddingTable], count: int, seed: int = 0, noise: float = 0.02
) -> CostDataset:
    """Random shards and column slices in two batch sizes."""
    half = count // 2
    whole = random_shards(tables, count - half, 20, seed)
    sliced = random_shards(tables, half, 20, seed + 1, augment=True)
    return CostDataset.of(
        measurement(shard, batch_size, noise)
        for batch_size, shards in ((1024, whole), (512, sliced))
        for shard in shards
    )


def formula_exchanges(tables: Sequence[EmbeddingTable], count: int) -> list[Exchange]:
    """All-to-alls in which each rank waits for the largest share."""
    found = []
    for dims in random_exchanges(tables, count, 6):
        ranks, total = len(dims), sum(dims)
        forward = tuple(0.05 * ranks + (max(dims) + dim) * 1e-3 for dim in dims)
        backward = tuple(0.05 * ranks + (total - dim) * 1e-3 for dim in dims)
        key = ExchangeKey(dims, 1024, ranks)
        found.append(Exchange(key, HARDWARE, VERSIONS, forward, backward, 0.01, 20, 1.0))
    return found


def formula_model(parts: dict[Part, CostDataset], exchanges: Sequence[Exchange]) -> CostModel:
    """A small model of the formula: two seconds of training."""
    options = TrainOptions(members=3, steps=300)
    compute, _ = train_compute(parts["train"], parts["validation"], options, seed=0)
    provenance = Provenance(
        HARDWARE, VERSIONS, OperatorOptions(), (512, 1024), len(parts["train"]), REFERENCE_LEVEL
    )
    return CostModel(compute, provenance, fit_links(exchanges))
