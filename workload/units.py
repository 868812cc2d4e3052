"""What is placed at once: a slice of a table, or whole tables that a rule keeps together."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autoshard.workload.operators import OperatorOptions
from autoshard.workload.tables import TableSlice, can_be_split, halves

Whole = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Bundle:
    """What is placed at once: a slice, or whole tables that a rule keeps together."""

    slices: tuple[TableSlice, ...]

    @staticmethod
    def of(piece: "TableSlice | Bundle") -> "Bundle":
        """Of a single slice; a bundle is one already."""
        return piece if isinstance(piece, Bundle) else Bundle((piece,))

    @property
    def name(self) -> str:
        """Of its first table: different for bundles of different tables."""
        return self.slices[0].table.name

    @property
    def columns(self) -> int:
        """Of the output, that it brings to its device."""
        return sum(piece.output_width for piece in self.slices)

    @property
    def can_be_split(self) -> bool:
        """True if it is one slice, and wide enough."""
        return len(self.slices) == 1 and can_be_split(self.slices[0])

    def halves(self) -> tuple["Bundle", "Bundle"]:
        """Of a bundle of one slice that may be halved: two, of nearly equal width."""
        (piece,) = self.slices
        first, second = halves(piece)
        return Bundle((first,)), Bundle((second,))


Piece = TableSlice | Bundle


def bytes_of_bundles(
    operator: OperatorOptions, batch_size: int, bundles: Sequence[Bundle]
) -> Whole:
    """Bytes of each of these on its device, with those that a batch needs: [bundles]."""
    slices = [piece for bundle in bundles for piece in bundle.slices]
    sizes = operator.bytes_of_each(slices, batch_size)
    if len(slices) == len(bundles):
        return sizes
    found = np.zeros(len(bundles), np.int64)
    lengths = [len(bundle.slices) for bundle in bundles]
    np.add.at(found, np.repeat(np.arange(len(bundles)), lengths), sizes)
    return found
