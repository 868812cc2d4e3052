"""The tables of a model's EmbeddingBagCollections, and what they are called."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from autoshard.workload.errors import FieldError, UserError
from autoshard.workload.tables import EmbeddingTable


@dataclass(frozen=True)
class BagTable:
    """A table of an EmbeddingBagCollection.

    Args:
        path: of the collection in its model, with dots; empty where the model is the collection.
        config: TorchRec's own description.
        collection: that it belongs to.
    """

    path: str
    config: EmbeddingBagConfig
    collection: EmbeddingBagCollection

    @property
    def name(self) -> str:
        """`path.table`, or `table` where the model is the collection itself."""
        return f"{self.path}.{self.config.name}" if self.path else str(self.config.name)

    def described(self, pooling_factor: float = 1.0, **use: Any) -> EmbeddingTable:
        """The table in our words, with its mean lookups a sample; UserError if it is not for us.

        `use`: what else is known of its lookups, by the names that EmbeddingTable has for it.
        """
        try:
            return EmbeddingTable(
                self.name,
                self.config.num_embeddings,
                self.config.embedding_dim,
                pooling_factor,
                features=len(self.config.feature_names),
                weighted=bool(self.collection.is_weighted()),
                **use,
            )
        except FieldError as error:
            raise UserError(f"table {self.name}: {error}") from error


def bag_tables(model: nn.Module) -> Mapping[str, BagTable]:
    """The tables of all collections by name, in the order in which they stand in the model."""
    tables: dict[str, BagTable] = {}
    for path, module in model.named_modules():
        if not isinstance(module, EmbeddingBagCollection):
            continue
        for config in module.embedding_bag_configs():
            table = BagTable(path, config, module)
            tables[table.name] = table
    if not tables:
        raise UserError(f"{type(model).__name__} has no EmbeddingBagCollection: nothing to shard")
    return tables
