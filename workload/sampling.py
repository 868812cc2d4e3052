"""Random shards, tasks and all-to-alls: what cost models learn from and are tested on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.workload.errors import UserError
from autoshard.workload.operators import OperatorOptions
from autoshard.workload.parts import PARTS, tables_by_part
from autoshard.workload.tables import DIM_STEP, EmbeddingTable, Piece, Shard
from autoshard.workload.tasks import Device, ShardingTask

FEWEST_TASK_TABLES, MAX_TASK_TABLES, MAX_TASK_DEVICES = 30, 100, 8

_TRIES_PER_SHARD = 50
_DRAWN_FOR_ROOM = 4  # tables for each one of a shard, where some may not fit


@dataclass(frozen=True)
class Room:
    """What a shard may take: bytes of its weights, and as many that a batch looks up, in fp32."""

    max_bytes: float
    batch_size: int

    def filled(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Of the slices, in their order, those that there still is room for."""
        weights = lookups = 0.0
        kept = []
        for piece in pieces:
            shard = Shard((piece,))
            more = weights + shard.weight_bytes, lookups + shard.looked_up_bytes(self.batch_size)
            if max(more) <= self.max_bytes:
                weights, lookups = more
                kept.append(piece)
        return kept


def random_shards(
    tables: Sequence[EmbeddingTable],
    count: int,
    max_tables: int,
    seed: int = 0,
    augment: bool = False,
    room: Room | None = None,
) -> list[Shard]:
    """Up to `count` different shards of 1 to `max_tables` tables; the same for the same arguments.

    All tables of a shard are of one part (`workload.parts`), so that each shard serves either
    learning or testing. Sizes are log-uniform: costs spread over as wide a range as plans need.
    `augment` takes NeuroShard's column slices: each table's dim is halved a random number of
    times, down to 4. With `room`, tables that do not fit into a shard any more are replaced by
    others. Fewer shards come back only if the tables admit no more different ones.
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
        drawn = size if room is None else min(_DRAWN_FOR_ROOM * size, len(group))
        chosen = rng.choice(len(group), size=drawn, replace=False)
        pieces = [group[number].whole() for number in chosen]
        if augment:
            pieces = [_narrowed(piece, rng) for piece in pieces]
        if room is not None:
            pieces = room.filled(pieces)[:size]
        if pieces:
            shard = Shard(tuple(pieces))
            shards.setdefault(shard.digest, shard)
        if len(shards) == count:
            break
    return list(shards.values())


def _narrowed(piece: Piece, rng: np.random.Generator) -> Piece:
    widths = [piece.width]
    while widths[-1] % (2 * DIM_STEP) == 0:
        widths.append(widths[-1] // 2)
    return Piece(piece.table, 0, int(rng.choice(widths)))


def random_tasks(
    tables: Sequence[EmbeddingTable],
    count: int,
    batch_size: int,
    operator: OperatorOptions,
    memory_bytes: int,
    seed: int = 0,
) -> list[ShardingTask]:
    """`count` tasks of 30 to 100 of the tables (or all, if there are fewer) on 2 to 8 devices.

    Every device may fill `memory_bytes`.
    """
    rng = np.random.default_rng([seed, len(tables), count])
    tasks = []
    for _ in range(count):
        most = min(MAX_TASK_TABLES, len(tables))
        size = int(rng.integers(min(FEWEST_TASK_TABLES, most), most + 1))
        chosen = rng.choice(len(tables), size=size, replace=False)
        devices = Device.uniform(int(rng.integers(2, MAX_TASK_DEVICES + 1)), memory_bytes)
        picked = tuple(replace(tables[n], name=f"t{n}") for n in sorted(chosen.tolist()))
        tasks.append(ShardingTask(picked, devices, batch_size, operator))
    return tasks


def random_exchanges(
    tables: Sequence[EmbeddingTable], count: int, max_ranks: int, seed: int = 0
) -> list[tuple[int, ...]]:
    """Columns of each rank of up to `count` different all-to-alls.

    Random tables are dealt to 2 to `most_ranks` ranks.
    """
    rng = np.random.default_rng([seed, len(tables), max_ranks])
    found: dict[tuple[int, ...], None] = {}
    for _ in range(count * _TRIES_PER_SHARD):
        ranks = int(rng.integers(2, max_ranks + 1))
        size = int((len(tables) + 1) ** rng.random())
        owners = rng.integers(0, ranks, size=size)
        dims = np.zeros(ranks, np.int64)
        for owner, number in zip(owners, rng.choice(len(tables), size, replace=False), strict=True):
            dims[owner] += tables[number].whole().output_width
        found.setdefault(tuple(dims.tolist()))
        if len(found) == count:
            break
    return list(found)
