"""Decomposes the predicted cost of a shard into a start and a contribution of each table."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy  # which loads its parts when they are used
import torch

from autoshard.cost_model.networks.compute import ComputeCostModel
from autoshard.cost_model.networks.inputs import PieceRows
from autoshard.cost_model.networks.network import DIRECTIONS, fused
from autoshard.workload import EmbeddingTable, Shard
from autoshard.workload.arrays import Floats


@dataclass(frozen=True)
class Contributions:
    """Milliseconds of each shard's start and of each of its tables, forward and backward."""

    starts_ms: tuple[Floats, ...]
    tables_ms: "tuple[scipy.sparse.csr_matrix, ...]"

    def of(self, direction: int) -> "tuple[Floats, scipy.sparse.csr_matrix]":
        """Returns total costs of shards in one direction, and the contributions of tables."""
        parts = self.tables_ms[direction]
        return self.starts_ms[direction] + np.asarray(parts.sum(1)).ravel(), parts

    def together(self) -> "tuple[Floats, scipy.sparse.csr_matrix]":
        """Returns the same as `of` for forward plus backward."""
        parts = sum(self.tables_ms[1:], self.tables_ms[0])
        return sum(self.starts_ms) + np.asarray(parts.sum(1)).ravel(), parts


class EmbeddedShards:
    """Shards with the amounts of their pieces, which are computed once.

    Args:
        model: Prices the shards.
        shards: The shards.
        batch_sizes: Batch size of each shard.
        tables: All tables of the shards, in the order of columns of contributions.
    """

    def __init__(
        self,
        model: ComputeCostModel,
        shards: Sequence[Shard],
        batch_sizes: Sequence[int],
        tables: Sequence[EmbeddingTable],
    ) -> None:
        rows = PieceRows()
        self._held = rows.of_all(shards, batch_sizes)
        self._amounts = model.amounts_of(rows.inputs())
        self._fusion = model.ensemble.weights_of("fusion")
        numbers = {table.access_digest: n for n, table in enumerate(tables)}
        self._tables = np.array(
            [numbers[piece.table.access_digest] for piece in rows.pieces()], np.int64
        )
        lengths = np.diff(np.append(self._held.offsets.numpy(), len(self._held.rows)))
        self._owners = np.repeat(np.arange(len(shards)), lengths)
        self._shape = (len(shards), len(tables))

    @torch.no_grad()
    def contributions(self, factors: Floats | None = None) -> Contributions:
        """Returns contributions by the mean of the networks.

        Args:
            factors: Log corrections of tables, shape [directions, tables]; by default 0.
        """
        amounts = self._amounts
        if factors is not None:
            amounts = amounts.clone()
            scale = torch.from_numpy(np.exp(factors[:, self._tables].T)).float()
            amounts[..., :DIRECTIONS] *= scale[:, None]
        sums = self._held.sums(amounts)
        costs = fused(sums.transpose(0, 1), self._fusion).exp()
        starts = self._fusion["log_start"].exp()
        # A network's cost is the start plus its tables' amounts, times the fusion factor.
        fusion = costs / (sums[..., :DIRECTIONS].transpose(0, 1) + starts[:, None])
        alone = amounts[..., :DIRECTIONS].transpose(0, 1)
        columns = self._tables[self._held.rows.numpy()]
        tables_ms = []
        for direction in range(DIRECTIONS):
            fused_ms = alone[:, self._held.rows, direction] * fusion[:, self._owners, direction]
            entries = (fused_ms.mean(0).double().numpy(), (self._owners, columns))
            tables_ms.append(scipy.sparse.csr_matrix(entries, self._shape))
        starts_ms = (starts[:, None] * fusion).mean(0).double().numpy()
        return Contributions(tuple(starts_ms.T), tuple(tables_ms))
