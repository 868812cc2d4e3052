"""The plan that TorchRec's own planner makes of a task, to be compared with."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.planners import EmbeddingShardingPlanner
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    PlannerError,
)
from torchrec.distributed.types import ShardingPlan as TorchRecPlan
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim import SGD, Adagrad, RowWiseAdagrad

from autoshard.workload.plans import PlanError, ShardingPlan
from autoshard.workload.tables import DIM_STEP, EmbeddingTable
from autoshard.workload.tasks import ShardingTask
from autoshard.workload.torchrec.names import DATA_TYPES, device_type_here, lookups_of, topology_of
from autoshard.workload.torchrec.plans import FUSED, placements_of

_OPTIMIZERS = {"sgd": SGD, "adagrad": Adagrad, "rowwise_adagrad": RowWiseAdagrad}
_WIDEST = 128  # of a slice, where TorchRec is told nothing


def plan_of_torchrec(task: ShardingTask, column_wise: bool) -> ShardingPlan:
    """TorchRec's own plan of whole tables and, with `column_wise`, of tables split evenly.

    It knows the tables' true pooling factors, the batch, each device's memory as its storage, and
    the link where the objective names one; nothing is reserved besides, and nothing is cached. Each
    table has one width that it may be split by, the widest there is below its own and up to 128.
    PlanError where it finds no plan, or one that does not fit by our count.
    """
    named = {f"t{number}": table for number, table in enumerate(task.tables)}
    model = _model(task, named)
    constraints = {name: _constraints(table, column_wise) for name, table in named.items()}
    plan = plan_by_torchrec(model, task, constraints, device_type_here())
    placements = [
        placement
        for module in plan.plan.values()
        for name, sharding in module.items()
        for placement in placements_of(named[name].name, sharding)
    ]
    ours = ShardingPlan(tuple(sorted(placements)), len(task.devices))
    try:
        ours.check(task)
    except PlanError as fault:
        raise PlanError(f"TorchRec's planner knows no constraints of ours: {fault}") from None
    return ours


def plan_by_torchrec(
    model: nn.Module,
    task: ShardingTask,
    constraints: Mapping[str, ParameterConstraints],
    device_type: str,
) -> TorchRecPlan:
    """Returns what TorchRec's planner makes of a model with the tables of a task.

    Raises:
        PlanError: It finds no plan.
    """
    planner = EmbeddingShardingPlanner(
        topology=topology_of(task, device_type),
        batch_size=math.ceil(task.batch_size / len(task.devices)),
        constraints=dict(constraints),
        storage_reservation=FixedPercentageStorageReservation(0.0),
        debug=False,
    )
    try:
        return planner.plan(model, [EmbeddingBagCollectionSharder()])
    except PlannerError as error:
        reason = error.error_type.value.replace("_", " ")
        raise PlanError(f"TorchRec's planner finds no plan that fits: {reason}") from error


def _model(task: ShardingTask, tables: dict[str, EmbeddingTable]) -> nn.Module:
    """Collections on device meta, one of weighted and one of other tables."""
    collections = {
        str(weighted): EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=name,
                    num_embeddings=table.rows,
                    embedding_dim=table.dim,
                    feature_names=[f"{name}_{number}" for number in range(table.features)],
                    data_type=DATA_TYPES[task.operator.weights],
                )
                for name, table in tables.items()
                if table.weighted == weighted
            ],
            is_weighted=weighted,
            device=torch.device("meta"),
        )
        for weighted in {table.weighted for table in tables.values()}
    }
    model = nn.ModuleDict(collections)
    optimizer = _OPTIMIZERS[task.operator.optimizer]
    _apply_optimizer_in_backward(optimizer, model.parameters(), {"lr": 0.01})
    return model


def _constraints(table: EmbeddingTable, column_wise: bool) -> ParameterConstraints:
    width = max(_even_widths(table.dim), default=None) if column_wise else None
    types = [ShardingType.TABLE_WISE.value]
    return replace(
        lookups_of(table),
        sharding_types=types if width is None else [*types, ShardingType.COLUMN_WISE.value],
        compute_kernels=[FUSED],
        min_partition=width,
        output_dtype=DataType.FP32,  # of operators, whatever weights are in; it guesses theirs
    )


def _even_widths(dim: int) -> Iterator[int]:
    """Of slices that a table of `dim` columns can be split into evenly."""
    for width in range(DIM_STEP, min(dim // 2, _WIDEST) + 1, DIM_STEP):
        if dim % width == 0:
            yield width
