"""Each table of a plan in TorchRec: its sharding type, kernel, parts on ranks, and cache."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from torchrec.distributed import types as torchrec
from torchrec.distributed.embedding_types import EmbeddingComputeKernel

from autoshard.integration.models.bags import BagTable
from autoshard.integration.plans.slower_memory import cache_of, kernel_of
from autoshard.workload.plans.placements import Placement
from autoshard.workload.plans.plan import PlanError, ShardingPlan
from autoshard.workload.tables.table import hot_name
from autoshard.workload.ways.option import DATA_PARALLEL, ShardingOption

FUSED = EmbeddingComputeKernel.FUSED.value
DENSE = EmbeddingComputeKernel.DENSE.value  # that of copies
COPIED = torchrec.ShardingType.DATA_PARALLEL.value
_WHOLE = torchrec.ShardingType.TABLE_WISE.value
_SPLIT = torchrec.ShardingType.COLUMN_WISE.value
# All of them place columns on ranks; they differ in how a planner may select the ranks.
BY_COLUMNS = (_WHOLE, _SPLIT, torchrec.ShardingType.TABLE_COLUMN_WISE.value)
_ROWS = torchrec.ShardingType.ROW_WISE.value
_ROWS_OF_NODE = torchrec.ShardingType.TABLE_ROW_WISE.value
_GRID = torchrec.ShardingType.GRID_SHARD.value
BY_ROWS = (_ROWS, _ROWS_OF_NODE, _GRID)

Part = tuple[tuple[int, int], tuple[int, int], int]


class TableSharding(NamedTuple):
    """How TorchRec shards a table.

    Args:
        kind: TorchRec's sharding type.
        kernel: Its kernel.
        parts: First row and column of each shard, its numbers of rows and columns, and its rank.
        cache: The cache in device memory of a table in host memory, if it has one.
    """

    kind: str
    kernel: str
    parts: list[Part]
    cache: torchrec.CacheParams | None = None


def table_shardings(
    plan: ShardingPlan,
    tables: Mapping[str, BagTable],
    ranks: int,
    device: str,
    node_size: int | None = None,
    allowed: Mapping[str, frozenset[str]] | None = None,
) -> dict[str, TableSharding]:
    """Returns how TorchRec shards each table of a model by a plan.

    Args:
        plan: The plan.
        tables: Tables of the model.
        ranks: Number of ranks.
        device: torch's type of their devices.
        node_size: Ranks of a node. Default: as torchrun says, else all.
        allowed: Sharding types that each table may have. Default: any.

    Raises:
        PlanError: The plan is for other tables, or for other ranks.
    """
    _check_hot_rows(plan, tables)
    plan = _with_hot_tables(plan)
    pieces = _pieces_of(plan, tables, ranks, node_size)
    kinds = _sharding_types(pieces, tables, ranks, allowed)
    cached, found = _cached_rows_on(device, plan), dict[str, TableSharding]()
    for name, table in tables.items():
        rows, kernel, cache = table.config.num_embeddings, FUSED, None
        if name not in pieces:
            dim = table.config.embedding_dim
            everywhere = [Placement(name, 0, dim, rank) for rank in range(ranks)]
            found[name] = TableSharding(COPIED, DENSE, parts_of(everywhere, rows))
            continue
        if name in cached:
            kernel = kernel_of(cached[name])
            cache = cache_of(table.described(), cached[name])
        found[name] = TableSharding(kinds[name], kernel, parts_of(pieces[name], rows), cache)
    return found


def _cached_rows_on(device: str, plan: ShardingPlan) -> dict[str, int]:
    """Returns `plan.cached_rows`; PlanError if there are any and devices have no such kernels."""
    cached = plan.cached_rows
    if cached and device == "cpu":
        raise PlanError(
            f"the plan keeps table {next(iter(cached))} in host memory with a cache on its "
            "device, which TorchRec has for GPUs alone: make a plan without --host-memory-gb"
        )
    return cached


def _with_hot_tables(plan: ShardingPlan) -> ShardingPlan:
    """Returns the plan for a model in which hot rows are tables of their own, which are copied."""
    options = dict[str, ShardingOption]()
    for name, option in plan.options.items():
        options[name] = replace(option, hot_rows=None)
        if option.hot_rows:
            options[hot_name(name)] = DATA_PARALLEL
    return replace(plan, options=options)


def _check_hot_rows(plan: ShardingPlan, tables: Mapping[str, BagTable]) -> None:
    """Raises PlanError unless the model has the hot rows of a plan."""
    for name, count in plan.hot_rows.items():
        if not count and name in tables and not tables[name].has_hashed_ids:
            raise PlanError(
                f"the plan numbers rows of table {name} by a hash of their ids, and the model does "
                "not: call with_hot_rows(model, plan) first"
            )
        hot = tables.get(hot_name(name))
        found = 0 if hot is None else hot.config.num_embeddings
        if found != count:
            raise PlanError(
                f"the plan has {count} hot rows of table {name}, and the model {found}: call "
                "with_hot_rows(model, plan, load_hot_ids(FILE)) first"
            )


def _pieces_of(
    plan: ShardingPlan, tables: Mapping[str, BagTable], ranks: int, node_size: int | None
) -> dict[str, list[Placement]]:
    """Returns the pieces of each table that is not copied, in the order of columns, one per rank,
    or in blocks of rows.
    """
    plan.check_columns([table.described() for table in tables.values()])
    if (plan.copied or plan.row_wise) and plan.num_devices != ranks:
        what = "copies" if plan.copied else "blocks of rows"
        raise PlanError(
            f"the plan has {what} for {plan.num_devices} devices, and {ranks} ranks train: make a "
            f"plan for {ranks} devices"
        )
    of_node = node_size or ranks_of_node(ranks)
    if plan.replicas:
        of_node = plan.replicas.node_size
    for name, count in plan.row_wise.items():
        if count not in (ranks, of_node):
            raise PlanError(
                f"table {name} is in {count} blocks of rows: TorchRec shards rows over all {ranks} "
                f"ranks, or those of a node, which are {of_node} here: set "
                f"LOCAL_WORLD_SIZE to {count}, as torchrun does"
            )
    pieces: dict[str, list[Placement]] = {name: [] for name in tables if name not in plan.copied}
    for piece in sorted(plan.placements):
        if not 0 <= piece.device < ranks:
            raise PlanError(
                f"table {piece.table} is on rank {piece.device}, and {ranks} ranks train: "
                f"make a plan for {ranks} devices, or start more ranks"
            )
        pieces[piece.table].append(piece)
    return {name: one_per_rank(placements) for name, placements in pieces.items()}


def ranks_of_node(ranks: int) -> int:
    """Returns the ranks of a node, as torchrun says; all of them if it does not."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", ranks))


def one_per_rank(pieces: list[Placement]) -> list[Placement]:
    """Returns one piece per rank; columns change only where pieces are merged."""
    if pieces and len(pieces[0].devices) > 1:
        return pieces
    widths: dict[int, int] = {}
    for piece in pieces:
        widths[piece.device] = widths.get(piece.device, 0) + piece.width
    found, start = [], 0
    for rank, width in widths.items():
        found.append(Placement(pieces[0].table, start, width, rank))
        start += width
    return found


def _sharding_types(
    pieces: Mapping[str, list[Placement]],
    tables: Mapping[str, BagTable],
    ranks: int,
    allowed: Mapping[str, frozenset[str]] | None,
) -> dict[str, str]:
    """Returns TorchRec's sharding type of each table that has pieces.

    Tables of different types run in separate operators and all-to-alls, one after the other. So if
    a collection has a split table, its whole tables are declared column-wise too: steps of 20
    tables on 2 cores, one or four of them split, took 0.85 to 0.91 of the time in five runs.
    """
    row_wise = {
        name: _ROWS if parts[0].row_blocks == ranks else _ROWS_OF_NODE if len(parts) == 1 else _GRID
        for name, parts in pieces.items()
        if parts[0].row_blocks > 1
    }
    others = {name: parts for name, parts in pieces.items() if name not in row_wise}
    split = {tables[name].path for name, parts in others.items() if len(parts) > 1}
    found = {name: _SPLIT if tables[name].path in split else _WHOLE for name in others}
    if allowed is not None:
        for name, kind in found.items():
            if kind not in allowed[name] and len(pieces[name]) == 1:  # either will do
                found[name] = _WHOLE if kind == _SPLIT else _SPLIT
    return row_wise | found


def parts_of(pieces: Sequence[Placement], rows: int) -> list[Part]:
    """Returns the parts of a table as `TableSharding` has them."""
    return [
        ((first, piece.start), (end - first, piece.width), rank)
        for piece in pieces
        for first, end, rank in piece.row_ranges(rows)
    ]
