"""Placement units: what a sharder places at once."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.workload.arrays import Ints
from autoshard.workload.tables.operators import OperatorOptions
from autoshard.workload.tables.table import Piece, can_be_split, halves


@dataclass(frozen=True, eq=False)
class PlacementUnit:
    """A piece of a table, or whole tables that a rule keeps together."""

    pieces: tuple[Piece, ...]

    @staticmethod
    def of(piece: "Piece | PlacementUnit") -> "PlacementUnit":
        """Returns the unit of a single piece; a unit is returned as it is."""
        return piece if isinstance(piece, PlacementUnit) else PlacementUnit((piece,))

    @property
    def name(self) -> str:
        """Returns the name of its first table."""
        return self.pieces[0].table.name

    @property
    def columns(self) -> float:
        """Returns the columns that an exchange of its outputs counts for."""
        return sum(piece.exchanged_columns for piece in self.pieces)

    @property
    def can_be_split(self) -> bool:
        """Returns whether it is a single piece that is wide enough."""
        return len(self.pieces) == 1 and can_be_split(self.pieces[0])

    def halves(self) -> tuple["PlacementUnit", "PlacementUnit"]:
        """Returns a unit that can be split as two of nearly equal width."""
        (piece,) = self.pieces
        first, second = halves(piece)
        return PlacementUnit((first,)), PlacementUnit((second,))


Placeable = Piece | PlacementUnit


def bytes_of_units(
    operator: OperatorOptions, batch_size: int, units: Sequence[PlacementUnit]
) -> Ints:
    """Returns the bytes of each unit, with those that a batch needs: [units]."""
    pieces = [piece for unit in units for piece in unit.pieces]
    sizes = operator.bytes_of_each(pieces, batch_size)
    lengths = [len(unit.pieces) for unit in units]
    if all(length == 1 for length in lengths):
        return sizes
    found = np.zeros(len(units), np.int64)
    np.add.at(found, np.repeat(np.arange(len(units)), lengths), sizes)
    return found
