"""Access statistics of a table's rows: how skewed lookups are, and where in the table they fall.

The reuse bins of a table describe one batch. These statistics describe all data that was counted:
which share of the lookups the most used rows get, and which share each block of rows gets. They
decide what splits by rows and copies of hot rows cost.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from autoshard.workload.arrays import Floats, Ints
from autoshard.workload.errors import FieldError

CURVE_POINTS = 100
MAX_BLOCKS = 1024
_DIGITS = 7  # of a share in files


def curve_ranks(rows: int) -> Ints:
    """Returns the numbers of rows at which curves of a table with `rows` rows are given, [points].

    They are spaced evenly in their logarithm, from 1 to `rows`.
    """
    return np.round(np.geomspace(1, rows, CURVE_POINTS)).astype(np.int64)


def block_rows(rows: int) -> int:
    """Returns the rows of a block: the least power of two with at most MAX_BLOCKS blocks."""
    return 1 << max(0, math.ceil(math.log2(-(-rows // MAX_BLOCKS))))


@dataclass(frozen=True)
class RowAccess:
    """How lookups are spread over the rows of a table.

    Args:
        curve: Share of lookups that the `curve_ranks(rows)` most used rows get, [points]. Which
            rows these are is taken from one half of the data, their share from the other.
        blocks: Share of lookups in each block of `block_rows(rows)` consecutive rows, [blocks].
        coverage: Share of rows that were looked up at all.
        lookups: Number of lookups that were counted.
        distinct_rows: Mean number of distinct rows in a batch of `reuse_batch_size` samples.
        pooling_variance: Variance of the lookups of a sample.
        drift: Share of lookups that hot rows of the first half of the data lost in the second half:
            0 where the same rows stay hot. None if no row was looked up often enough to say.
    """

    curve: tuple[float, ...]
    blocks: tuple[float, ...]
    coverage: float
    lookups: int
    distinct_rows: float
    pooling_variance: float = 0.0
    drift: float | None = None

    def __post_init__(self) -> None:
        if len(self.curve) != CURVE_POINTS:
            raise FieldError("access", f"curve needs {CURVE_POINTS} points, got {len(self.curve)}")
        if not self.blocks or len(self.blocks) > MAX_BLOCKS:
            raise FieldError("access", f"needs 1 to {MAX_BLOCKS} blocks, got {len(self.blocks)}")
        numbers = (self.coverage, self.lookups, self.distinct_rows, self.pooling_variance)
        if not all(isinstance(number, int | float) for number in numbers):
            raise FieldError("access", "coverage, lookups, distinct_rows and pooling_variance must "
                             "be numbers")  # fmt: skip
        _check_shares("curve", np.diff([0.0, *self.curve]))
        _check_shares("blocks", np.array(self.blocks))

    def check(self, rows: int) -> None:
        """Raises FieldError unless the statistics are of a table with so many rows."""
        expected = -(-rows // block_rows(rows))
        if len(self.blocks) != expected:
            raise FieldError(
                "access",
                f"{rows} rows have {expected} blocks, got {len(self.blocks)}: profile this table",
            )

    def hottest(self, rows: int, count: float) -> float:
        """Returns the share of lookups that the `count` most used of `rows` rows get."""
        points = np.concatenate([[0.0], curve_ranks(rows)])
        return float(np.interp(count, points, [0.0, *self.curve]))

    def rows_for(self, rows: int, share: float) -> float:
        """Returns how many of `rows` rows, most used first, get this share of the lookups."""
        points = np.concatenate([[0.0], curve_ranks(rows)])
        shares, first = np.unique([0.0, *self.curve], return_index=True)
        return float(np.interp(share, shares, points[first]))

    def even_blocks(self, rows: int, count: int) -> Floats:
        """Returns the share of lookups in each of `count` blocks of ceil(rows / count) rows.

        These are the blocks that TorchRec makes of a row-wise table; the last may be smaller.
        """
        edges = np.minimum(np.arange(len(self.blocks) + 1) * block_rows(rows), rows)
        below = np.concatenate([[0.0], np.cumsum(self.blocks)])
        cuts = np.minimum(np.arange(count + 1) * -(-rows // count), rows)
        return np.diff(np.interp(cuts, edges, below))

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON object, with shares rounded."""
        rounded = {
            "curve": [round(share, _DIGITS) for share in self.curve],
            "blocks": [round(share, _DIGITS) for share in self.blocks],
        }
        return {k: v for k, v in (asdict(self) | rounded).items() if v is not None}

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> "RowAccess":
        """Returns the statistics that `to_json` wrote; FieldError names what is invalid."""
        if not isinstance(record, Mapping):
            raise FieldError("access", "must be an object with curve and blocks")
        fields = dict(record)
        if unknown := set(fields) - set(RowAccess.__dataclass_fields__):
            raise FieldError("access", f"has an unknown field {sorted(unknown)[0]}")
        try:
            for name in ("curve", "blocks"):
                fields[name] = tuple(float(share) for share in fields[name])
            return RowAccess(**fields)
        except (KeyError, TypeError, ValueError) as error:
            problem = f"lacks a field or has one of a wrong kind: {error}"
            raise FieldError("access", problem) from None


def _check_shares(name: str, shares: Floats) -> None:
    if not (np.isfinite(shares).all() and (shares >= -1e-6).all()):
        raise FieldError("access", f"{name} must hold shares of lookups")
    if abs(shares.sum() - 1) > 0.01:
        raise FieldError("access", f"shares of {name} must add up to 1, got {shares.sum():.4g}")
