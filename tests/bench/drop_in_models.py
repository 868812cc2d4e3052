"""Models that both planners plan, with batches: a DLRM, two towers, and one that mixes modules."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection
from torchrec.modules.embedding_configs import EmbeddingConfig, PoolingType
from torchrec.optim import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

DENSE = 13  # features without a table, as Criteo has
LEARNING_RATE = 0.05
# Lookups of a sample of the 26 tables of MLPerf's DLRM-v2.
_HOTS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
_STRIDE = 2_654_435_761  # a prime: rows that are used most are not next to each other


class Table(NamedTuple):
    """A table with one feature of its name.

    Args:
        name: Its name.
        rows: Its rows.
        dim: Its columns.
        lookups: Mean lookups of a sample, drawn for each; 1 is one for every sample.
        kind: How they are pooled; `unpooled` if they are not.
    """

    name: str
    rows: int
    dim: int
    lookups: int
    kind: str = "sum"


@dataclass
class Batch:
    """Samples of one rank."""

    dense: torch.Tensor
    sparse_features: KeyedJaggedTensor
    labels: torch.Tensor

    def fresh(self) -> "Batch":
        """Returns the batch with lookups in which TorchRec has cached nothing."""
        lookups = self.sparse_features
        anew = KeyedJaggedTensor(lookups.keys(), lookups.values(), lengths=lookups.lengths())
        return Batch(self.dense, anew, self.labels)


class Drawn(NamedTuple):
    """A model with its tables."""

    model: nn.Module
    tables: Sequence[Table]


def dlrm(seed: int) -> Drawn:
    """26 tables of one dim, whose embeddings are multiplied with each other."""
    rng = np.random.default_rng(seed)
    rows, hots = _rows(rng, len(_HOTS), 600_000), rng.permutation(_HOTS)
    tables = [Table(f"c{n}", rows[n], 64, int(hot)) for n, hot in enumerate(hots)]
    return _made(_DLRM(tables), tables)


def two_towers(seed: int) -> Drawn:
    """Collections of users (10 tables) and of items (8), and a tower on each."""
    rng = np.random.default_rng(seed)
    tables = [
        *_tables(rng, "user", (1, 1, 1, 1, 1, 2, 5, 20, 50, 80)),
        *_tables(rng, "item", (1, 1, 1, 1, 2, 4, 8, 15)),
    ]
    return _made(_TwoTowers(tables), tables)


def mixed(seed: int) -> Drawn:
    """Sums of 14 tables, a mean of one, and sequences of two."""
    rng = np.random.default_rng(seed)
    (mean,) = _tables(rng, "mean", (20,))
    tables = [
        *_tables(rng, "sum", (1, 1, 1, 1, 1, 1, 2, 3, 5, 8, 12, 20, 40, 60)),
        mean._replace(kind="mean"),
        *(t._replace(kind="unpooled", dim=32) for t in _tables(rng, "history", (10, 20))),
    ]
    return _made(_Mixed(tables), tables)


MODELS: dict[str, Callable[[int], Drawn]] = {
    "DLRM": dlrm, "two towers": two_towers, "mixed": mixed
}  # fmt: skip


def draw(tables: Sequence[Table], samples: int, seed: int) -> Batch:
    """Returns a batch; a row of a table is used in proportion to one over its rank (Zipf)."""
    rng = np.random.default_rng(seed)
    lengths, values = [], []
    for table in tables:
        drawn = rng.geometric(1 / table.lookups, samples)  # 1 where one lookup is meant
        ranks = (table.rows ** rng.random(drawn.sum())).astype(np.int64)
        lengths.append(drawn)
        values.append(ranks * _STRIDE % table.rows)
    sparse = KeyedJaggedTensor(
        keys=[table.name for table in tables],
        values=torch.from_numpy(np.concatenate(values)),
        lengths=torch.from_numpy(np.concatenate(lengths)).int(),
    )
    dense = torch.from_numpy(rng.standard_normal((samples, DENSE), np.float32))
    return Batch(dense, sparse, torch.from_numpy(rng.integers(2, size=samples).astype(np.float32)))


class _DLRM(nn.Module):
    pairs: torch.Tensor

    def __init__(self, tables: Sequence[Table]) -> None:
        super().__init__()
        dim, count = tables[0].dim, len(tables) + 1
        self.bags = _bags(tables)
        self.bottom = _layers(DENSE, 64, dim)
        self.in_order = _InOrder(tables)
        self.top = _layers(dim + count * (count - 1) // 2, 64, 1)
        self.register_buffer("pairs", torch.triu_indices(count, count, 1), persistent=False)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Returns the mean loss."""
        dense = self.bottom(batch.dense)
        pooled = self.in_order([self.bags(batch.sparse_features)])
        every = torch.cat([dense, pooled], dim=1).view(len(dense), -1, dense.shape[1])
        products = torch.bmm(every, every.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return _loss(self.top(torch.cat([dense, products], dim=1)), batch)


class _TwoTowers(nn.Module):
    def __init__(self, tables: Sequence[Table]) -> None:
        super().__init__()
        users, items = ([t for t in tables if t.name.startswith(p)] for p in ("user", "item"))
        self._widths = [sum(table.dim for table in part) for part in (users, items)]
        self.users, self.items = _bags(users), _bags(items)
        self.bottom = nn.Linear(DENSE, 16)
        self.in_order = _InOrder(tables)
        self.user_tower = _layers(16 + self._widths[0], 64, 32)
        self.item_tower = _layers(self._widths[1], 64, 32)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Returns the mean loss."""
        dense = self.bottom(batch.dense).relu()
        # Both are looked up before either is awaited.
        users, items = self.users(batch.sparse_features), self.items(batch.sparse_features)
        user, item = self.in_order([users, items]).split(self._widths, dim=1)
        scores = self.user_tower(torch.cat([dense, user], dim=1)) * self.item_tower(item)
        return _loss(scores.sum(1, keepdim=True), batch)


class _Mixed(nn.Module):
    def __init__(self, tables: Sequence[Table]) -> None:
        super().__init__()
        unpooled = [table for table in tables if table.kind == "unpooled"]
        self.bags = _bags([table for table in tables if table.kind != "unpooled"])
        configs = [
            EmbeddingConfig(
                name=table.name,
                num_embeddings=table.rows,
                embedding_dim=table.dim,
                feature_names=[table.name],
            )
            for table in unpooled
        ]
        self.sequences = EmbeddingCollection(configs, device=torch.device("meta"))
        self.bottom = nn.Linear(DENSE, 16)
        self.in_order = _InOrder(tables)
        self.top = _layers(16 + sum(table.dim for table in tables), 64, 1)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Returns the mean loss."""
        dense = self.bottom(batch.dense).relu()
        bags, sequences = self.bags(batch.sparse_features), self.sequences(batch.sparse_features)
        return _loss(self.top(torch.cat([dense, self.in_order([bags], sequences)], dim=1)), batch)


class _InOrder(nn.Module):
    """Columns of all tables in their order, whatever the plan's; sequences are summed here.

    As in `RehearsedModel`, the dense part begins behind it, and `bottom` is run first.
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        super().__init__()
        self._pooled = [table.name for table in tables if table.kind != "unpooled"]
        self._unpooled = [table.name for table in tables if table.kind == "unpooled"]

    def forward(self, pooled: Sequence[KeyedTensor], sequences: Any = None) -> torch.Tensor:
        """Returns the columns."""
        parts = KeyedTensor.regroup(list(pooled), [self._pooled])
        for name in self._unpooled:
            rows, lengths = sequences[name].values(), sequences[name].lengths().long()
            parts.append(torch.segment_reduce(rows, "sum", lengths=lengths))
        return torch.cat(parts, dim=1)


def _made(model: nn.Module, tables: Sequence[Table]) -> Drawn:
    """Returns the model with its optimizer of tables."""
    for module in model.modules():
        if isinstance(module, EmbeddingBagCollection | EmbeddingCollection):
            _apply_optimizer_in_backward(RowWiseAdagrad, module.parameters(), {"lr": LEARNING_RATE})
    return Drawn(model, tables)


def _rows(rng: np.random.Generator, count: int, most: int) -> list[int]:
    """Returns numbers of rows, as many of tens as of hundred thousands."""
    return [int(rows) for rows in np.exp(rng.uniform(np.log(50), np.log(most), count))]


def _tables(rng: np.random.Generator, part: str, lookups: Sequence[int]) -> list[Table]:
    rows, dims = _rows(rng, len(lookups), 400_000), rng.choice((16, 32, 64, 128), len(lookups))
    drawn = zip(rows, dims, lookups, strict=True)
    return [Table(f"{part}{n}", size, int(dim), hot) for n, (size, dim, hot) in enumerate(drawn)]


def _bags(tables: Sequence[Table]) -> EmbeddingBagCollection:
    pooling = {"sum": PoolingType.SUM, "mean": PoolingType.MEAN}
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                name=table.name,
                num_embeddings=table.rows,
                embedding_dim=table.dim,
                feature_names=[table.name],
                pooling=pooling[table.kind],
            )
            for table in tables
        ],
        device=torch.device("meta"),
    )


def _layers(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


def _loss(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    return nn.functional.binary_cross_entropy_with_logits(logits.squeeze(1), batch.labels)
