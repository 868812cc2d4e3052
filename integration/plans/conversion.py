"""Converts plans to and from those of DistributedModelParallel."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import distributed, nn
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
from torchrec.distributed import types as torchrec
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.sharding_plan import placement

from autoshard.integration.models.bags import BagTable, bag_tables, name_of
from autoshard.integration.models.names import device_type_here
from autoshard.integration.plans.slower_memory import kernel_of, put_in_host_memory
from autoshard.workload.plans.placements import Placement
from autoshard.workload.plans.plan import PlanError, ShardingPlan
from autoshard.workload.tables.table import DIM_STEP, hot_name, rows_of_block
from autoshard.workload.tasks.task import ShardingTask
from autoshard.workload.ways.option import DATA_PARALLEL, ShardingOption

FUSED = EmbeddingComputeKernel.FUSED.value
_FUSED = (FUSED, kernel_of(0), kernel_of(1))  # all rows in device memory, none, or some in a cache
DENSE = EmbeddingComputeKernel.DENSE.value  # that of copies
COPIED = torchrec.ShardingType.DATA_PARALLEL.value
_LOAD_FACTOR = 0.2  # TorchRec's, of caches that a plan does not describe
_WHOLE = torchrec.ShardingType.TABLE_WISE.value
_SPLIT = torchrec.ShardingType.COLUMN_WISE.value
# All of them place columns on ranks; they differ in how a planner may select the ranks.
_BY_COLUMNS = (_WHOLE, _SPLIT, torchrec.ShardingType.TABLE_COLUMN_WISE.value)
_ROWS = torchrec.ShardingType.ROW_WISE.value
_ROWS_OF_NODE = torchrec.ShardingType.TABLE_ROW_WISE.value
_GRID = torchrec.ShardingType.GRID_SHARD.value
BY_ROWS = (_ROWS, _ROWS_OF_NODE, _GRID)


def to_torchrec(
    plan: ShardingPlan,
    model: nn.Module,
    world_size: int | None = None,
    device_type: str | None = None,
) -> torchrec.ShardingPlan:
    """Returns the plan for `DistributedModelParallel(plan=)`; device i is rank i.

    A plan with replica groups is that of a group, for `DMPCollection(plan=)`, which changes it in
    place; `replica_options` returns what else that takes.

    A rank can hold one piece of a table. Several are merged, and columns are assigned anew. Memory
    is not checked; `plan.check(task)` does.

    Copied tables are data-parallel: the optimizer of the model's dense part has to train them, not
    the one that is fused into the backward pass of the others.

    Tables in host memory run in `fused_uvm_caching`, or `fused_uvm` without a cache, on GPUs alone.

    Row-wise Adagrad keeps one number per row of a piece. A split table therefore trains slightly
    differently from a whole one. SGD and Adagrad do not. Blocks of rows train as whole tables do.

    Args:
        plan: Plan for the tables of `model`, with the names of `tables_of`.
        model: Model that is not sharded yet; it may be on device meta.
        world_size: Number of ranks, of all replica groups together. Default: that of the process
            group, else the plan's.
        device_type: torch's type of the ranks' devices. Default: `device_type_here`.

    Raises:
        PlanError: A table, column or rank does not match; TorchRec checks little of this.
    """
    return plan_of_tables(plan, bag_tables(model), world_size, device_type)


def plan_of_tables(
    plan: ShardingPlan,
    tables: Mapping[str, BagTable],
    world_size: int | None = None,
    device_type: str | None = None,
) -> torchrec.ShardingPlan:
    """Returns the same for these tables of a model."""
    check_hot_rows(plan, tables)
    plan = with_hot_tables(plan)
    ranks = _world_size(world_size, plan)
    device = device_type or device_type_here()
    modules: dict[str, torchrec.EmbeddingModuleShardingPlan] = {}
    pieces = pieces_of(plan, tables, ranks)
    types = sharding_types(pieces, tables, ranks)
    cached = cached_rows_on(device, plan)
    for name, table in tables.items():
        module = modules.setdefault(table.path, torchrec.EmbeddingModuleShardingPlan())
        module[table.config.name] = (
            _sharding(table, types[name], pieces[name], device, ranks)
            if name in pieces
            else torchrec.ParameterSharding(COPIED, DENSE, list(range(ranks)))
        )
        if name in cached:
            put_in_host_memory(module[table.config.name], table.described(), cached[name])
    return torchrec.ShardingPlan(dict(modules))


def cached_rows_on(device: str, plan: ShardingPlan) -> dict[str, int]:
    """Returns `plan.cached_rows`; PlanError if there are any and devices have no such kernels.

    Args:
        device: torch's type of the devices.
        plan: The plan.
    """
    cached = plan.cached_rows
    if cached and device == "cpu":
        raise PlanError(
            f"the plan keeps table {next(iter(cached))} in host memory with a cache on its "
            "device, which TorchRec has for GPUs alone: make a plan without --host-memory-gb"
        )
    return cached


def with_hot_tables(plan: ShardingPlan) -> ShardingPlan:
    """Returns the plan for a model in which hot rows are tables of their own, which are copied."""
    options = dict[str, ShardingOption]()
    for name, option in plan.options.items():
        options[name] = replace(option, hot_rows=None)
        if option.hot_rows:
            options[hot_name(name)] = DATA_PARALLEL
    return replace(plan, options=options)


def check_hot_rows(plan: ShardingPlan, tables: Mapping[str, BagTable]) -> None:
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


def replica_options(plan: ShardingPlan) -> dict[str, Any]:
    """Returns the arguments of `DMPCollection` that say how its ranks are grouped.

    Raises:
        PlanError: The plan has no replica groups.
    """
    groups = plan.replicas
    if groups is None:
        raise PlanError(
            "the plan has no replica groups: train by DistributedModelParallel, or make a plan "
            "with shard.py --replica-group-size"
        )
    return {
        "world_size": groups.num_devices,
        "sharding_group_size": groups.group_size,
        "node_group_size": groups.node_size,
        "use_inter_host_allreduce": groups.consecutive,
    }


def _world_size(world_size: int | None, plan: ShardingPlan) -> int:
    """Returns the number of ranks that train by the plan: of one replica group, if it has some.

    Raises:
        PlanError: Another number of ranks trains than the plan's replica groups have together.
    """
    if world_size is None and distributed.is_initialized():
        world_size = distributed.get_world_size()
    groups = plan.replicas
    if groups is None:
        return world_size or plan.num_devices
    if world_size not in (None, groups.num_devices):
        raise PlanError(
            f"the plan is for {groups.count} replica groups of {groups.group_size} ranks, and "
            f"{world_size} ranks train: make a plan for {world_size} devices"
        )
    return groups.group_size


def pieces_of(
    plan: ShardingPlan,
    tables: Mapping[str, BagTable],
    ranks: int,
    ranks_of_node: int | None = None,
) -> dict[str, list[Placement]]:
    """Returns the pieces of each table that is not copied, in the order of columns, one per rank,
    or in blocks of rows.

    Args:
        plan: The plan.
        tables: Tables of the model.
        ranks: Number of ranks.
        ranks_of_node: Ranks of a node. Default: as torchrun says, else all.

    Raises:
        PlanError: The plan is for other tables, or for more ranks.
    """
    plan.check_columns([table.described() for table in tables.values()])
    if (plan.copied or plan.row_wise) and plan.num_devices != ranks:
        what = "copies" if plan.copied else "blocks of rows"
        raise PlanError(
            f"the plan has {what} for {plan.num_devices} devices, and {ranks} ranks train: make a "
            f"plan for {ranks} devices"
        )
    of_node = ranks_of_node or _ranks_of_node(ranks)
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
    return {name: _merged(placements) for name, placements in pieces.items()}


def _ranks_of_node(ranks: int) -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", ranks))


def _merged(pieces: list[Placement]) -> list[Placement]:
    """Returns one piece per rank; columns change only where pieces are merged."""
    if pieces and pieces[0].row_blocks > 1:
        return pieces
    widths: dict[int, int] = {}
    for piece in pieces:
        widths[piece.device] = widths.get(piece.device, 0) + piece.width
    merged, start = [], 0
    for rank, width in widths.items():
        merged.append(Placement(pieces[0].table, start, width, rank))
        start += width
    return merged


def sharding_types(
    pieces: Mapping[str, list[Placement]],
    tables: Mapping[str, BagTable],
    ranks: int,
    allowed: Mapping[str, frozenset[str]] | None = None,
) -> dict[str, str]:
    """Returns TorchRec's sharding type of each table that has pieces.

    Tables of different types run in separate operators and all-to-alls, one after the other. So if
    a collection has a split table, its whole tables are declared column-wise too: steps of 20
    tables on 2 cores, one or four of them split, took 0.85 to 0.91 of the time in five runs.

    Args:
        pieces: What `pieces_of` returned.
        tables: Tables of the model.
        ranks: Number of ranks.
        allowed: Sharding types that each table may have. Default: any.
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


def parts_of(
    pieces: Sequence[Placement], rows: int
) -> list[tuple[tuple[int, int], tuple[int, int], int]]:
    """Returns the parts of a table as TorchRec's shards: first row and column, numbers of rows and
    columns, and rank.
    """
    return [
        ((first, piece.start), (end - first, piece.width), rank)
        for piece in pieces
        for first, end, rank in piece.row_ranges(rows)
    ]


def with_even_columns(plan: ShardingPlan) -> ShardingPlan:
    """Returns the plan with equally wide pieces of each table.

    TorchRec's `load_state_dict` of a sharded state requires equal widths (`load_state` does not). A
    table stays on as many of its ranks as its columns can be divided by, those with most columns.
    Memory and costs change, so check and price the new plan.
    """
    even = []
    for name, placements in plan.by_table().items():
        if placements[0].row_blocks > 1:
            even += placements
            continue
        merged = sorted(_merged(placements), key=lambda piece: (-piece.width, piece.start))
        steps = sum(piece.width for piece in merged) // DIM_STEP
        count = max(n for n in range(1, len(merged) + 1) if steps % n == 0)
        kept = sorted(merged[:count], key=lambda piece: piece.start)
        width = steps // count * DIM_STEP
        even += [Placement(name, n * width, width, p.device) for n, p in enumerate(kept)]
    return replace(plan, placements=tuple(sorted(even)))


def _sharding(
    table: BagTable, sharding_type: str, pieces: list[Placement], device: str, ranks: int
) -> torchrec.ParameterSharding:
    local_size = _ranks_of_node(ranks)
    parts = parts_of(pieces, table.config.num_embeddings)
    return torchrec.ParameterSharding(
        sharding_type=sharding_type,
        compute_kernel=FUSED,
        ranks=[rank for _, _, rank in parts],
        sharding_spec=EnumerableShardingSpec(
            [
                ShardMetadata(
                    shard_offsets=list(offsets),
                    shard_sizes=list(sizes),
                    placement=placement(device, rank, local_size),
                )
                for offsets, sizes, rank in parts
            ]
        ),
    )


def from_torchrec(plan: torchrec.ShardingPlan, task: ShardingTask) -> ShardingPlan:
    """Returns a plan of TorchRec, such as `dmp.plan`, as a plan for the task; rank i is device i.

    Raises:
        PlanError: A table is neither sharded by columns or even blocks of rows in a fused kernel,
            in device or host memory, nor copied to all ranks, or it is not in the task.
    """
    shardings, ranks = dict[str, torchrec.ParameterSharding](), len(task.devices)
    for path, module in plan.plan.items():
        if not isinstance(module, torchrec.EmbeddingModuleShardingPlan):
            raise PlanError(f"module {path} has no tables: leave it out of the plan")
        shardings |= {name_of(path, parameter): each for parameter, each in module.items()}
    ours = plan_of_shardings(shardings, task)
    for piece in ours.placements:
        if piece.device >= ranks:
            raise PlanError(
                f"table {piece.table} is on rank {piece.device}, and the task has {ranks} devices"
            )
    ours.check_columns(task.tables)
    return ours


def plan_of_shardings(
    shardings: Mapping[str, torchrec.ParameterSharding], task: ShardingTask
) -> ShardingPlan:
    """Returns the plan for a task whose tables TorchRec shards so; PlanError as `from_torchrec`."""
    placements, options = list[Placement](), dict[str, ShardingOption]()
    rows = {table.name: table.rows for table in task.tables}
    for name, sharding in shardings.items():
        if sharding.sharding_type == COPIED and sharding.compute_kernel == DENSE:
            options[name] = DATA_PARALLEL
            continue
        placements += placements_of(name, sharding)
        if sharding.compute_kernel != FUSED:
            options[name] = ShardingOption(cached_rows=_cached_rows(sharding, rows.get(name, 0)))
    return ShardingPlan(tuple(sorted(placements)), len(task.devices), options)


def _cached_rows(sharding: torchrec.ParameterSharding, rows: int) -> int:
    """Returns the rows that a cache of a table with so many rows has room for."""
    if sharding.compute_kernel == kernel_of(0):
        return 0
    cache = sharding.cache_params
    share = None if cache is None else cache.load_factor
    return int((_LOAD_FACTOR if share is None else share) * rows)


def placements_of(table: str, sharding: torchrec.ParameterSharding) -> list[Placement]:
    """Returns the pieces of a table; PlanError if they are not columns, or even blocks of rows, in
    the fused kernel.
    """
    if sharding.sharding_type == COPIED:
        raise PlanError(
            f"table {table} has copies in kernel {sharding.compute_kernel}: copies here run in "
            f"{DENSE}"
        )
    if sharding.sharding_type not in (*_BY_COLUMNS, *BY_ROWS):
        raise PlanError(
            f"table {table} is sharded {sharding.sharding_type}: plans here know "
            f"{', '.join((*_BY_COLUMNS, *BY_ROWS, COPIED))}"
        )
    if sharding.compute_kernel not in _FUSED:
        raise PlanError(
            f"table {table} runs in kernel {sharding.compute_kernel}: costs are known of "
            f"{', '.join(_FUSED)}"
        )
    if not isinstance(sharding.sharding_spec, EnumerableShardingSpec) or not sharding.ranks:
        raise PlanError(f"table {table} has no ranks and columns: take a plan that a planner made")
    shards = sharding.sharding_spec.shards
    found: dict[int, list[int]] = {}  # ranks by first column, in the order of rows
    widths = {shard.shard_offsets[1]: shard.shard_sizes[1] for shard in shards}
    for shard, rank in sorted(
        zip(shards, sharding.ranks, strict=True), key=lambda each: each[0].shard_offsets
    ):
        found.setdefault(shard.shard_offsets[1], []).append(rank)
    pieces = [
        Placement(table, start, widths[start], ranks[0], len(ranks))
        for start, ranks in found.items()
    ]
    rows = max(sum(shard.shard_offsets[:1] + shard.shard_sizes[:1]) for shard in shards)
    given = {((*shard.shard_offsets,), (*shard.shard_sizes,), rank)
             for shard, rank in zip(shards, sharding.ranks, strict=True)}  # fmt: skip
    if given != set(parts_of(pieces, rows)):
        size = rows_of_block(rows, pieces[0].row_blocks)
        raise PlanError(
            f"table {table} has blocks of rows that are uneven, or not on successive ranks: "
            f"TorchRec looks rows up in blocks of ceil(rows / ranks), here {size}"
        )
    return pieces
