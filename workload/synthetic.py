"""Synthetic tables like those of dlrm_datasets.

The published statistics of `fbgemm_t856_bs65536.pt` (856 tables, a batch of 65,536 samples) give
the pool's aggregate: 15.8 lookups a sample and table, 150,042 distinct rows a table, and how
often a batch uses them. Single tables vary around it: some are one-hot, some look up dozens of
rows, some reuse a handful of rows all the time. A pool of any size matches the aggregate.

A *profile* is the scale: `full` is as published; `small` divides rows and batch by 64, which
leaves the reuse of rows as it is, and fits a CPU.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import special

from autoshard.workload.errors import UserError
from autoshard.workload.reuse import UPPER, Floats, mean_uses
from autoshard.workload.tables import EmbeddingTable

# Share of all lookups that fall on rows of each reuse bin, as published. The published share of
# rows in each bin is this divided by the bin's mean uses; its own third decimal is too coarse
# for the heavy bins, which hold few rows and many lookups.
LOOKUP_SHARE: Floats = np.array(
    [0.069, 0.044, 0.068, 0.101, 0.121, 0.104, 0.073, 0.058, 0.052, 0.050, 0.049, 0.048, 0.048,
     0.043, 0.031, 0.023, 0.019]
)  # fmt: skip
MEAN_POOLING = 887_017_990 / 856 / 65_536

_MEAN_ROWS = 1_500_000  # ours: the statistics do not say how large the tables are
_ROWS_SIGMA = 1.6
_MAX_ROWS = 10_000_000  # at 256 columns 10 GB: larger tables would not fit many a device
_POOLING_SIGMA = 1.2
_MAX_POOLING = 200.0
_TILT_SIGMA = 0.35  # how much single tables' reuse differs: factor exp(tilt * bin) on each bin
_DIMS = (16, 32, 64, 128, 256)  # ours too


@dataclass(frozen=True)
class Profile:
    """How far the published sizes are scaled down, and the batch that goes with it."""

    scale: int

    @property
    def batch_size(self) -> int:
        """Samples of a batch."""
        return 65_536 // self.scale


PROFILES = {"full": Profile(1), "small": Profile(64)}


def default_profile() -> str:
    """`full` on a machine with an NVIDIA GPU, `small` on any other."""
    return "full" if any(Path("/dev").glob("nvidia[0-9]*")) else "small"


def synthetic_tables(
    count: int, seed: int = 0, profile: str | None = None
) -> tuple[EmbeddingTable, ...]:
    """`count` tables; the same for the same arguments."""
    if count < 1:
        raise UserError("at least 1 table is needed")
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
    """Evenly spread over (0, 1) in random order, so that small pools have the right mean too."""
    return (rng.permutation(count) + rng.uniform(0.25, 0.75, count)) / count


def _normal(count: int, rng: np.random.Generator) -> Floats:
    return np.asarray(special.ndtri(_uniform(count, rng)), dtype=np.float64)


def _stratified(
    count: int, rng: np.random.Generator, kinds: int
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return (_uniform(count, rng) * kinds).astype(np.int64)


def _pooling_factors(count: int, rng: np.random.Generator) -> Floats:
    """Log-normal between 1 and 200 with the published mean."""
    shape = np.exp(_POOLING_SIGMA * _normal(count, rng))
    low, high = 1e-3, 1e3
    for _ in range(60):  # the bounds shift the mean, so the scale is searched for
        middle = np.sqrt(low * high)
        mean = np.clip(shape * middle, 1.0, _MAX_POOLING).mean()
        low, high = (middle, high) if mean < MEAN_POOLING else (low, middle)
    return np.asarray(np.clip(shape * low, 1.0, _MAX_POOLING), dtype=np.float64)


def published_reuse() -> Floats:
    """Share of the pool's distinct rows in each reuse bin."""
    rows = LOOKUP_SHARE / mean_uses()
    return np.asarray(rows / rows.sum(), dtype=np.float64)


def _reuse_bins(lookups: Floats, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Reuse bins of each table, and its distinct rows, that add up to the published aggregate.

    Each table bends the common bins towards rare or frequent reuse; the common bins are then
    corrected until the pool as a whole is right again.
    """
    goal, uses = published_reuse(), mean_uses()
    tilt = _TILT_SIGMA * _normal(len(lookups), rng)
    reachable = (UPPER[None, :] / 2 < lookups[:, None] / 4).astype(float)
    shape = np.exp(tilt[:, None] * np.arange(len(goal))[None, :]) * reachable
    common = goal.copy()
    for _ in range(200):
        bins = common * shape
        bins /= bins.sum(axis=1, keepdims=True)
        distinct = lookups / (bins @ uses)
        pool = (distinct[:, None] * bins).sum(axis=0) / distinct.sum()
        common = common * goal / np.maximum(pool, 1e-15)
    return bins, distinct
