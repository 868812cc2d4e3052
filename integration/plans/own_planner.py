"""Plans of TorchRec's own planner, for comparison."""

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.constants import DDR_MEM_BW
from torchrec.distributed.planner.planners import EmbeddingShardingPlanner
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError, Topology
from torchrec.distributed.types import ShardingPlan as TorchRecPlan
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim import SGD, Adagrad, RowWiseAdagrad

from autoshard.integration.models.names import DATA_TYPES, device_type_here, lookups_of, topology_of
from autoshard.integration.plans.conversion import COPIED, DENSE, FUSED, placements_of
from autoshard.workload.data_sheets import DataSheet
from autoshard.workload.placements import Placement
from autoshard.workload.plans import PlanError, ShardingPlan
from autoshard.workload.tables import DIM_STEP, EmbeddingTable, can_be_blocks
from autoshard.workload.tasks import ShardingTask

Ways = Literal["tables", "columns", "rows", "all"]  # each with those before it
_OPTIMIZERS = {"sgd": SGD, "adagrad": Adagrad, "rowwise_adagrad": RowWiseAdagrad}
_MAX_WIDTH = 128  # columns of a piece, as TorchRec's default


def plan_of_torchrec(
    task: ShardingTask,
    ways: Ways,
    device_type: str | None = None,
    sheet: DataSheet | None = None,
) -> ShardingPlan:
    """Returns TorchRec's own plan.

    The planner gets the pooling factors, the batch size, the memory of each device as storage, and
    the objective's link, if any; nothing else is reserved. A table may be split by one width: its
    largest even divisor below `dim`, up to 128. Rows are offered for GPUs alone, so with rows other
    devices are taken for GPUs with the bandwidth of a CPU's memory.

    Args:
        task: Task to plan.
        ways: Ways that the planner chooses from.
        device_type: torch's type of the task's devices. Default: `device_type_here`.
        sheet: Data sheet of the devices, if they are GPUs of a known kind.

    Raises:
        PlanError: The planner finds no plan, or one that is not valid for the task.
    """
    named = {f"t{number}": table for number, table in enumerate(task.tables)}
    model = _model(task, named)
    ranks = len(task.devices)
    constraints = {name: _constraints(table, ways, ranks) for name, table in named.items()}
    device = device_type or device_type_here()
    if ways in ("rows", "all"):
        bandwidths = {"hbm_mem_bw": DDR_MEM_BW} if device == "cpu" else None
        kind = "cuda" if device == "cpu" else device
        topology = topology_of(task, kind, sheet, bandwidths, for_rows=True)
    else:
        topology = topology_of(task, device, sheet)
    plan = plan_by_torchrec(model, task, constraints, topology)
    placements, copied = list[Placement](), list[str]()
    for module in plan.plan.values():
        for name, sharding in module.items():
            if sharding.sharding_type == COPIED:
                copied.append(named[name].name)
            else:
                placements += placements_of(named[name].name, sharding)
    ours = ShardingPlan(tuple(sorted(placements)), len(task.devices), tuple(copied))
    try:
        ours.check(task)
    except PlanError as fault:
        raise PlanError(f"TorchRec's planner ignores constraints: {fault}") from None
    return ours


def plan_by_torchrec(
    model: nn.Module,
    task: ShardingTask,
    constraints: Mapping[str, ParameterConstraints],
    topology: Topology,
) -> TorchRecPlan:
    """Returns the plan of TorchRec's planner for a model with the tables of a task.

    Raises:
        PlanError: The planner finds no plan.
    """
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=math.ceil(task.batch_size / len(task.devices)),
        constraints=dict(constraints),
        storage_reservation=FixedPercentageStorageReservation(0.0),
        debug=False,
    )
    logging.root.addFilter(_is_no_copy)
    try:
        return planner.plan(model, [EmbeddingBagCollectionSharder()])
    except PlannerError as error:
        reason = error.error_type.value.replace("_", " ")
        raise PlanError(f"TorchRec's planner finds no plan that fits: {reason}") from error
    finally:
        logging.root.removeFilter(_is_no_copy)


def _is_no_copy(record: logging.LogRecord) -> bool:
    """Returns whether a record is none of TorchRec's warnings that a copied table has no spec."""
    return not record.getMessage().startswith("Sharding spec not found")


def _model(task: ShardingTask, tables: dict[str, EmbeddingTable]) -> nn.Module:
    """Returns collections on device meta, one for weighted and one for other tables."""
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


def _constraints(table: EmbeddingTable, ways: Ways, ranks: int) -> ParameterConstraints:
    even = range(DIM_STEP, min(table.dim // 2, _MAX_WIDTH) + 1, DIM_STEP)
    widths = [width for width in even if table.dim % width == 0] if ways != "tables" else []
    width = max(widths, default=None)
    types = [ShardingType.TABLE_WISE.value]
    if width is not None:
        types.append(ShardingType.COLUMN_WISE.value)
    if ways in ("rows", "all") and can_be_blocks(table.rows, ranks):
        types.append(ShardingType.ROW_WISE.value)
    if ways == "all":
        types.append(COPIED)
    return replace(
        lookups_of(table),
        sharding_types=types,
        compute_kernels=[FUSED, DENSE] if ways == "all" else [FUSED],
        min_partition=width,
        output_dtype=DataType.FP32,  # type of outputs; by default TorchRec assumes that of weights
    )
