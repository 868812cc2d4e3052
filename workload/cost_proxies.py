"""Cost proxies of the published heuristics: a number for each piece, in any unit."""

import math
from collections.abc import Callable

from autoshard.workload.tables import Piece

COST_PROXIES: dict[str, Callable[[Piece], float]] = {
    "dim": lambda piece: piece.width,
    "size": lambda piece: piece.width * piece.table.rows,
    "lookup": lambda piece: piece.width * piece.table.pooling_factor,
    "size_lookup": lambda piece: (
        piece.width * piece.table.pooling_factor * math.log(piece.table.rows + 1)
    ),
}
