"""The plan that TorchRec makes of the rehearsed model where it may shard in every way it knows."""

from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.types import ShardingPlan as TorchRecPlan

from autoshard.benchmark.rehearsal.model import RehearsedModel
from autoshard.workload import PlanError, ShardingTask
from autoshard.workload.torchrec.names import lookups_of, topology_of


def native_plan(task: ShardingTask, device_type: str) -> TorchRecPlan:
    """What its planner decides by itself: by tables, columns, rows, or a copy on each rank.

    It is told of lookups and memory what the task tells. PlanError if it finds no plan.
    """
    ranks = len(task.devices)
    planner = EmbeddingShardingPlanner(
        topology=topology_of(task, device_type),
        batch_size=task.batch_size // ranks,
        storage_reservation=FixedPercentageStorageReservation(0.0),
        constraints={f"t{number}": lookups_of(t) for number, t in enumerate(task.tables)},
        debug=False,
    )
    model = RehearsedModel(task.tables, task.operator)
    try:
        return planner.plan(model, [EmbeddingBagCollectionSharder()])
    except PlannerError as error:
        reason = str(error).strip().splitlines()[-1][:200]
        raise PlanError(
            f"TorchRec's planner finds no plan for {ranks} devices: {reason}"
        ) from error
