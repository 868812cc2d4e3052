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
    one per sample and feature, and unnamed optimizers to be row-wise Adagrad, with a warning.

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
    tables = bag_tables(model, fused_params)
    for table in tables.values():
        if table.config.pooling is not PoolingType.SUM:
            # Mean pooling costs more: FBGEMM's operator took 1.4 times as long forward and 1.2
            # times backward (medians of 12 shards on a CPU; a second sum took 1.07 and 1.02).
            raise UserError(
                f"table {table.name} pools by {table.config.pooling.name}: costs are known of "
                "sums, and those of means differ"
            )
    return described(tables, batches, world_size, constraints)


def described(
    tables: Mapping[str, BagTable],
    batches: Iterable[Any] | None,
    world_size: int,
    constraints: Mapping[str, ParameterConstraints] | None,
    batch_size: int | None = None,
) -> ModelTables:
    """Returns `tables_of` for given tables, also of other pooling than sums.

    `batch_size` is that of a rank, to which the constraints' batch sizes of features relate.
    """
    operators = {name: operator_of(table) for name, table in tables.items()}
    first, operator = next(iter(operators.items()))
    for name, own in operators.items():
        if own != operator:
            raise UserError(
                f"tables {first} and {name} differ, {operator} and {own}: costs are known where "
                "all are alike"
            )
    unnamed = [name for name, table in tables.items() if _named(table) is None]
    if unnamed:
        warnings.warn(
            f"no optimizer is named for {len(unnamed)} of {len(tables)} tables: row-wise Adagrad "
            "is assumed; apply_optimizer_in_backward, or the fused_params of their sharder, name "
            "one",
            stacklevel=3,
        )
    use = _use(tables, batches, world_size, constraints, batch_size)
    return ModelTables(tuple(t.described(**use[name]) for name, t in tables.items()), operator)


def operator_of(table: BagTable) -> OperatorOptions:
    """Returns the options of the operator of a table; UserError if there are no costs of it."""
    return OperatorOptions(_weights(table), _optimizer(table))


def _use(
    tables: Mapping[str, BagTable],
    batches: Iterable[Any] | None,
    world_size: int,
    constraints: Mapping[str, ParameterConstraints] | None,
    batch_size: int | None,
) -> dict[str, dict[str, Any]]:
    if batches is not None:
        return counted(tables.values(), batches, world_size)
    known = {
        name: lookups_by(table, constraints[table.config.name], batch_size)
        for name, table in tables.items()
        if constraints
        and constraints.get(table.config.name) is not None
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


def lookups_by(
    table: BagTable, constraint: ParameterConstraints, batch_size: int | None
) -> dict[str, Any]:
    """Returns the lookups of a sample, and its outputs where these are not one of each feature.

    A feature may be pooled several times in a sample, or in a batch of another size.

    Args:
        table: The table.
        constraint: TorchRec's constraints of it.
        batch_size: Samples of one rank, to which batch sizes of features relate.
    """
    count = len(table.config.feature_names)
    factors = constraint.pooling_factors * (count if len(constraint.pooling_factors) == 1 else 1)
    poolings = constraint.num_poolings or [1.0] * count
    sizes = [1.0] * count
    if constraint.batch_sizes and batch_size:
        sizes = [size / batch_size for size in constraint.batch_sizes]
    for what, given in (
        ("pooling factors", factors),
        ("num_poolings", poolings),
        ("batch sizes", constraint.batch_sizes or sizes),
    ):
        if len(given) != count:
            raise UserError(
                f"table {table.name}: {len(given)} {what} are given for {count} features"
            )
    outputs = [n * size for n, size in zip(poolings, sizes, strict=True)]
    found: dict[str, Any] = {
        "pooling_factor": float(sum(f * n for f, n in zip(factors, outputs, strict=True)))
    }
    if constraint.num_poolings or constraint.batch_sizes:
        found["features"] = max(1, round(sum(outputs)))
    if constraint.is_weighted:
        found["weighted"] = True
    return found


def _weights(table: BagTable) -> Weights:
    kind = table.config.data_type
    if kind not in _WEIGHTS:
        raise UserError(
            f"table {table.name} stores {kind.name}: costs are known of "
            f"{' and '.join(known.name for known in _WEIGHTS)}"
        )
    return _WEIGHTS[kind]


def _optimizer(table: BagTable) -> Optimizer:
    given = _named(table)
    if given is None:
        return "rowwise_adagrad"
    if given not in _OPTIMIZERS:
        called = given.__name__ if isinstance(given, type) else given
        raise UserError(
            f"table {table.name} is trained by {called}: costs are known of SGD, Adagrad and "
            "RowWiseAdagrad"
        )
    return _OPTIMIZERS[given]


def _named(table: BagTable) -> Any:
    """Returns FBGEMM's type of a table's optimizer, or a class that has none; None if unnamed."""
    classes = getattr(table.weight, "_optimizer_classes", [])
    if len(classes) > 1:
        raise UserError(f"table {table.name} has {len(classes)} optimizers: give it one")
    if classes:
        own = getattr(table.weight, "_optimizer_kwargs", [{}])[0]
        return own.get("optimizer") or _as_fused(classes[0]) or classes[0]
    if table.fused_params is None:
        return None
    return table.fused_params.get("optimizer", EmbOptimType.EXACT_SGD)  # what fbgemm takes


def _as_fused(optimizer: type) -> Any:
    """Returns FBGEMM's type of an optimizer's class; None where it has none."""
    try:
        return optimizer_type_to_emb_opt_type(optimizer)
    except ValueError:
        return None
