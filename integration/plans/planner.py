"""Plans of this package inside TorchRec's planner, with its storage checks and its report."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torchrec.distributed.planner.enumerators import get_partition_by_type
from torchrec.distributed.planner.planners import EmbeddingShardingPlanner
from torchrec.distributed.planner.types import (
    Enumerator,
    ParameterConstraints,
    Partitioner,
    PlannerError,
    PlannerErrorType,
    Proposer,
    Shard,
    ShardingOption,
    Topology,
)
from torchrec.distributed.planner.utils import sharder_name, storage_repr_in_gb
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from autoshard.integration.models.bags import BagTable, check_module, name_of
from autoshard.integration.models.tables import described
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
from autoshard.workload.errors import UserError
from autoshard.workload.plans.placements import Placement
from autoshard.workload.plans.plan import ShardingPlan
from autoshard.workload.plans.protocols import Sharder
from autoshard.workload.tasks.constraints import Constraints
from autoshard.workload.tasks.task import Device, ShardingTask


def planner(
    decider: ShardingPlan | Sharder,
    topology: Topology,
    batch_size: int,
    constraints: Mapping[str, ParameterConstraints] | None = None,
    batches: Iterable[Any] | None = None,
    rules: Constraints | None = None,
    **options: Any,
) -> EmbeddingShardingPlanner:
    """Returns TorchRec's planner, whose `plan(module, sharders)` returns our plan.

    TorchRec estimates and checks the storage, and raises PlannerError if a rank has too little. Its
    storage reservation also reduces the memory of the task that a sharder gets.

    Args:
        decider: Plan for the tables of the model, or sharder that makes one.
        topology: Ranks and their storage.
        batch_size: Samples of one rank.
        constraints: Pooling factors of tables, for the sharder and for the planner's estimates.
            Their other fields are not supported.
        batches: Batches of one rank, in which lookups are counted for the sharder.
        rules: Placement constraints for the sharder.
        options: Other options of EmbeddingShardingPlanner, such as storage_reservation or debug.
    """
    for name, given in (constraints or {}).items():
        if given.sharding_types or given.compute_kernels or given.min_partition:
            raise UserError(
                f"constraints of {name}: sharding_types, compute_kernels and min_partition follow "
                "from our plan: use `rules` instead"
            )
    adapter = _PlannerAdapter(decider, topology, batch_size, constraints, batches, rules)
    return EmbeddingShardingPlanner(
        topology=topology,
        batch_size=batch_size,
        proposer=adapter,
        partitioner=adapter,
        constraints=dict(constraints) if constraints else None,
        **options,
    )


class _PlannerAdapter(Proposer, Partitioner):  # type: ignore[misc]
    """Proposes once, and partitions by our plan."""

    def __init__(
        self,
        decider: ShardingPlan | Sharder,
        topology: Topology,
        batch_size: int,
        constraints: Mapping[str, ParameterConstraints] | None,
        batches: Iterable[Any] | None,
        rules: Constraints | None,
    ) -> None:
        self._rules = rules
        self._decider = decider
        self._topology = topology
        self._batch_size = batch_size
        self._constraints = constraints
        self._batches = batches
        self._tables: dict[str, BagTable] = {}
        self._options: list[ShardingOption] = []
        self._proposed = False
        self._enumerator: Any = None
        self._fused_params: Mapping[str, Any] | None = None

    def load(
        self, search_space: Sequence[ShardingOption], enumerator: Enumerator | None = None
    ) -> None:
        """Takes any one option of each table, which our plan replaces later."""
        self._enumerator = enumerator
        options: dict[str, ShardingOption] = {}
        self._tables = {}
        for option in search_space:
            path, collection = option.module
            check_module(path, collection)
            name = name_of(path, option.name)
            configs = {config.name: config for config in collection.embedding_bag_configs()}
            self._tables[name] = BagTable(path, configs[option.name], collection)
            options.setdefault(name, option)
        self._options, self._proposed = list(options.values()), False
        sharders = getattr(enumerator, "sharder_map", {})
        own = sharders.get(sharder_name(EmbeddingBagCollection))
        self._fused_params = None if own is None else own.fused_params

    def propose(self) -> list[ShardingOption] | None:
        """Returns an option of each table, once."""
        proposal = None if self._proposed else self._options
        self._proposed = True
        return proposal

    def feedback(self, *_args: Any, **_kwargs: Any) -> None:
        """Ignores feedback, because the plan is fixed."""

    def partition(
        self, proposal: Sequence[ShardingOption], storage_constraint: Topology
    ) -> list[ShardingOption]:
        """Returns our plan as options; PlannerError if a rank has too little storage."""
        plan = self._plan(storage_constraint)
        check_hot_rows(plan, self._tables)
        plan = with_hot_tables(plan)
        pieces = pieces_of(plan, self._tables, self._topology.world_size)
        types = sharding_types(pieces, self._tables, self._topology.world_size)
        cached, made = cached_rows_on(self._topology.compute_device, plan), []
        for option in proposal:
            name = name_of(option.path, option.name)
            if name in plan.copied:
                made.append(_copied(option, self._topology.world_size))
            else:
                made.append(_placed(option, types[name], FUSED, pieces[name]))
            if name in cached:
                put_in_host_memory(made[-1], self._tables[name].described(), cached[name])
        self._enumerator.populate_estimates(made)
        _take_storage(made, copy.deepcopy(storage_constraint))
        return made

    def _plan(self, storage: Topology) -> ShardingPlan:
        if isinstance(self._decider, ShardingPlan):
            return self._decider
        ranks = storage.world_size
        found = described(self._tables, self._batches, ranks, self._constraints, self._fused_params)
        free = "ddr" if storage.compute_device == "cpu" else "hbm"
        devices = []
        for rank, device in enumerate(storage.devices):
            usable = int(getattr(device.storage, free))
            if usable <= 0:
                raise UserError(f"rank {rank}: nothing of its {free} is left for tables")
            devices.append(Device(f"rank{rank}", usable))
        batch = self._batch_size * ranks
        task = ShardingTask(found.tables, tuple(devices), batch, found.operator)
        return self._decider.shard(task if self._rules is None else self._rules.applied(task))


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


def _take_storage(options: Sequence[ShardingOption], free: Topology) -> None:
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
