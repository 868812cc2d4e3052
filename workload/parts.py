"""Which tables a model may learn from, and which it is tested on.

The part of a table follows from how its rows are looked up, not from a list: it is the same in
every store, file and process, for each of its column slices and under any name. So a table that a
model is tested on has never been in anything that a model learned from.
"""

from collections.abc import Sequence
from typing import Literal

from autoshard.workload.tables import EmbeddingTable, Shard, digest

Part = Literal["train", "validation", "test"]

PARTS: dict[Part, float] = {"train": 0.7, "validation": 0.1, "test": 0.2}


def part_of(table: EmbeddingTable) -> Part:
    """The part that the table belongs to."""
    place = int(digest(["part", table.access_digest])[:8], 16) / 2**32
    for part, share in PARTS.items():
        if place < share:
            return part
        place -= share
    return "test"


def part_of_shard(shard: Shard) -> Part | None:
    """The part of all of the shard's tables; None if it mixes parts."""
    parts = {part_of(piece.table) for piece in shard.pieces}
    return parts.pop() if len(parts) == 1 else None


def tables_by_part(tables: Sequence[EmbeddingTable]) -> dict[Part, list[EmbeddingTable]]:
    """The tables of each part; a part may be empty if there are few tables."""
    parts: dict[Part, list[EmbeddingTable]] = {part: [] for part in PARTS}
    for table in tables:
        parts[part_of(table)].append(table)
    return parts
