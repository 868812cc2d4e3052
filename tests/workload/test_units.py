"""Units of several pieces, of one and of none."""

from collections.abc import Sequence

import torch
from torch import Tensor

from autoshard.cost_model.networks.inputs import unit_amounts
from autoshard.workload import EmbeddingTable, OperatorOptions, Piece
from autoshard.workload.packing.units import PlacementUnit, bytes_of_units

WHOLE = tuple(EmbeddingTable(f"t{n}", 100 + n, 8 * (n + 1), 2.0).whole() for n in range(3))
UNITS = (
    [PlacementUnit((piece,)) for piece in WHOLE],
    [PlacementUnit(()), PlacementUnit(WHOLE[:2])],  # as many units as pieces
    [PlacementUnit(WHOLE), PlacementUnit(()), PlacementUnit((WHOLE[0],))],
)


def test_a_unit_is_the_sum_of_its_pieces_whatever_is_beside_it() -> None:
    def widths(pieces: Sequence[Piece]) -> Tensor:
        return torch.tensor([[float(piece.width)] for piece in pieces])

    operator = OperatorOptions()
    for units in UNITS:
        expected = [operator.memory(unit.pieces, 64).total for unit in units]
        assert bytes_of_units(operator, 64, units).tolist() == expected
        columns = [sum(float(piece.width) for piece in unit.pieces) for unit in units]
        assert unit_amounts(widths, units)[:, 0].tolist() == columns
