"""Random shards, tasks and all-to-alls, for training and testing cost models."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.workload.errors import UserError
from autoshard.workload.tables.operators import OperatorOptions
from autoshard.workload.tables.parts import PARTS, tables_by_part
from autoshard.workload.tables.table import DIM_STEP, EmbeddingTable, Piece, Shard
from autoshard.workload.tasks.task import Device, ShardingTask

MIN_TASK_TABLES, MAX_TASK_TABLES, MAX_TASK_DEVICES = 30, 100, 8

_TRIES_PER_SHARD = 50
_CANDIDATES = 4  # tables drawn for each table of a shard, where some may not fit


@dataclass(frozen=True)
class ShardLimit:
    """Limit on the weights of a shard, and on the bytes that a batch looks up, both in fp32."""

    max_bytes: float
    batch_size: int

    def filled(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Returns the pieces that fit, in their order."""
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
    limit: ShardLimit | None = None,
) -> list[Shard]:
    """Returns up to `count` different shards; fewer only if the tables do not admit more.

    All tables of a shard belong to one part (`workload.tables.parts`), so that a shard serves
    either training or testing. Numbers of tables are log-uniform, because costs in plans vary
    widely.

    Args:
        tables: Tables to draw from.
        count: Maximum number of shards.
        max_tables: Maximum number of tables of a shard.
        seed: Seed of the draws.
        augment: Draws column slices as NeuroShard does: halves each dim a random number of times.
        limit: Limit of a shard. Tables that exceed it are replaced by others.
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
        drawn = size if limit is None else min(_CANDIDATES * size, len(group))
        chosen = rng.choice(len(group), size=drawn, replace=False)
        pieces = [group[number].whole() for number in chosen]
        if augment:
            pieces = [_narrowed(piece, rng) for piece in pieces]
        if limit is not None:
            pieces = limit.filled(pieces)[:size]
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
    """Returns `count` tasks of 30 to 100 tables (or all, if there are fewer) on 2 to 8 devices.

    Each device has `memory_bytes`.
    """
    rng = np.random.default_rng([seed, len(tables), count])
    tasks = []
    for _ in range(count):
        largest = min(MAX_TASK_TABLES, len(tables))
        size = int(rng.integers(min(MIN_TASK_TABLES, largest), largest + 1))
        chosen = rng.choice(len(tables), size=size, replace=False)
        devices = Device.uniform(int(rng.integers(2, MAX_TASK_DEVICES + 1)), memory_bytes)
        picked = tuple(replace(tables[n], name=f"t{n}") for n in sorted(chosen.tolist()))
        tasks.append(ShardingTask(picked, devices, batch_size, operator))
    return tasks


def random_exchanges(
    tables: Sequence[EmbeddingTable], count: int, max_ranks: int, seed: int = 0
) -> list[tuple[int, ...]]:
    """Returns the columns of each rank, for up to `count` different all-to-alls.

    Random tables are assigned to 2 to `max_ranks` ranks.
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
