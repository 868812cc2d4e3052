"""Converts the tables of a TorchRec model to tables of a task."""

import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.planner.constants import POOLING_FACTOR
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type
from torchrec.modules.embedding_configs import PoolingType

from autoshard.integration.models.bags import BagTable, bag_tables
from autoshard.integration.models.lookups import counted
from autoshard.integration.models.names import DATA_TYPES, FUSED_OPTIMIZERS
from autoshard.workload.errors import UserError
from autoshard.workload.tables.operators import OperatorOptions, Optimizer, Weights
from autoshard.workload.tables.table import EmbeddingTable

_OPTIMIZERS = {theirs: ours for ours, theirs in FUSED_OPTIMIZERS.items()}
_WEIGHTS = {theirs: ours for ours, theirs in DATA_TYPES.items()}


class ModelTables(NamedTuple):
    """The tables of a model and the options of their operator, for a ShardingTask."""

    tables: tuple[EmbeddingTable, ...]
    operator: OperatorOptions


def tables_of(
    model: nn.Module,
    batches: Iterable[Any] | None = None,
    world_size: int = 1,
    constraints: Mapping[str, ParameterConstraints] | None = None,
    fused_params: Mapping[str, Any] | None = None,
) -> ModelTables:
    """Returns the tables of all EmbeddingBagCollections of a model that is not sharded yet.

    A table is named `module.table` by the path of its collection. Unknown lookups are assumed to be
    one per sample and feature, with a warning.

    Args:
        model: Model, which may be on device meta.
        batches: Batches of one rank: KeyedJaggedTensors or objects with `sparse_features`. A few
            are read to count lookups and reuse of rows.
        world_size: Number of ranks that will train, each with such a batch.
        constraints: Constraints of TorchRec's planner by table. Their pooling factors are used
            where there are no batches.
        fused_params: Parameters of the tables' sharder. They name the optimizer of tables that
            apply_optimizer_in_backward did not prepare.

    Raises:
        UserError: A table is not supported.
    """
    return described(bag_tables(model), batches, world_size, constraints, fused_params)


def described(
    tables: Mapping[str, BagTable],
    batches: Iterable[Any] | None,
    world_size: int,
    constraints: Mapping[str, ParameterConstraints] | None,
    fused_params: Mapping[str, Any] | None,
) -> ModelTables:
    """Returns `tables_of` for given tables."""
    operator = _operator(tables, fused_params)
    use = _use(tables, batches, world_size, constraints)
    return ModelTables(tuple(t.described(**use[name]) for name, t in tables.items()), operator)


def _use(
    tables: Mapping[str, BagTable],
    batches: Iterable[Any] | None,
    world_size: int,
    constraints: Mapping[str, ParameterConstraints] | None,
) -> dict[str, dict[str, Any]]:
    if batches is not None:
        return counted(tables.values(), batches, world_size)
    known = {
        name: {"pooling_factor": _pooling(table, constraints[table.config.name])}
        for name, table in tables.items()
        if constraints
        and table.config.name in constraints
        and constraints[table.config.name].pooling_factors != [POOLING_FACTOR]  # TorchRec's default
    }
    unknown = len(tables) - len(known)
    if unknown:
        warnings.warn(
            f"lookups of {unknown} of {len(tables)} tables are unknown: one lookup per sample and "
            "feature is assumed, uniform over rows; give batches to count them",
            stacklevel=4,
        )
    one_each = {name: float(len(table.config.feature_names)) for name, table in tables.items()}
    return {name: known.get(name, {"pooling_factor": one_each[name]}) for name in tables}


def _pooling(table: BagTable, constraint: ParameterConstraints) -> float:
    factors, features = constraint.pooling_factors, len(table.config.feature_names)
    if len(factors) == 1:
        return float(factors[0] * features)
    if len(factors) != features:
        raise UserError(
            f"table {table.name}: {len(factors)} pooling factors are given for {features} features"
        )
    return float(sum(factors))


def _operator(
    tables: Mapping[str, BagTable], fused_params: Mapping[str, Any] | None
) -> OperatorOptions:
    """Returns the common options of all tables; UserError names two that differ."""
    first, options = "", OperatorOptions()
    for name, table in tables.items():
        own = OperatorOptions(_weights(table), _optimizer(table, fused_params))
        if table.config.pooling is not PoolingType.SUM:
            # Mean pooling costs more: FBGEMM's operator took 1.4 times as long forward and 1.2
            # times backward (medians of 12 shards on a CPU; a second sum took 1.07 and 1.02).
            raise UserError(
                f"table {name} pools by {table.config.pooling.name}: costs are known of sums, and "
                "those of means differ"
            )
        if not first:
            first, options = name, own
        elif own != options:
            raise UserError(
                f"tables {first} and {name} differ, {options} and {own}: costs are known where all "
                "are alike"
            )
    return options


def _weights(table: BagTable) -> Weights:
    kind = table.config.data_type
    if kind not in _WEIGHTS:
        raise UserError(
            f"table {table.name} stores {kind.name}: costs are known of "
            f"{' and '.join(known.name for known in _WEIGHTS)}"
        )
    return _WEIGHTS[kind]


def _optimizer(table: BagTable, fused_params: Mapping[str, Any] | None) -> Optimizer:
    classes = getattr(table.weight, "_optimizer_classes", [])
    if len(classes) > 1:
        raise UserError(f"table {table.name} has {len(classes)} optimizers: give it one")
    given: Any = None
    if classes:
        own = getattr(table.weight, "_optimizer_kwargs", [{}])[0]
        given = own.get("optimizer") or _as_fused(classes[0])
    elif fused_params is not None:
        given = fused_params.get("optimizer", EmbOptimType.EXACT_SGD)  # what fbgemm takes
    if given is None and not classes:
        raise UserError(
            f"table {table.name} has no optimizer: prepare the model's tables with "
            "apply_optimizer_in_backward, or give the fused_params of their sharder"
        )
    if given not in _OPTIMIZERS:
        called = classes[0].__name__ if classes else given
        raise UserError(
            f"table {table.name} is trained by {called}: costs are known of SGD, Adagrad and "
            "RowWiseAdagrad"
        )
    return _OPTIMIZERS[given]


def _as_fused(optimizer: type) -> Any:
    """Returns FBGEMM's type of an optimizer's class; None where it has none."""
    try:
        return optimizer_type_to_emb_opt_type(optimizer)
    except ValueError:
        return None
