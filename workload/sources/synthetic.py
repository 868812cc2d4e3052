"""Synthetic tables like those of dlrm_datasets.

The published statistics of `fbgemm_t856_bs65536.pt` (856 tables, a batch of 65,536 samples) give
the aggregate of a pool: 15.8 lookups per sample and table, 150,042 distinct rows per table, and
their reuse. Single tables vary: some have one lookup per sample, some dozens, and some reuse few
rows. A pool of any size matches the aggregate.

A *profile* is the scale: `full` is as published. `small` divides rows and batch by 64, which keeps
the reuse of rows and fits a CPU.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import special

from autoshard.workload.access.reuse import UPPER, mean_uses
from autoshard.workload.arrays import Floats
from autoshard.workload.bounds import MAX_TABLES
from autoshard.workload.errors import UserError
from autoshard.workload.tables.table import EmbeddingTable

# Published share of all lookups in rows of each reuse bin. The share of rows follows by division by
# the bin's mean uses; its published value, with three decimals, is too coarse for bins with few
# rows and many lookups.
LOOKUP_SHARE: Floats = np.array(
    [0.069, 0.044, 0.068, 0.101, 0.121, 0.104, 0.073, 0.058, 0.052, 0.050, 0.049, 0.048, 0.048,
     0.043, 0.031, 0.023, 0.019]
)  # fmt: skip
MEAN_POOLING = 887_017_990 / 856 / 65_536

_MEAN_ROWS = 1_500_000  # our choice: the statistics lack sizes of tables
_ROWS_SIGMA = 1.6
_MAX_ROWS = 10_000_000  # 10 GB with 256 columns; larger tables would not fit many devices
_POOLING_SIGMA = 1.2
_MAX_POOLING = 200.0
_TILT_SIGMA = 0.35  # variation of reuse between tables: factor exp(tilt * bin) on each bin
_DIMS = (16, 32, 64, 128, 256)  # our choice


def check_count(count: int) -> None:
    """Raises UserError for a number of tables that nothing can be planned for."""
    if not 1 <= count <= MAX_TABLES:
        raise UserError(f"at least 1 table is needed, and at most {MAX_TABLES}, got {count}")


@dataclass(frozen=True)
class Profile:
    """A divisor of the published sizes, and the batch size that follows."""

    scale: int

    @property
    def batch_size(self) -> int:
        """Returns the samples of a batch."""
        return 65_536 // self.scale


PROFILES = {"full": Profile(1), "small": Profile(64)}


def default_profile() -> str:
    """Returns `full` on a machine with an NVIDIA GPU, else `small`."""
    return "full" if any(Path("/dev").glob("nvidia[0-9]*")) else "small"


def synthetic_tables(
    count: int, seed: int = 0, profile: str | None = None
) -> tuple[EmbeddingTable, ...]:
    """Returns `count` tables, the same for the same arguments."""
    check_count(count)
    name = profile or default_profile()
    if name not in PROFILES:
        raise UserError(f"profile {name!r} is not one of {', '.join(PROFILES)}")
    scale = PROFILES[name]
    rng = np.random.default_rng([count, seed])
    pooling = _pooling_factors(count, rng)
    reuse, distinct = _reuse_bins(pooling * 65_536, rng)
    rows = _MEAN_ROWS * np.exp(_ROWS_SIGMA * _normal(count, rng) - _ROWS_SIGMA**2 / 2)
    rows = np.maximum(np.minimum(rows, _MAX_ROWS), 1.05 * distinct) / scale.scale
    dims = np.asarray(_DIMS)[_stratified(count, rng, len(_DIMS))]
    return tuple(
        EmbeddingTable(
            name=f"t{number:0{len(str(count - 1))}d}",
            rows=max(1, int(rows[number])),
            dim=int(dims[number]),
            pooling_factor=round(float(pooling[number]), 4),
            reuse=tuple(np.round(reuse[number], 9).tolist()),
            reuse_batch_size=scale.batch_size,
        )
        for number in range(count)
    )


def _uniform(count: int, rng: np.random.Generator) -> Floats:
    """Returns stratified samples of (0, 1), so that small pools have the right mean."""
    return (rng.permutation(count) + rng.uniform(0.25, 0.75, count)) / count


def _normal(count: int, rng: np.random.Generator) -> Floats:
    return np.asarray(special.ndtri(_uniform(count, rng)), dtype=np.float64)


def _stratified(
    count: int, rng: np.random.Generator, kinds: int
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return (_uniform(count, rng) * kinds).astype(np.int64)


def _pooling_factors(count: int, rng: np.random.Generator) -> Floats:
    """Returns log-normal values, clipped to 1 to 200, with the published mean."""
    shape = np.exp(_POOLING_SIGMA * _normal(count, rng))
    low, high = 1e-3, 1e3
    for _ in range(60):  # clipping shifts the mean, so the scale is found by bisection
        middle = np.sqrt(low * high)
        mean = np.clip(shape * middle, 1.0, _MAX_POOLING).mean()
        low, high = (middle, high) if mean < MEAN_POOLING else (low, middle)
    return np.asarray(np.clip(shape * low, 1.0, _MAX_POOLING), dtype=np.float64)


def published_reuse() -> Floats:
    """Returns the share of the pool's distinct rows in each reuse bin."""
    rows = LOOKUP_SHARE / mean_uses()
    return np.asarray(rows / rows.sum(), dtype=np.float64)


def _reuse_bins(lookups: Floats, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Returns reuse bins and distinct rows of tables that add up to the published aggregate.

    Each table tilts common bins towards rare or frequent reuse; the common bins are then corrected
    until the pool matches.
    """
    target, uses = published_reuse(), mean_uses()
    tilt = _TILT_SIGMA * _normal(len(lookups), rng)
    reachable = (UPPER[None, :] / 2 < lookups[:, None] / 4).astype(float)
    shape = np.exp(tilt[:, None] * np.arange(len(target))[None, :]) * reachable
    common = target.copy()
    for _ in range(200):
        bins = common * shape
        bins /= bins.sum(axis=1, keepdims=True)
        distinct = lookups / (bins @ uses)
        pool = (distinct[:, None] * bins).sum(axis=0) / distinct.sum()
        common = common * target / np.maximum(pool, 1e-15)
    return bins, distinct
