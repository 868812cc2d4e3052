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
from autoshard.integration.plans.table_shardings import DENSE, FUSED, TableSharding, table_shardings
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
    size, device = topology.intra_group_size, topology.compute_device
    shardings = table_shardings(plan, known.priced, topology.world_size, device, size, known.types)
    return [_placed(option, shardings[name]) for name, option in known.options.items()]


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


def _placed(option: ShardingOption, sharding: TableSharding) -> ShardingOption:
    """Returns a copy of the option, sharded and placed so."""
    made = copy.deepcopy(option)
    made.sharding_type, made.compute_kernel = sharding.kind, sharding.kernel
    made.partition_by = get_partition_by_type(sharding.kind)
    made.shards = [
        Shard(size=list(sizes), offset=list(offsets), rank=rank)
        for offsets, sizes, rank in sharding.parts
    ]
    if sharding.kernel not in (FUSED, DENSE):  # else constraints of users stay
        made.cache_params = sharding.cache
    return made
