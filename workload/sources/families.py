"""Table families: published workloads, and tables drawn from ranges.

Results for one family need not hold for another. Cost models are therefore trained on a wide range
and tested on families that training does not use.

For workloads, rows, dims and lookups per sample are published, but not the reuse of rows. MLPerf
draws rows uniformly, and Criteo's categories are known to be very skewed. `scale` divides the rows,
for machines with less memory than the workload requires.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle

import numpy as np

from autoshard.workload import documents
from autoshard.workload.access.reuse import UPPER
from autoshard.workload.arrays import Floats
from autoshard.workload.errors import UserError
from autoshard.workload.sources.synthetic import check_count, published_reuse
from autoshard.workload.tables.table import DIM_STEP, NUM_REUSE_BINS, EmbeddingTable

# Criteo Kaggle data set: https://ailab.criteo.com/ressources (counted by DLRM).
_CRITEO_ROWS = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992,
    5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
_CRITEO_ZIPF = 1.05  # our estimate: the top category of a feature has 10 to 50 % of its lookups

# MLPerf training, DLRM-DCNv2: https://github.com/mlcommons/training/tree/master/recommendation_v2
_MLPERF_ROWS = (
    40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10, 2209,
    11938, 155, 4, 976, 14, 40000000, 40000000, 40000000, 590152, 12973, 108, 36,
)  # fmt: skip
_MLPERF_LOOKUPS = (
    3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1,
)  # fmt: skip

_PUBLISHED_BATCH = 65_536  # samples of the batch in which the published reuse was counted
_MAX_REDUCTION = 64  # reduction of that batch, for tables whose reuse was counted in a smaller one
_TILT = 0.4  # maximum slope of the log factor per reuse bin
# Variations: standard deviations of log rows and log lookups, and the range of Zipf exponents.
_VARIED_ROWS, _VARIED_LOOKUPS, _VARIED_ZIPF = 0.5, 0.4, (0.0, 1.2)
_SKEWED_ZIPF = (0.9, 1.4)
_SEED_STEP = 1_000_003  # between the ranges of a mixture
_MAX_BYTES = 2**32  # size of a table's fp32 weights; larger tables get fewer rows


@dataclass(frozen=True)
class Workload:
    """The tables of a published model."""

    rows: tuple[int, ...]
    lookups: tuple[int, ...]
    dim: int
    zipf_alpha: float

    def tables(self, scale: int) -> tuple[EmbeddingTable, ...]:
        """Returns the tables with their rows divided by `scale`."""
        return tuple(
            EmbeddingTable(
                name=f"c{number:02d}",
                rows=max(1, rows // scale),
                dim=self.dim,
                pooling_factor=float(lookups),
                zipf_alpha=self.zipf_alpha,
            )
            for number, (rows, lookups) in enumerate(zip(self.rows, self.lookups, strict=True))
        )

    def varied(
        self, rng: np.random.Generator, zipf_alpha: tuple[float, float]
    ) -> Iterator[EmbeddingTable]:
        """Yields random variations of the tables, all with the same name."""
        dim = int(self.dim * rng.choice((0.5, 1, 2)))
        for rows, lookups in zip(self.rows, self.lookups, strict=True):
            varied_rows = rows * np.exp(_VARIED_ROWS * rng.standard_normal())
            yield EmbeddingTable(
                name="varied",
                rows=round(max(1, min(varied_rows, _MAX_BYTES / (4 * dim)))),
                dim=dim,
                pooling_factor=round(lookups * np.exp(_VARIED_LOOKUPS * rng.standard_normal()), 4),
                zipf_alpha=round(rng.uniform(*zipf_alpha), 4),
            )


WORKLOADS: Mapping[str, Workload] = {
    "criteo": Workload(_CRITEO_ROWS, (1,) * len(_CRITEO_ROWS), 16, _CRITEO_ZIPF),
    "mlperf:dlrm-v2": Workload(_MLPERF_ROWS, _MLPERF_LOOKUPS, 128, 0.0),
}
# Criteo's tables for a larger model: wider, and with eight lookups in place of one.
_LARGER_CRITEO = Workload(_CRITEO_ROWS, (8,) * len(_CRITEO_ROWS), 64, _CRITEO_ZIPF)


@dataclass(frozen=True)
class Range:
    """Ranges of table properties, sampled uniformly in the logarithm (`zipf_alpha`: linearly).

    Args:
        rows: Number of rows.
        dim: Number of columns.
        lookups: Lookups per sample.
        zipf_alpha: Exponents of Zipf laws.
        published: Share of tables with the published reuse histogram, tilted at random; the others
            follow Zipf laws.
        features: Maximum number of features of a table, sampled in the logarithm.
        weighted: Share of tables with weighted lookups.
    """

    rows: tuple[float, float]
    dim: tuple[float, float]
    lookups: tuple[float, float]
    zipf_alpha: tuple[float, float]
    published: float = 0.0
    features: int = 1
    weighted: float = 0.0

    def tables(self, count: int, seed: int) -> tuple[EmbeddingTable, ...]:
        """Returns `count` tables by Latin hypercube sampling, so that few cover the ranges too."""
        from scipy.stats import qmc  # slow to load, and only needed here

        draws = qmc.LatinHypercube(6, rng=np.random.default_rng([count, seed])).random(count)
        width = len(str(count - 1))
        tables = (self._table(f"t{n:0{width}d}", draw) for n, draw in enumerate(draws))
        if self.features == 1 and not self.weighted:
            return tuple(tables)
        # Separate draws, so that all other properties are the same as without these two.
        uses = qmc.LatinHypercube(2, rng=np.random.default_rng([count, seed, 1])).random(count)
        return tuple(
            replace(
                table,
                features=int((self.features + 1) ** features),
                weighted=bool(weighted < self.weighted),
            )
            for table, (features, weighted) in zip(tables, uses, strict=True)
        )

    def _table(self, name: str, draw: Floats) -> EmbeddingTable:
        rows, dim, lookups = (
            float(low * (high / low) ** place)
            for (low, high), place in zip((self.rows, self.dim, self.lookups), draw, strict=False)
        )
        columns = max(DIM_STEP, round(dim / DIM_STEP) * DIM_STEP)
        rows = min(rows, _MAX_BYTES / (4 * columns))
        pooling, tilted = round(lookups, 4), draw[5] < self.published
        low, high = self.zipf_alpha
        batch = round(_PUBLISHED_BATCH / _MAX_REDUCTION ** draw[3])
        return EmbeddingTable(
            name=name,
            rows=round(rows),
            dim=columns,
            pooling_factor=pooling,
            zipf_alpha=None if tilted else round(low + (high - low) * draw[3], 4),
            reuse=_tilted_reuse(pooling * batch, _TILT * (2 * draw[4] - 1)) if tilted else None,
            reuse_batch_size=batch if tilted else None,
        )


_WIDE = Range((10, 1e7), (4, 512), (0.1, 200), (0, 1.6), published=0.4)
RANGES: Mapping[str, Range] = {
    "wide": _WIDE,
    "features": replace(_WIDE, features=8, weighted=1 / 3),
    "zipf": Range((1e3, 2e6), (8, 256), (1, 60), (0.4, 1.5)),
    "hot": Range((50, 2e4), (4, 32), (5, 100), (0.9, 1.6)),
    "cold": Range((2e5, 5e6), (32, 128), (0.5, 8), (0, 0.3)),
    "tiny": Range((10, 1e4), (4, 32), (0.5, 5), (0, 1.6)),
}
# Tables of several ranges in alternation. `directions` mixes ratios of backward to forward time: by
# the shipped cost model for CPUs, 2 for wide tables with few hot rows, and 20 for narrow tables
# without reuse.
MIXTURES: Mapping[str, tuple[Range, ...]] = {
    "directions": (
        Range((1e2, 1e5), (256, 512), (10, 100), (1.2, 1.6)),
        Range((2e5, 5e6), (4, 16), (2, 15), (0, 0.5)),
    ),
}


def _mixed_tables(ranges: Sequence[Range], count: int, seed: int) -> tuple[EmbeddingTable, ...]:
    """Returns `count` tables, from the ranges in alternation."""
    drawn = [
        tables.tables(-(-count // len(ranges)), seed + number * _SEED_STEP)
        for number, tables in enumerate(ranges)
    ]
    return _numbered([table for group in zip(*drawn, strict=True) for table in group][:count])


def _giant_tables(
    count: int, seed: int, zipf_alpha: tuple[float, float] = _VARIED_ZIPF
) -> tuple[EmbeddingTable, ...]:
    """Returns `count` tables, from variations of MLPerf's and a larger Criteo's in alternation.

    A few are much larger or costlier than the others.
    """
    found: list[EmbeddingTable] = []
    models = cycle((WORKLOADS["mlperf:dlrm-v2"], _LARGER_CRITEO))
    while len(found) < count:
        rng = np.random.default_rng([seed, len(found)])
        found += next(models).varied(rng, zipf_alpha)
    return _numbered(found[:count])


def _numbered(tables: Sequence[EmbeddingTable]) -> tuple[EmbeddingTable, ...]:
    width = len(str(len(tables) - 1))
    return tuple(replace(table, name=f"t{n:0{width}d}") for n, table in enumerate(tables))


def _tilted_reuse(lookups: float, tilt: float) -> tuple[float, ...]:
    """Returns the published histogram, tilted, over the bins that so many lookups can fill."""
    bins = published_reuse() * np.exp(tilt * np.arange(NUM_REUSE_BINS))
    bins[1:][UPPER[1:] / 2 >= max(1.0, lookups / 4)] = 0.0
    return tuple(np.round(bins / bins.sum(), 9).tolist())


def _workload(name: str, rest: str) -> tuple[EmbeddingTable, ...]:
    scale = rest.removeprefix("1/") if rest else "1"
    if not scale.isdecimal() or int(scale) < 1 or (rest and not rest.startswith("1/")):
        raise UserError(f"write {name} or {name}:1/64 for a 64th of the rows, got {name}:{rest}")
    return WORKLOADS[name].tables(int(scale))


def _drawn(name: str, rest: str) -> tuple[EmbeddingTable, ...]:
    numbers = rest.split(":")
    if len(numbers) > 2 or not all(number.isdecimal() for number in numbers):
        raise UserError(f"write {name}:N[:SEED], for example {name}:200:1, got {name}:{rest}")
    count, seed = int(numbers[0]), int(numbers[1]) if len(numbers) == 2 else 0
    with documents.naming(f"{name}:{rest}"):
        check_count(count)
    return _DRAWN[name](count, seed)


_DRAWN: Mapping[str, Callable[[int, int], tuple[EmbeddingTable, ...]]] = {
    **{name: ranges.tables for name, ranges in RANGES.items()},
    **{name: partial(_mixed_tables, ranges) for name, ranges in MIXTURES.items()},
    "giants": _giant_tables,
    "skewed": partial(_giant_tables, zipf_alpha=_SKEWED_ZIPF),
}
_READERS: Mapping[str, Callable[[str, str], tuple[EmbeddingTable, ...]]] = {
    **dict.fromkeys(WORKLOADS, _workload),
    **dict.fromkeys(_DRAWN, _drawn),
}


def family_tables(source: str) -> tuple[EmbeddingTable, ...] | None:
    """Returns the tables of `NAME[:...]`, or None if no family has that name."""
    for name, read in _READERS.items():
        if source == name or source.startswith(f"{name}:"):
            return read(name, source[len(name) + 1 :])
    return None
