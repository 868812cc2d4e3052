"""The plan that TorchRec makes of the rehearsed model where it may shard in every way it knows."""

from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import CustomTopologyData, PlannerError
from torchrec.distributed.types import ShardingPlan as TorchRecPlan

from autoshard.benchmark.hardware import Kind
from autoshard.experiments.rehearsal.model import RehearsedModel
from autoshard.workload import PlanError, ShardingTask


def native_plan(task: ShardingTask, kind: Kind) -> TorchRecPlan:
    """What its planner decides by itself: by tables, columns, rows, or a copy on each rank.

    It is told of lookups and memory what the task tells. PlanError if it finds no plan.
    """
    ranks = len(task.devices)
    memory = {"hbm_cap" if kind == "cuda" else "ddr_cap": task.room_bytes.tolist()}
    planner = EmbeddingShardingPlanner(
        topology=Topology(
            world_size=ranks,
            compute_device=kind,
            custom_topology_data=CustomTopologyData(memory, ranks),
            created_by_factory=True,  # else it warns that a job would fail
        ),
        batch_size=task.batch_size // ranks,
        storage_reservation=FixedPercentageStorageReservation(0.0),
        constraints={
            f"t{number}": ParameterConstraints(
                pooling_factors=[table.pooling_factor / table.features] * table.features,
                is_weighted=table.weighted,
            )
            for number, table in enumerate(task.tables)
        },
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
