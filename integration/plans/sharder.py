"""TorchRec's own planner as a sharder, for comparison."""

import logging
import math
from collections.abc import Collection, Mapping
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
from autoshard.integration.plans.conversion import plan_of_shardings
from autoshard.integration.plans.table_shardings import COPIED, DENSE, FUSED
from autoshard.sharders.context import SharderContext
from autoshard.workload.data_sheets import DataSheet, data_sheet_of
from autoshard.workload.plans.plan import PlanError, ShardingPlan
from autoshard.workload.tables.table import DIM_STEP, EmbeddingTable, can_be_blocks
from autoshard.workload.tasks.task import ShardingTask

# Sharding types beside table_wise.
Split = Literal["column_wise", "row_wise", "table_row_wise", "data_parallel"]
_TYPES: Mapping[str, Split] = {
    "columns": "column_wise",
    "rows": "row_wise",
    "nodes": "table_row_wise",
    "copies": "data_parallel",
}
_OPTIMIZERS = {"sgd": SGD, "adagrad": Adagrad, "rowwise_adagrad": RowWiseAdagrad}
_MAX_WIDTH = 128  # columns of a piece, as TorchRec's default


class TorchRecSharder:
    """Plans by TorchRec's planner.

    The planner gets the pooling factors, the batch size, the memory of each device as storage, and
    the objective's link, if any; nothing else is reserved. With `column_wise`, a table may be split
    by one width: its largest even divisor below `dim`, up to 128. Rows are offered for GPUs alone:
    with `row_wise` and `table_row_wise`, others are taken for GPUs with a CPU's memory bandwidth.

    Args:
        types: Sharding types that the planner chooses from, beside `table_wise`.
        device_type: torch's type of the devices. Default: `device_type_here`.
        sheet: Data sheet of the devices, if they are GPUs of a known kind.
        seconds: Seconds after which the planner proposes no more plans. Default: no limit.
    """

    def __init__(
        self,
        types: Collection[Split] = (),
        device_type: str | None = None,
        sheet: DataSheet | None = None,
        seconds: float | None = None,
    ) -> None:
        self._types, self._device, self._sheet = types, device_type or device_type_here(), sheet
        self._seconds = seconds

    @classmethod
    def of_context(cls, context: SharderContext, *words: str) -> "TorchRecSharder":
        """Returns the sharder for the devices of a context's cost model, if it has one.

        Without a price of copies there are none.

        Args:
            context: Context.
            words: Some of `_TYPES`, as in the name of the sharder.
        """
        types = tuple(_TYPES[word] for word in words)
        if context.oracle is None:
            return cls(types, seconds=context.seconds)
        if context.oracle.copies is None:
            types = tuple(each for each in types if each != "data_parallel")
        model = context.oracle.model
        sheet = model.data_sheet or data_sheet_of(model.provenance.hardware)
        return cls(types, model.kind, sheet, context.seconds)

    def shard(self, task: ShardingTask) -> ShardingPlan:
        """Returns a valid plan; raises PlanError if TorchRec finds none, or it does not fit."""
        named = {f"t{number}": table for number, table in enumerate(task.tables)}
        ranks = len(task.devices)
        of_node = ranks // task.nodes if task.nodes > 1 else 1
        constraints = {
            name: self._constraints(table, ranks, of_node) for name, table in named.items()
        }
        plan = plan_by_torchrec(
            _model(task, named), task, constraints, self._topology(task), self._seconds
        )
        modules = plan.plan.values()
        shardings = {named[name].name: each for some in modules for name, each in some.items()}
        ours = plan_of_shardings(shardings, task)
        try:
            ours.check(task)
        except PlanError as fault:
            raise PlanError(f"TorchRec's planner ignores constraints: {fault}") from None
        return ours

    def _topology(self, task: ShardingTask) -> Topology:
        if not {"row_wise", "table_row_wise"} & set(self._types):
            return topology_of(task, self._device, self._sheet)
        bandwidths = {"hbm_mem_bw": DDR_MEM_BW} if self._device == "cpu" else None
        kind = "cuda" if self._device == "cpu" else self._device
        return topology_of(task, kind, self._sheet, bandwidths, for_rows=True)

    def _constraints(self, table: EmbeddingTable, ranks: int, of_node: int) -> ParameterConstraints:
        even = range(DIM_STEP, min(table.dim // 2, _MAX_WIDTH) + 1, DIM_STEP)
        widths = [width for width in even if table.dim % width == 0]
        can_be = {
            "column_wise": bool(widths),
            "row_wise": can_be_blocks(table.rows, ranks),
            "table_row_wise": of_node > 1 and can_be_blocks(table.rows, of_node),
            "data_parallel": True,
        }
        types = [each for each in can_be if each in self._types and can_be[each]]
        return replace(
            lookups_of(table),
            sharding_types=[ShardingType.TABLE_WISE.value, *types],
            compute_kernels=[FUSED, DENSE] if COPIED in types else [FUSED],
            min_partition=widths[-1] if "column_wise" in types else None,
            output_dtype=DataType.FP32,  # type of outputs; by default that of weights is assumed
        )


def plan_by_torchrec(
    model: nn.Module,
    task: ShardingTask,
    constraints: Mapping[str, ParameterConstraints],
    topology: Topology,
    seconds: float | None = None,
) -> TorchRecPlan:
    """Returns the plan of TorchRec's planner for a model with the tables of a task; the best one
    that it has proposed after so many seconds, if they are given.

    Raises:
        PlanError: The planner finds no plan.
    """
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=math.ceil(task.batch_size / len(task.devices)),
        constraints=dict(constraints),
        storage_reservation=FixedPercentageStorageReservation(0.0),
        debug=False,
        timeout_seconds=None if seconds is None else max(1, round(seconds)),
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
