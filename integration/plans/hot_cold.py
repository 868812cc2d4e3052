"""Hot and cold rows in a model: the most used rows of a table on all ranks, the others sharded.

`with_hot_rows` replaces collections of a model by `HotCold`, in which such a table is two: that of
its hot rows, which the plan copies to all ranks, and that of its cold rows, which it shards. Each
lookup goes to one of them, and their pooled outputs are added. So the model computes what it did
before, with less to exchange, and with cold rows that are used alike by all ranks. A table may have
no hot rows: then its rows are numbered anew, and nothing else changes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from autoshard.integration.models.bags import bag_tables, hashed_feature
from autoshard.integration.plans.row_numbers import RowNumbers, row_numbers
from autoshard.workload.access.hot_ids import check_rows
from autoshard.workload.arrays import Ints
from autoshard.workload.errors import UserError
from autoshard.workload.plans.plan import ShardingPlan
from autoshard.workload.tables.table import hot_name

_MAX_ROWS = 2**31  # of a table: products of two numbers of rows have to be below 2^63


class HotCold(nn.Module):
    """A collection in which some tables have hot rows.

    Its outputs have the keys and values of the collection that it replaces, in another order.

    Args:
        bags: The collection, which is not sharded.
        hot_ids: Ids of hot rows by table.
    """

    def __init__(self, bags: EmbeddingBagCollection, hot_ids: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        every = {config.name: config for config in bags.embedding_bag_configs()}
        _check_names(every, hot_ids)
        parts = {name: [config] for name, config in every.items()}
        for name, ids in hot_ids.items():
            config = every[name]
            if not len(ids):
                hashed = [hashed_feature(feature) for feature in config.feature_names]
                parts[name] = [replace(config, feature_names=hashed)]
                continue
            cold = replace(config, num_embeddings=config.num_embeddings - len(ids))
            features = [_hot_feature(feature) for feature in config.feature_names]
            hot = replace(
                config, name=hot_name(name), num_embeddings=len(ids), feature_names=features
            )
            parts[name] = [cold, hot]
        self.numbers = nn.ModuleDict(
            {
                name: row_numbers(name, ids, every[name].num_embeddings)
                for name, ids in hot_ids.items()
            }
        )
        tables = {feature: name for name in hot_ids for feature in every[name].feature_names}
        both = [feature for feature, name in tables.items() if len(hot_ids[name])]
        keys = {
            inner: feature
            for name, config in every.items()
            for inner, feature in zip(
                parts[name][0].feature_names, config.feature_names, strict=True
            )
        }
        # Modules of their own, which TorchRec's pipelines do not trace into.
        self.splitter = _Splitter(self.numbers, tables)
        self.sums = _Sums(both, keys)
        self.hot_and_cold = EmbeddingBagCollection(
            tables=[part for some in parts.values() for part in some],
            is_weighted=bags.is_weighted(),
            device=bags.device,
        )
        for name, some in parts.items():
            for part in some:
                weight = self.hot_and_cold.embedding_bags[part.name].weight
                prepare_as(weight, bags.embedding_bags[name].weight)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Returns pooled embeddings of all features. `features` may be what `inputs` returned."""
        pooled: KeyedTensor = self.sums(self.hot_and_cold(self.splitter(features)))
        return pooled

    def inputs(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Returns lookups of hot and cold rows apart; what is so already is returned as it is.

        A data loader may do this beforehand, which saves the time in training.
        """
        apart: KeyedJaggedTensor = self.splitter(features)
        return apart

    @property
    def tables(self) -> list[str]:
        """Names of the tables with hot rows."""
        return list(self.numbers)

    def split(self, table: str, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns weights, or states of the optimizer, of hot and of cold rows of a table.

        Args:
            table: Name of a table with hot rows.
            whole: Values of all rows, [rows, ...].
        """
        hot, cold = _numbers_of(self.numbers, table).order()
        return whole[hot], whole[cold]

    def joined(self, table: str, hot: torch.Tensor, cold: torch.Tensor) -> torch.Tensor:
        """Returns the values of all rows of a table, which `split` has taken apart."""
        whole = cold.new_empty((len(hot) + len(cold), *cold.shape[1:]))
        ids_of_parts = _numbers_of(self.numbers, table).order()
        for ids, values in zip(ids_of_parts, (hot, cold), strict=True):
            whole[ids] = values
        return whole

    def ids_of_parts(self) -> dict[str, torch.Tensor]:
        """Returns the ids of the rows of each table in `hot_and_cold` that is a part of another."""
        found = {}
        for table in self.tables:
            hot, found[table] = _numbers_of(self.numbers, table).order()
            if len(hot):
                found[hot_name(table)] = hot
        return found


def _check_names(tables: Mapping[str, Any], hot: Mapping[str, torch.Tensor]) -> None:
    """Raises UserError unless these tables of a collection can have these hot rows, or none."""
    users: dict[str, str] = {}
    for name, config in tables.items():
        for feature in config.feature_names:
            first = users.setdefault(feature, name)
            if first != name and {first, name} & set(hot):
                raise UserError(
                    f"tables {first} and {name} share feature {feature}: hot rows and hashed ids "
                    "are for tables with features of their own"
                )
    for name in (name for name, ids in hot.items() if len(ids)):
        if tables[name].pooling is not PoolingType.SUM:
            raise UserError(
                f"table {name} pools by {tables[name].pooling.name}: hot and cold rows can be "
                "added where a table pools by SUM"
            )
        if hot_name(name) in tables:
            raise UserError(
                f"hot rows of table {name} would be table {hot_name(name)}, which there is "
                "already: rename it"
            )


def _numbers_of(numbers: nn.ModuleDict, table: str) -> RowNumbers:
    return cast("RowNumbers", numbers[table])


def _hot_feature(feature: str) -> str:
    """Returns the key of a feature's hot lookups, which no feature of a user has."""
    return f"hot rows of {feature}"


_PARTS = _hot_feature, hashed_feature


class _Splitter(nn.Module):
    """Splits a batch's lookups into those of hot and of cold rows.

    Args:
        numbers: `RowNumbers` by table.
        tables: Features of these tables, and the table of each.
    """

    def __init__(self, numbers: nn.ModuleDict, tables: Mapping[str, str]) -> None:
        super().__init__()
        # In a tuple, as they belong to `HotCold`: pipelines put another module in place of this.
        self._numbers, self._tables = (numbers,), dict(tables)

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Returns hot and cold lookups apart."""
        keys = list(features.keys())
        if any(of(feature) in keys for feature in self._tables for of in _PARTS):
            return features
        samples, ends = features.stride(), features.offset_per_key()
        lengths = features.lengths().view(-1, samples)
        split = _Split(features.values(), features.weights_or_none())
        hot_keys = list[str]()
        cold_parts, hot_parts = list[_Part](), list[_Part]()
        for number, key in enumerate(keys):
            part = slice(ends[number], ends[number + 1])
            if key not in self._tables:
                cold_parts.append(split.whole(part, lengths[number]))
                continue
            numbers = _numbers_of(self._numbers[0], self._tables[key])
            if not numbers.hot:
                keys[number] = hashed_feature(key)
                values, counts, weights = split.whole(part, lengths[number])
                cold_parts.append((numbers.hashed(values), counts, weights))
                continue
            hot, cold = split.by(numbers, part, lengths[number])
            cold_parts.append(cold)
            hot_parts.append(hot)
            hot_keys.append(_hot_feature(key))
        return _joined([*keys, *hot_keys], [*cold_parts, *hot_parts])


class _Sums(nn.Module):
    """Adds pooled embeddings of hot and of cold rows.

    Args:
        both: Features of tables with hot rows.
        keys: All features, by their keys in the collection of hot and cold rows.
    """

    def __init__(self, both: Sequence[str], keys: Mapping[str, str]) -> None:
        super().__init__()
        self._both, self._keys = list(both), dict(keys)
        self._others = [key for key in keys if key not in both]

    def forward(self, pooled: KeyedTensor) -> KeyedTensor:
        """Returns pooled embeddings of all features."""
        if not self._both:
            keys = [self._keys[key] for key in pooled.keys()]  # noqa: SIM118 - no mapping
            return KeyedTensor(keys, pooled.length_per_key(), pooled.values())
        groups = [self._both, [_hot_feature(feature) for feature in self._both]]
        groups += [self._others] if self._others else []
        cold_sums, hot_sums, *others = KeyedTensor.regroup([pooled], groups)
        width = dict(zip(pooled.keys(), pooled.length_per_key(), strict=True))
        keys = [*self._both, *self._others]
        values = torch.cat([cold_sums + hot_sums, *others], dim=1)
        return KeyedTensor([self._keys[key] for key in keys], [width[key] for key in keys], values)


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
    model: nn.Module,
    plan: ShardingPlan,
    hot_ids: Mapping[str, Ints | torch.Tensor] = MappingProxyType({}),
) -> nn.Module:
    """Returns the model, in which tables have the hot rows, or the hashed ids, of a plan. It is
    changed in place.

    Call it before `to_torchrec` and `DistributedModelParallel`. Weights that are there, not on
    device meta, are kept.

    Args:
        model: Model that is not sharded yet.
        plan: Plan for it.
        hot_ids: Ids of the most used rows of each table, in the order of use, as `load_hot_ids`
            reads them; at least as many as the plan says, so none for tables without hot rows.

    Raises:
        UserError: A table of the plan is not in the model, or its ids are not known.
    """
    tables, by_path = bag_tables(model), dict[str, dict[str, torch.Tensor]]()
    for name, count in plan.hot_rows.items():
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
    if not count:
        return torch.empty(0, dtype=torch.int64)
    if table not in known or len(known[table]) < count:
        found = len(known[table]) if table in known else 0
        raise UserError(
            f"the plan has {count} hot rows of table {table}, and {found} ids are given: "
            "profile_tables.py --hot-ids writes them"
        )
    if not 0 < count < rows:
        raise UserError(f"the plan has {count} hot rows of the {rows} of table {table}")
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
            if name not in module.tables:
                module.hot_and_cold.embedding_bags[name].weight.copy_(table.weight)
                continue
            hot, cold = module.split(name, table.weight)
            if len(hot):
                module.hot_and_cold.embedding_bags[hot_name(name)].weight.copy_(hot)
            module.hot_and_cold.embedding_bags[name].weight.copy_(cold)


def prepare_as(weight: nn.Parameter, other: nn.Parameter) -> None:
    """Gives a weight the optimizer that another one has, which is fused into the backward pass."""
    for name in ("_optimizer_classes", "_optimizer_kwargs"):
        if hasattr(other, name):
            setattr(weight, name, getattr(other, name))
