"""The tables of a model's EmbeddingBagCollections, by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torchrec.distributed.types import ShardedModule
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingBagCollectionInterface,
    EmbeddingCollection,
    EmbeddingCollectionInterface,
)
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection

from autoshard.workload.errors import FieldError, UserError
from autoshard.workload.tables.table import MAX_FEATURES, EmbeddingTable

# Other modules with tables, which DistributedModelParallel shards differently.
_OTHERS = (
    EmbeddingBagCollectionInterface,
    FeatureProcessedEmbeddingBagCollection,
    BaseManagedCollisionEmbeddingCollection,
)
HOT_AND_COLD = "hot_and_cold"  # the collection in a `HotCold`
HOT_IDS = "ids_of_hot_rows"  # the buffer of it that says which rows are hot
_HASHED = "hashed ids of "


@dataclass(frozen=True)
class BagTable:
    """A table of a collection.

    Args:
        path: Dotted path of the collection; empty where the model is the collection.
        config: TorchRec's configuration.
        collection: Collection that it belongs to.
        fused_params: Parameters of the table's sharder. They name the optimizer where
            apply_optimizer_in_backward named none.
    """

    path: str
    config: EmbeddingBagConfig | EmbeddingConfig
    collection: EmbeddingBagCollection | EmbeddingCollection
    fused_params: Mapping[str, Any] | None = None

    @property
    def name(self) -> str:
        """Returns the name of the table in plans."""
        return name_of(self.path, self.config.name)

    @property
    def has_hashed_ids(self) -> bool:
        """Returns whether its rows are numbered by a hash of their ids, in a `HotCold`."""
        return all(feature.startswith(_HASHED) for feature in self.config.feature_names)

    @property
    def weight(self) -> nn.Parameter:
        """Returns the parameter, which may name its optimizer."""
        if isinstance(self.collection, EmbeddingCollection):
            tables = self.collection.embeddings
        else:
            tables = self.collection.embedding_bags
        weight: nn.Parameter = tables[self.config.name].weight
        return weight

    def described(self, pooling_factor: float = 1.0, **use: Any) -> EmbeddingTable:
        """Returns the table as an EmbeddingTable; UserError if that is not possible.

        Args:
            pooling_factor: Mean lookups per sample.
            use: Other fields of EmbeddingTable that describe its lookups.
        """
        features = len(self.config.feature_names)
        if isinstance(self.collection, EmbeddingCollection):  # each lookup is an output
            outputs = max(features, min(round(pooling_factor), MAX_FEATURES))
            use = {**use, "features": outputs, "weighted": False, "pooled": False}
        else:
            use = {"features": features, "weighted": bool(self.collection.is_weighted()), **use}
        try:
            return EmbeddingTable(
                self.name,
                self.config.num_embeddings,
                self.config.embedding_dim,
                pooling_factor,
                **use,
            )
        except FieldError as error:
            raise UserError(f"table {self.name}: {error}") from error


def hashed_feature(feature: str) -> str:
    """Returns the key of a feature's lookups once rows are numbered by a hash of their ids."""
    return _HASHED + feature


def name_of(path: str, table: str) -> str:
    """Returns `path.table`, or `table` where the model is the collection itself.

    Tables of a `HotCold` are named as those of the collection that it replaces.
    """
    *outside, last = path.split(".")
    path = ".".join(outside) if last == HOT_AND_COLD else path
    return f"{path}.{table}" if path else table


def bag_tables(
    model: nn.Module, fused_params: Mapping[str, Any] | None = None
) -> Mapping[str, BagTable]:
    """Returns the tables of all collections by name, in the order of the model.

    UserError names a module whose tables are not supported.
    """
    tables: dict[str, BagTable] = {}
    for path, module in model.named_modules():
        check_module(path, module)
        if isinstance(module, EmbeddingBagCollection):
            for config in module.embedding_bag_configs():
                tables[name_of(path, config.name)] = BagTable(path, config, module, fused_params)
    if not tables:
        raise UserError(f"{type(model).__name__} has no EmbeddingBagCollection: nothing to shard")
    return tables


def check_not_sharded(path: str, module: nn.Module) -> None:
    """Raises UserError if the module is sharded."""
    if isinstance(module, ShardedModule):
        raise UserError(
            f"{_described(path, module)}, which is sharded: give the model before sharding"
        )


def check_module(path: str, module: nn.Module) -> None:
    """Raises UserError if the module is sharded, or has tables that are not supported."""
    check_not_sharded(path, module)
    what = _described(path, module)
    if isinstance(module, EmbeddingCollectionInterface):
        raise UserError(
            f"{what}: its lookups are not pooled, and plans here are for EmbeddingBagCollections: "
            "give the part of the model without it, and shard it apart"
        )
    if isinstance(module, _OTHERS) and not isinstance(module, EmbeddingBagCollection):
        raise UserError(f"{what}: plans here are for EmbeddingBagCollections only")


def _described(path: str, module: nn.Module) -> str:
    return f"module {path or 'given'} is a {type(module).__name__}"
