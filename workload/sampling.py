"""Random shards to measure: what cost models learn from."""

from collections.abc import Sequence

import numpy as np

from workload.errors import UserError
from workload.parts import PARTS, tables_by_part
from workload.tables import DIM_STEP, EmbeddingTable, Shard, TableSlice

_TRIES_PER_SHARD = 50


def random_shards(
    tables: Sequence[EmbeddingTable],
    count: int,
    max_tables: int,
    seed: int = 0,
    augment: bool = False,
) -> list[Shard]:
    """Up to `count` different shards of 1 to `max_tables` tables; the same for the same arguments.

    All tables of a shard are of one part (`workload.parts`), so that each shard serves either
    learning or testing. Sizes are log-uniform: costs spread over as wide a range as plans need.
    `augment` takes NeuroShard's column slices: each table's dim is halved a random number of
    times, down to 4. Fewer shards come back only if the tables admit no more different ones.
    """
    if count < 1 or max_tables < 1:
        raise UserError(f"shards and tables must be at least 1, got {count} and {max_tables}")
    rng = np.random.default_rng([seed, len(tables)])
    parts = {part: members for part, members in tables_by_part(tables).items() if members}
    shares = np.array([PARTS[part] for part in parts])
    groups = list(parts.values())
    shards: dict[str, Shard] = {}
    for _ in range(count * _TRIES_PER_SHARD):
        group = groups[rng.choice(len(groups), p=shares / shares.sum())]
        size = int((min(max_tables, len(group)) + 1) ** rng.random())
        chosen = rng.choice(len(group), size=size, replace=False)
        slices = [group[number].whole() for number in chosen]
        if augment:
            slices = [_halved(piece, rng) for piece in slices]
        shard = Shard(tuple(slices))
        shards.setdefault(shard.digest, shard)
        if len(shards) == count:
            break
    return list(shards.values())


def _halved(piece: TableSlice, rng: np.random.Generator) -> TableSlice:
    widths = [piece.width]
    while widths[-1] % (2 * DIM_STEP) == 0:
        widths.append(widths[-1] // 2)
    return TableSlice(piece.table, 0, int(rng.choice(widths)))
