"""Hot and cold rows in a model: the most used rows of a table on all ranks, the others sharded.

`with_hot_rows` replaces collections of a model by `HotCold`, in which such a table is two: that of
its hot rows, which the plan copies to all ranks, and that of its cold rows, which it shards. Each
lookup goes to one of them, and their pooled outputs are added. So the model computes what it did
before, with less to exchange, and with cold rows that are used alike by all ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast
from zlib import crc32

import numpy as np
import torch
from torch import nn
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from autoshard.workload.arrays import Ints
from autoshard.workload.batches import spreading_stride
from autoshard.workload.errors import UserError
from autoshard.workload.hot_ids import check_rows
from autoshard.workload.hot_rows import hot_name
from autoshard.workload.plans import ShardingPlan
from autoshard.workload.torchrec.bags import bag_tables

_MAX_ROWS = 2**31  # of a table: products of two numbers of rows have to be below 2^63


class RowNumbers(nn.Module):
    """Tells hot from cold rows of a table, and where each is among its like.

    Hot rows are numbered as they are given, cold rows with a stride, so that neighbours are apart
    from each other. Four bytes for each row hold that: searching for ids took 4 times as long.

    Args:
        hot_ids: Ids of hot rows.
        rows: Rows of the table.
        first: Number of the first cold row, which differs between tables, so that their most used
            cold rows are not all in the first block.
    """

    numbers: torch.Tensor  # those of cold rows, and -1 - number of hot ones

    def __init__(self, hot_ids: torch.Tensor, rows: int, first: int = 0) -> None:
        super().__init__()
        self.hot = len(hot_ids)
        numbers = torch.ones(rows, dtype=torch.int32)
        numbers[hot_ids] = 0
        cold = numbers.cumsum(0).sub_(1).mul_(spreading_stride(rows - self.hot)).add_(first)
        numbers = cold.remainder_(rows - self.hot).to(torch.int32)
        numbers[hot_ids] = -1 - torch.arange(self.hot, dtype=torch.int32)
        self.register_buffer("numbers", numbers, persistent=False)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns which of these ids are hot, [ids]; numbers of the hot ones, and of the others."""
        numbers = self.numbers.to(ids.device)[ids].to(ids.dtype)
        hot = numbers < 0
        return hot, -1 - numbers[hot], numbers[~hot]

    def order(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the ids of hot rows and of cold rows, each in the order of their numbers."""
        order = torch.argsort(self.numbers.cpu())
        return order[: self.hot].flip(0), order[self.hot :]


class HotCold(nn.Module):
    """A collection in which some tables have hot rows.

    Its outputs have the keys and values of the collection that it replaces, in another order.

    Args:
        bags: The collection, which is not sharded.
        hot_ids: Ids of hot rows by table.
    """

    def __init__(self, bags: EmbeddingBagCollection, hot_ids: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        configs, self._features = [], dict[str, str]()  # features with hot rows: their table
        for config in bags.embedding_bag_configs():
            if config.name not in hot_ids:
                configs.append(config)
                continue
            if config.pooling is not PoolingType.SUM:
                raise UserError(
                    f"table {config.name} pools by {config.pooling.name}: hot and cold rows can be "
                    "added where a table pools by SUM"
                )
            count = len(hot_ids[config.name])
            cold = replace(config, num_embeddings=config.num_embeddings - count)
            features = [hot_name(feature) for feature in config.feature_names]
            name = hot_name(config.name)
            hot = replace(config, name=name, num_embeddings=count, feature_names=features)
            configs += [cold, hot]
            self._features.update(dict.fromkeys(config.feature_names, config.name))
        rows = {config.name: config.num_embeddings for config in bags.embedding_bag_configs()}
        self.numbers = nn.ModuleDict(
            {
                name: RowNumbers(ids, rows[name], crc32(name.encode()))
                for name, ids in hot_ids.items()
            }
        )
        self._others = [
            feature
            for config in bags.embedding_bag_configs()
            for feature in config.feature_names
            if feature not in self._features
        ]
        self.hot_and_cold = EmbeddingBagCollection(
            tables=configs, is_weighted=bags.is_weighted(), device=bags.device
        )
        for config in configs:
            _prepare_as(
                self.hot_and_cold.embedding_bags[config.name].weight,
                bags.embedding_bags[_origin(config.name, rows, hot_ids)].weight,
            )

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Returns pooled embeddings of all features. `features` may be what `inputs` returned."""
        pooled = self.hot_and_cold(self.inputs(features))
        both, hot = list(self._features), [hot_name(feature) for feature in self._features]
        cold_sums, hot_sums, *others = KeyedTensor.regroup(
            [pooled], [both, hot, *([self._others] if self._others else [])]
        )
        width = dict(zip(pooled.keys(), pooled.length_per_key(), strict=True))
        keys = [*both, *self._others]
        values = torch.cat([cold_sums + hot_sums, *others], dim=1)
        return KeyedTensor(keys, [width[key] for key in keys], values)

    def inputs(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Returns lookups of hot and cold rows apart; what is so already is returned as it is.

        A data loader may do this beforehand, which saves the time in training.
        """
        if any(hot_name(feature) in features.keys() for feature in self._features):  # noqa: SIM118
            return features
        samples, ends = features.stride(), features.offset_per_key()
        lengths = features.lengths().view(-1, samples)
        values, weights = features.values(), features.weights_or_none()
        split = _Split(values, weights)
        keys, hot_keys = list(features.keys()), list[str]()
        cold_parts, hot_parts = list[_Part](), list[_Part]()
        for number, key in enumerate(keys):
            part = slice(ends[number], ends[number + 1])
            if key not in self._features:
                cold_parts.append(split.whole(part, lengths[number]))
                continue
            hot, cold = split.by(self._numbers_of(self._features[key]), part, lengths[number])
            cold_parts.append(cold)
            hot_parts.append(hot)
            hot_keys.append(hot_name(key))
        return _joined([*keys, *hot_keys], [*cold_parts, *hot_parts])

    def split(self, table: str, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns weights, or states of the optimizer, of hot and of cold rows of a table.

        Args:
            table: Name of a table with hot rows.
            whole: Values of all rows, [rows, ...].
        """
        hot, cold = self._numbers_of(table).order()
        return whole[hot], whole[cold]

    def ids_of_parts(self) -> dict[str, torch.Tensor]:
        """Returns the ids of the rows of each table in `hot_and_cold` that is a part of another."""
        found = {}
        for table in self.numbers:
            found[hot_name(table)], found[table] = self._numbers_of(table).order()
        return found

    def _numbers_of(self, table: str) -> RowNumbers:
        return cast("RowNumbers", self.numbers[table])

    def joined(self, table: str, hot: torch.Tensor, cold: torch.Tensor) -> torch.Tensor:
        """Returns the values of all rows of a table, which `split` has taken apart."""
        whole = cold.new_empty((len(hot) + len(cold), *cold.shape[1:]))
        for ids, values in zip(self._numbers_of(table).order(), (hot, cold), strict=True):
            whole[ids] = values
        return whole


_Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]  # values, lengths, weights


class _Split:
    """Splits lookups of a batch."""

    def __init__(self, values: torch.Tensor, weights: torch.Tensor | None) -> None:
        self._values, self._weights = values, weights

    def whole(self, part: slice, lengths: torch.Tensor) -> _Part:
        return self._values[part], lengths, None if self._weights is None else self._weights[part]

    def by(self, numbers: RowNumbers, part: slice, lengths: torch.Tensor) -> tuple[_Part, _Part]:
        """Returns the lookups of hot and of cold rows."""
        hot, hot_ids, cold_ids = numbers(self._values[part])
        counted = torch.zeros(len(hot) + 1, dtype=lengths.dtype, device=lengths.device)
        torch.cumsum(hot, 0, dtype=counted.dtype, out=counted[1:])
        ends = torch.cumsum(lengths, 0)
        at_ends = counted[ends]
        of_hot = torch.diff(at_ends, prepend=at_ends.new_zeros(1))
        weights = None if self._weights is None else self._weights[part]
        hot_weights = None if weights is None else weights[hot]
        cold_weights = None if weights is None else weights[~hot]
        return (hot_ids, of_hot, hot_weights), (cold_ids, lengths - of_hot, cold_weights)


def _joined(keys: list[str], parts: Sequence[_Part]) -> KeyedJaggedTensor:
    values, lengths, weights = zip(*parts, strict=True)
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.cat(values),
        lengths=torch.cat(lengths),
        weights=None if weights[0] is None else torch.cat(weights),
    )


def with_hot_rows(
    model: nn.Module, plan: ShardingPlan, hot_ids: Mapping[str, Ints | torch.Tensor]
) -> nn.Module:
    """Returns the model, in which tables have the hot rows of a plan. It is changed in place.

    Call it before `to_torchrec` and `DistributedModelParallel`. Weights that are there, not on
    device meta, are kept.

    Args:
        model: Model that is not sharded yet.
        plan: Plan for it.
        hot_ids: Ids of the most used rows of each table, in the order of use, as `load_hot_ids`
            reads them; at least as many as the plan says.

    Raises:
        UserError: A table of the plan is not in the model, or its ids are not known.
    """
    tables, by_path = bag_tables(model), dict[str, dict[str, torch.Tensor]]()
    for name, count in plan.hot_rows:
        if name not in tables:
            raise UserError(f"table {name}, which has hot rows in the plan, is not in the model")
        config = tables[name].config
        ids = _checked(name, config.num_embeddings, count, hot_ids)
        by_path.setdefault(tables[name].path, {})[config.name] = ids
    for path, ids_of_tables in by_path.items():
        bags = model.get_submodule(path)
        module = HotCold(bags, ids_of_tables)
        _fill(module, bags)
        if not path:
            model = module
        else:
            model.set_submodule(path, module)
    return model


def _checked(
    table: str, rows: int, count: int, known: Mapping[str, Ints | torch.Tensor]
) -> torch.Tensor:
    if table not in known or len(known[table]) < count:
        found = len(known[table]) if table in known else 0
        raise UserError(
            f"the plan has {count} hot rows of table {table}, and {found} ids are given: "
            "profile_tables.py --hot-ids writes them"
        )
    if rows > _MAX_ROWS:
        raise UserError(f"table {table} has {rows} rows, too many to tell hot from cold ones")
    ids = np.asarray(known[table][:count], np.int64)
    check_rows(table, rows, ids)
    return torch.from_numpy(ids)


def _fill(module: HotCold, bags: EmbeddingBagCollection) -> None:
    """Copies weights, if there are any."""
    for name, table in bags.embedding_bags.items():
        if table.weight.is_meta:
            continue
        with torch.no_grad():
            if name not in module.numbers:
                module.hot_and_cold.embedding_bags[name].weight.copy_(table.weight)
                continue
            hot, cold = module.split(name, table.weight)
            module.hot_and_cold.embedding_bags[hot_name(name)].weight.copy_(hot)
            module.hot_and_cold.embedding_bags[name].weight.copy_(cold)


def _origin(name: str, rows: Mapping[str, int], hot_ids: Mapping[str, Any]) -> str:
    """Returns the table whose rows a part has."""
    return name if name in rows else next(t for t in hot_ids if hot_name(t) == name)


def _prepare_as(weight: nn.Parameter, other: nn.Parameter) -> None:
    """Gives a weight the optimizer that another one has, which is fused into the backward pass."""
    for name in ("_optimizer_classes", "_optimizer_kwargs"):
        if hasattr(other, name):
            setattr(weight, name, getattr(other, name))
