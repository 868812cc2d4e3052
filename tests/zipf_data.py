"""Lookups whose true access curve is known: a Zipf law over rows, in order or shuffled."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet

from autoshard.workload.arrays import Floats, Ints


@dataclass(frozen=True)
class ZipfRows:
    """A law of rows: the row of rank k has a share proportional to k**-alpha.

    `shift` moves all rows by that many places, as if other rows had become hot.
    """

    rows: int
    alpha: float
    is_shuffled: bool = False
    seed: int = 0

    @property
    def shares(self) -> Floats:
        shares = np.arange(1, self.rows + 1, dtype=float) ** -self.alpha
        return shares / shares.sum()

    def hottest(self, count: int) -> float:
        return float(self.shares[:count].sum())

    def of_ranks(self) -> Ints:
        """The row of each rank."""
        rows = np.arange(self.rows)
        return np.random.default_rng(self.seed).permutation(rows) if self.is_shuffled else rows

    def draw(self, count: int, rng: np.random.Generator, shift: int = 0) -> Ints:
        ranks = np.searchsorted(np.cumsum(self.shares), rng.random(count))
        return (self.of_ranks()[np.minimum(ranks, self.rows - 1)] + shift) % self.rows


def write_lists(path: Path, columns: dict[str, Ints], lookups: int, group: int = 1024) -> None:
    """Writes a Parquet file whose columns hold lists of `lookups` rows each."""
    arrays = {}
    for name, rows in columns.items():
        offsets = pyarrow.array(np.arange(0, len(rows) + 1, lookups), pyarrow.int32())
        arrays[name] = pyarrow.ListArray.from_arrays(offsets, pyarrow.array(rows))
    pyarrow.parquet.write_table(pyarrow.table(arrays), path, row_group_size=group)
