"""Plans as options of TorchRec's planner, and the storage that these take."""

import copy
from collections.abc import Sequence

from torchrec.distributed.planner.enumerators import get_partition_by_type
from torchrec.distributed.planner.types import (
    PlannerError,
    PlannerErrorType,
    Shard,
    ShardingOption,
    Topology,
)
from torchrec.distributed.planner.utils import storage_repr_in_gb

from autoshard.integration.models.bags import name_of
from autoshard.integration.planning.problem import storage_of
from autoshard.integration.planning.tables import ModelOptions
from autoshard.integration.plans.conversion import (
    COPIED,
    DENSE,
    FUSED,
    cached_rows_on,
    check_hot_rows,
    parts_of,
    pieces_of,
    sharding_types,
    with_hot_tables,
)
from autoshard.integration.plans.slower_memory import put_in_host_memory
from autoshard.workload.plans.placements import Placement
from autoshard.workload.plans.plan import ShardingPlan


def torchrec_options(
    plan: ShardingPlan, known: ModelOptions, topology: Topology
) -> list[ShardingOption]:
    """Returns a plan as TorchRec's options of the tables that have a price, without estimates.

    Args:
        plan: The plan.
        known: The tables.
        topology: Topology of the ranks.

    Raises:
        PlanError: The plan is of another model, or of other ranks.
    """
    tables, ranks = known.priced, topology.world_size
    check_hot_rows(plan, tables)
    plan = with_hot_tables(plan)
    pieces = pieces_of(plan, tables, ranks, topology.intra_group_size)
    types = sharding_types(pieces, tables, ranks, known.types)
    cached, made = cached_rows_on(topology.compute_device, plan), list[ShardingOption]()
    for name, option in known.options.items():
        if name in pieces:
            made.append(_placed(option, types[name], FUSED, pieces[name]))
        else:
            made.append(_copied(option, ranks))
        if name in cached:
            put_in_host_memory(made[-1], tables[name].described(), cached[name])
    return made


def missing_storage(options: Sequence[ShardingOption], storage: Topology) -> list[int]:
    """Returns the bytes that each rank lacks for these options, by TorchRec's estimate."""
    field, taken = storage_of(storage), [0] * storage.world_size
    for option in options:
        for shard in option.shards:
            taken[shard.rank] += int(getattr(shard.storage, field))
    free = (int(getattr(device.storage, field)) for device in storage.devices)
    return [max(0, took - had) for took, had in zip(taken, free, strict=True)]


def take_storage(options: Sequence[ShardingOption], free: Topology) -> None:
    """Takes the storage of placed options from a topology, and adds their time to its devices.

    Raises:
        PlannerError: A rank has too little.
    """
    for option in options:
        for shard in option.shards:
            device = free.devices[shard.rank]
            if not shard.storage.fits_in(device.storage):
                raise PlannerError(
                    f"rank {shard.rank} has {storage_repr_in_gb(device.storage)} left, and columns "
                    f"{shard.offset[1]} to {shard.offset[1] + shard.size[1]} of table "
                    f"{name_of(option.path, option.name)} take {storage_repr_in_gb(shard.storage)}",
                    PlannerErrorType.PARTITION,
                )
            device.storage -= shard.storage
            device.perf += shard.perf


def _copied(option: ShardingOption, ranks: int) -> ShardingOption:
    """Returns a copy of the option with a copy of the table on each rank."""
    dim = option.tensor.shape[1]
    everywhere = [Placement(option.name, 0, dim, rank) for rank in range(ranks)]
    return _placed(option, COPIED, DENSE, everywhere)


def _placed(
    option: ShardingOption, kind: str, kernel: str, pieces: Sequence[Placement]
) -> ShardingOption:
    """Returns a copy of the option, sharded and placed like the pieces."""
    made = copy.deepcopy(option)
    made.sharding_type = kind
    made.partition_by = get_partition_by_type(kind)
    made.compute_kernel = kernel
    rows = option.tensor.shape[0]
    made.shards = [
        Shard(size=list(sizes), offset=list(offsets), rank=rank)
        for offsets, sizes, rank in parts_of(pieces, rows)
    ]
    return made
