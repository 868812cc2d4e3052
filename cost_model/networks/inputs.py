"""Shards as arrays: the inputs of each distinct piece, and the pieces of each shard."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from autoshard.cost_model.networks.network import INPUTS
from autoshard.workload import FEATURE_NAMES, Piece, Shard, piece_features
from autoshard.workload.packing.units import Placeable, PlacementUnit

_BLOCK = 256  # pieces added up together: in scenarios all of them would take much memory
_COLUMNS = [FEATURE_NAMES.index(name) for name in INPUTS]


def piece_inputs(pieces: Sequence[Piece], batch_size: int) -> Tensor:
    """Returns the network's inputs, shape [pieces, inputs]."""
    features = piece_features(pieces, batch_size)[:, _COLUMNS]
    return torch.from_numpy(np.ascontiguousarray(features, dtype=np.float32))


@dataclass(frozen=True)
class Memberships:
    """Ragged lists of rows: shard n holds `rows[offsets[n] : offsets[n + 1]]`."""

    rows: Tensor
    offsets: Tensor

    @staticmethod
    def of(lists: Sequence[Sequence[int] | npt.NDArray[np.int64]]) -> "Memberships":
        """Returns the memberships of a list of rows for each shard."""
        rows = np.concatenate([np.empty(0, np.int64), *(np.asarray(rows) for rows in lists)])
        flat = rows.astype(np.int64, copy=False)
        lengths = np.fromiter(map(len, lists), np.int64, len(lists))
        offsets = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
        return Memberships(torch.from_numpy(flat), torch.from_numpy(offsets))

    def highest(self, values: Tensor) -> Tensor:
        """Returns the maximum of values [rows] over each shard, shape [shards]."""
        return functional.embedding_bag(self.rows, values[:, None], self.offsets, mode="max")[:, 0]

    def sums(self, amounts: Tensor) -> Tensor:
        """Returns the sums of amounts [rows, ...] over each shard, shape [shards, ...]."""
        flat = amounts.reshape(len(amounts), -1)
        sums = functional.embedding_bag(self.rows, flat, self.offsets, mode="sum")
        return sums.reshape(-1, *amounts.shape[1:])


def unit_amounts(
    amounts: Callable[[Sequence[Piece]], Tensor], pieces: Sequence[Placeable]
) -> Tensor:
    """Returns the amounts of pieces or placement units, shape [units, ...]."""
    units = [PlacementUnit.of(piece) for piece in pieces]
    found = amounts([piece for unit in units for piece in unit.pieces])
    lengths = [len(unit.pieces) for unit in units]
    if all(length == 1 for length in lengths):
        return found
    ends = np.cumsum(lengths)
    return Memberships.of(np.split(np.arange(len(found)), ends[:-1])).sums(found)


def sums_of_devices(amounts: Tensor, homes: npt.NDArray[np.int64], devices: int) -> Tensor:
    """Returns the sums of amounts of each device, in double precision: [devices, ...].

    Args:
        amounts: What each piece brings, [pieces, ...].
        homes: The device of each piece.
        devices: How many there are.
    """
    sums = torch.zeros(devices, *amounts.shape[1:], dtype=torch.float64)
    places = torch.from_numpy(homes)
    for rows in torch.split(torch.arange(len(homes)), _BLOCK):
        sums.index_add_(0, places[rows], amounts[rows].double())
    return sums


class PieceRows:
    """Assigns a row to each distinct pair of piece and batch size, in order of occurrence."""

    def __init__(self) -> None:
        self._rows: dict[int, dict[tuple[str, int], int]] = {}
        self._members: list[tuple[Piece, int]] = []

    def __len__(self) -> int:
        return len(self._members)

    def of(self, pieces: Sequence[Piece], batch_size: int) -> list[int]:
        """Returns the rows of these pieces."""
        known, rows = self._rows.setdefault(batch_size, {}), []
        for piece in pieces:
            # The parts of the piece's digest, which itself takes longer than all the rest.
            key = piece.table.access_digest, piece.width
            row = known.get(key)
            if row is None:
                row = known[key] = len(self._members)
                self._members.append((piece, batch_size))
            rows.append(row)
        return rows

    def of_all(self, shards: Sequence[Shard], batch_sizes: Sequence[int]) -> Memberships:
        """Returns the rows of each shard's pieces, each shard with its batch size."""
        pairs = zip(shards, batch_sizes, strict=True)
        return Memberships.of([self.of(shard.pieces, batch) for shard, batch in pairs])

    def inputs(self, first: int = 0) -> Tensor:
        """Returns the network's inputs of the rows from `first` on, shape [rows, inputs]."""
        members = self._members[first:]
        inputs = torch.empty(len(members), len(INPUTS))
        for batch_size in {batch_size for _, batch_size in members}:
            chosen = [n for n, (_, batch) in enumerate(members) if batch == batch_size]
            inputs[chosen] = piece_inputs([members[n][0] for n in chosen], batch_size)
        return inputs

    def pieces(self, first: int = 0) -> list[Piece]:
        """Returns the pieces of the rows from `first` on."""
        return [piece for piece, _ in self._members[first:]]
