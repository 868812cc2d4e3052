"""Splits tables into training, validation and test sets.

The split follows from a hash of how a table's rows are looked up. It is the same in every store,
file and process, for each column slice and under any name. So no test table is ever in training
data.
"""

from collections.abc import Sequence
from typing import Literal

from autoshard.workload.tables.table import EmbeddingTable, Shard, digest

Part = Literal["train", "validation", "test"]

PARTS: dict[Part, float] = {"train": 0.7, "validation": 0.1, "test": 0.2}


def part_of(table: EmbeddingTable) -> Part:
    """Returns the part that a table belongs to."""
    place = int(digest(["part", table.access_digest])[:8], 16) / 2**32
    for part, share in PARTS.items():
        if place < share:
            return part
        place -= share
    return "test"


def part_of_shard(shard: Shard) -> Part | None:
    """Returns the common part of a shard's tables; None if it mixes parts."""
    parts = {part_of(piece.table) for piece in shard.pieces}
    return parts.pop() if len(parts) == 1 else None


def tables_by_part(tables: Sequence[EmbeddingTable]) -> dict[Part, list[EmbeddingTable]]:
    """Returns the tables of each part, which may be empty."""
    parts: dict[Part, list[EmbeddingTable]] = {part: [] for part in PARTS}
    for table in tables:
        parts[part_of(table)].append(table)
    return parts
