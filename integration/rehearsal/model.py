"""The model that rehearsals train, similar to DLRM, and its batches.

Almost all of its work is in embedding bags. Dense layers are as small as possible, so that steps
differ by plans.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor
from torchrec.streamable import Pipelineable

from autoshard.integration.models.names import DATA_TYPES
from autoshard.workload import (
    EmbeddingTable,
    OperatorOptions,
    ShardingPlan,
    table_lookups,
)
from autoshard.workload.access.batches import spreading_stride
from autoshard.workload.arrays import Ints
from autoshard.workload.tables.table import MAX_DIM

_DENSE_FEATURES = 13  # as Criteo has
_NARROW = 8  # outputs of the dense layers but the last
_WEIGHTS_SPREAD = 0.2
_PLAIN, _WEIGHTED = "bags", "weighted_bags"  # a collection of TorchRec is of one of these kinds


class RehearsedModel(nn.Module):
    """Pooled embeddings of all tables and a few dense features, combined by three small layers.

    Args:
        tables: All tables; `in_model` returns their names in the model.
        operator: Has the data type of weights.
        device: Device of the tables: TorchRec shards those on "meta".
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingTable],
        operator: OperatorOptions,
        device: torch.device | str = "meta",
    ) -> None:
        super().__init__()
        self.bottom = nn.Linear(_DENSE_FEATURES, _NARROW)
        self.interaction = nn.Linear(sum(t.dim * t.features for t in tables), _NARROW)
        self.top = nn.Linear(2 * _NARROW, 1)
        self.in_order = _InOrder([key for n, t in enumerate(tables) for key in _features(n, t)])
        self.loss = nn.BCEWithLogitsLoss()
        self._collections = list(_collections(tables))
        for name, some in _collections(tables).items():
            configs = [
                EmbeddingBagConfig(
                    name=f"t{number}",
                    num_embeddings=table.rows,
                    embedding_dim=table.dim,
                    feature_names=_features(number, table),
                    data_type=DATA_TYPES[operator.weights],
                    init_fn=_as_it_is,
                )
                for number, table in some.items()
            ]
            weighted, where = name == _WEIGHTED, torch.device(device)
            bags = EmbeddingBagCollection(tables=configs, is_weighted=weighted, device=where)
            self.add_module(name, bags)

    def forward(self, inputs: "Inputs") -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the mean loss, twice: with its gradient, and for reports."""
        below = self.bottom(inputs.dense).relu()
        pooled = [getattr(self, name)(inputs.lookups[name]) for name in self._collections]
        mixed = self.interaction(self.in_order([some.values() for some in pooled], pooled)).relu()
        logits = self.top(torch.cat([below, mixed], dim=1)).squeeze(1)
        loss = self.loss(logits, inputs.labels)
        return loss, loss.detach()


class _InOrder(nn.Module):
    """Concatenates pooled embeddings in the order of features, whatever the plan's order."""

    def __init__(self, keys: Sequence[str]) -> None:
        super().__init__()
        self._keys = keys

    def forward(
        self, values: Sequence[torch.Tensor], pooled: Sequence[KeyedTensor]
    ) -> torch.Tensor:
        """Returns columns of all features. `values` are those of `pooled`, once received."""
        found: dict[str, torch.Tensor] = {}
        for columns, some in zip(values, pooled, strict=True):
            parts = torch.split(columns, some.length_per_key(), dim=1)
            found.update(zip(some.keys(), parts, strict=True))
        return torch.cat([found[key] for key in self._keys], dim=1)


def _as_it_is(weights: torch.Tensor) -> torch.Tensor:
    """Initialises no weights: `fill` does."""
    return weights


def in_model(tables: Sequence[EmbeddingTable]) -> dict[str, str]:
    """Returns each table's name in the model: TorchRec's modules do not accept arbitrary names."""
    return {
        table.name: f"{name}.t{number}"
        for name, some in _collections(tables).items()
        for number, table in some.items()
    }


def plan_in_model(plan: ShardingPlan, tables: Sequence[EmbeddingTable]) -> ShardingPlan:
    """Returns the plan with the names that the tables have in the model."""
    names = in_model(tables)
    placements = (replace(placement, table=names[placement.table]) for placement in plan.placements)
    options = {names[table]: option for table, option in plan.options.items()}
    return replace(plan, placements=tuple(placements), options=options)


def fill(
    part: torch.Tensor,
    number: int,
    rows: int,
    first_row: int,
    start: int,
    ids: torch.Tensor | None = None,
) -> None:
    """Writes the initial weights of table `number` into a part of it, the same for any sharding.

    A weight is the product of a number of its row and one of its column, which takes one pass over
    memory.

    Args:
        part: Weights of some rows and columns.
        number: Number of the table.
        rows: Rows of the whole table.
        first_row: First row of the part.
        start: First column of the part.
        ids: Rows of the table of which the part is one, if they are not all in order.
    """
    drawn = torch.Generator().manual_seed(number)
    of_columns = torch.rand(MAX_DIM, generator=drawn).sub_(0.5).mul_(_WEIGHTS_SPREAD)
    of_rows = torch.rand(rows, 1, generator=drawn)
    of_rows = (of_rows if ids is None else of_rows[ids])[first_row : first_row + len(part)]
    of_columns = of_columns[start : start + part.shape[1]]
    torch.mul(of_rows.to(part.device), of_columns.to(part.device), out=part)


@dataclass(frozen=True)
class Batch:
    """One rank's samples of a batch.

    Args:
        dense: Features, [samples, 13].
        labels: 0 or 1 for each sample.
        lookups: Keys, rows, lengths of bags and weights of lookups of each collection.
    """

    dense: torch.Tensor
    labels: torch.Tensor
    lookups: Mapping[str, tuple[list[str], torch.Tensor, torch.Tensor, torch.Tensor | None]]

    def inputs(self) -> "Inputs":
        """Returns new inputs of the model on each call, because TorchRec caches results in them."""
        lookups = {
            name: KeyedJaggedTensor(keys=keys, values=rows, lengths=lengths, weights=weights)
            for name, (keys, rows, lengths, weights) in self.lookups.items()
        }
        return Inputs(self.dense, self.labels, lookups)


@dataclass
class Inputs(Pipelineable):  # type: ignore[misc]  # TorchRec has no types
    """Inputs of the model on its device, in the form that TorchRec's pipelines expect."""

    dense: torch.Tensor
    labels: torch.Tensor
    lookups: dict[str, KeyedJaggedTensor]

    def to(self, device: torch.device, non_blocking: bool = False) -> "Inputs":  # noqa: ARG002
        """Returns itself: batches are drawn on the device."""
        return self

    def record_stream(self, stream: torch.Stream) -> None:
        """Keeps the memory of all tensors for a stream of a GPU."""
        self.dense.record_stream(stream)
        self.labels.record_stream(stream)
        for some in self.lookups.values():
            some.record_stream(stream)


def draw_batch(
    tables: Sequence[EmbeddingTable],
    batch_size: int,
    seed: int,
    samples: slice,
    device: torch.device | str = "cpu",
    hot: bool = False,
) -> Batch:
    """Returns these samples of the batch with that seed; lookups follow the tables.

    Args:
        tables: All tables.
        batch_size: Samples of the batch, of all ranks together.
        seed: Number of the batch.
        samples: Those that are returned.
        device: Device of the tensors.
        hot: Whether the most used rows are the same ones in all batches, as hot rows are. Then more
            of them stay in the cache: steps took 0.9 of the time.
    """
    rng = np.random.default_rng(seed)
    dense = torch.from_numpy(rng.standard_normal((batch_size, _DENSE_FEATURES), np.float32))
    labels = torch.from_numpy(rng.integers(2, size=batch_size).astype(np.float32))
    lookups = {}
    for name, some in _collections(tables).items():
        keys = [key for number, table in some.items() for key in _features(number, table)]
        bags = [
            bag for table in some.values() for bag in _bags(table, batch_size, seed, samples, hot)
        ]
        rows, lengths, weights = (torch.cat(parts).to(device) for parts in zip(*bags, strict=True))
        lookups[name] = (keys, rows, lengths, weights if name == _WEIGHTED else None)
    return Batch(dense[samples].to(device), labels[samples].to(device), lookups)


def _bags(
    table: EmbeddingTable, batch_size: int, seed: int, samples: slice, hot: bool
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yields rows, lengths and weights of each feature's bags of these samples."""
    drawn, counts = table_lookups(table, batch_size, seed)
    drawn = _lasting(table, drawn) if hot else drawn
    rows, lengths = torch.from_numpy(drawn), torch.from_numpy(counts)
    weights = torch.rand(len(rows), generator=torch.Generator().manual_seed(seed))
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    for feature in range(table.features):
        first, last = (feature * batch_size + end for end in (samples.start, samples.stop))
        some = slice(int(ends[first]), int(ends[last]))
        yield rows[some], lengths[first:last], weights[some]


def _lasting(table: EmbeddingTable, rows: Ints) -> Ints:
    """Returns lookups of which the most used rows are the same ones in all batches.

    Drawn batches use other rows each; what was recorded is left as it is.
    """
    if table.trace is not None or not len(rows):
        return rows
    _, numbers, uses = np.unique(rows, return_inverse=True, return_counts=True)
    ranks = np.empty(len(uses), np.int64)
    ranks[np.argsort(-uses, kind="stable")] = np.arange(len(uses))
    first = int(table.access_digest, 16) % table.rows  # not on the first device for all tables
    return np.asarray((first + ranks * spreading_stride(table.rows)) % table.rows)[numbers]


def most_used(table: EmbeddingTable, count: int, batch_size: int, seeds: range) -> torch.Tensor:
    """Returns the ids of the rows that batches with these seeds use most, [count]."""
    drawn = [_lasting(table, table_lookups(table, batch_size, seed)[0]) for seed in seeds]
    ids, uses = np.unique(np.concatenate(drawn), return_counts=True)
    found = ids[np.argsort(-uses, kind="stable")][:count]
    others = np.setdiff1d(np.arange(min(table.rows, 2 * count)), found)[: count - len(found)]
    return torch.from_numpy(np.concatenate([found, others]))


def _collections(tables: Sequence[EmbeddingTable]) -> dict[str, dict[int, EmbeddingTable]]:
    """Returns the tables of each non-empty collection with their numbers."""
    found: dict[str, dict[int, EmbeddingTable]] = {}
    for number, table in enumerate(tables):
        found.setdefault(_WEIGHTED if table.weighted else _PLAIN, {})[number] = table
    return found


def _features(number: int, table: EmbeddingTable) -> list[str]:
    return [f"t{number}_{feature}" for feature in range(table.features)]
