"""Converts plans to and from those of DistributedModelParallel."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import distributed, nn
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
from torchrec.distributed import types as torchrec
from torchrec.distributed.sharding_plan import placement

from autoshard.integration.models.bags import BagTable, bag_tables, name_of
from autoshard.integration.models.names import device_type_here
from autoshard.integration.plans.slower_memory import kernel_of
from autoshard.integration.plans.table_shardings import (
    BY_COLUMNS,
    BY_ROWS,
    COPIED,
    DENSE,
    FUSED,
    TableSharding,
    one_per_rank,
    parts_of,
    ranks_of_node,
    table_shardings,
)
from autoshard.workload.plans.placements import Placement
from autoshard.workload.plans.plan import PlanError, ShardingPlan
from autoshard.workload.tables.table import DIM_STEP, rows_of_block
from autoshard.workload.tasks.task import ShardingTask
from autoshard.workload.ways.option import DATA_PARALLEL, ShardingOption

_FUSED = (FUSED, kernel_of(0), kernel_of(1))  # all rows in device memory, none, or some in a cache
_LOAD_FACTOR = 0.2  # TorchRec's, of caches that a plan does not describe


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
    ranks = _world_size(world_size, plan)
    device = device_type or device_type_here()
    modules: dict[str, torchrec.EmbeddingModuleShardingPlan] = {}
    for name, sharding in table_shardings(plan, tables, ranks, device).items():
        path, config = tables[name].path, tables[name].config
        module = modules.setdefault(path, torchrec.EmbeddingModuleShardingPlan())
        module[config.name] = _parameter_sharding(sharding, device, ranks)
    return torchrec.ShardingPlan(dict(modules))


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


def with_even_columns(plan: ShardingPlan) -> ShardingPlan:
    """Returns the plan with equally wide pieces of each table.

    TorchRec's `load_state_dict` of a sharded state requires equal widths (`load_state` does not). A
    table stays on as many of its ranks as its columns can be divided by, those with most columns.
    Memory and costs change, so check and price the new plan.
    """
    even = []
    for name, placements in plan.by_table().items():
        if len(placements[0].devices) > 1:
            even += placements
            continue
        merged = sorted(one_per_rank(placements), key=lambda piece: (-piece.width, piece.start))
        steps = sum(piece.width for piece in merged) // DIM_STEP
        count = max(n for n in range(1, len(merged) + 1) if steps % n == 0)
        kept = sorted(merged[:count], key=lambda piece: piece.start)
        width = steps // count * DIM_STEP
        even += [Placement(name, n * width, width, p.device) for n, p in enumerate(kept)]
    return replace(plan, placements=tuple(sorted(even)))


def _parameter_sharding(
    sharding: TableSharding, device: str, ranks: int
) -> torchrec.ParameterSharding:
    local_size = ranks_of_node(ranks)
    shards = [
        ShardMetadata(
            shard_offsets=list(offsets),
            shard_sizes=list(sizes),
            placement=placement(device, rank, local_size),
        )
        for offsets, sizes, rank in sharding.parts
    ]
    return torchrec.ParameterSharding(
        sharding_type=sharding.kind,
        compute_kernel=sharding.kernel,
        ranks=[rank for _, _, rank in sharding.parts],
        sharding_spec=None if sharding.kind == COPIED else EnumerableShardingSpec(shards),
        cache_params=sharding.cache,
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
    if sharding.sharding_type not in (*BY_COLUMNS, *BY_ROWS):
        raise PlanError(
            f"table {table} is sharded {sharding.sharding_type}: plans here know "
            f"{', '.join((*BY_COLUMNS, *BY_ROWS, COPIED))}"
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
