"""Tables as they are in a state or a checkpoint: which part of a table each shard has."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from autoshard.integration.models.bags import HOT_IDS, name_of
from autoshard.integration.plans.row_numbers import row_numbers
from autoshard.workload.errors import UserError
from autoshard.workload.tables.table import HOT

WEIGHT = "weight"
_WEIGHT = re.compile(r"(?:(?P<path>.+)\.)?embedding_bags\.(?P<table>[^.]+)\.weight")
_HOT_IDS = re.compile(rf"(?:(?P<path>.+)\.)?numbers\.(?P<table>[^.]+)\.{HOT_IDS}")
_SUM = "sum"  # of squared gradients, as torch.optim.Adagrad calls it
_FUSED_SUM = "momentum1"  # as TorchRec does
_BLOCK = 2**16  # rows that are copied at a time if they are in another order


class TensorName(NamedTuple):
    """What a tensor of a table is: where it is in the state, its table, and weight or state."""

    head: tuple[Any, ...]
    table: str
    kind: str


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a table, as it is stored.

    Args:
        name: What it is.
        size: Shape of all of it.
        chunks: First element and size of each shard.
        tensors: The shards that this rank has, by their first element; none of a checkpoint.
    """

    name: TensorName
    size: tuple[int, ...]
    chunks: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
    tensors: Mapping[tuple[int, ...], torch.Tensor]


@dataclass(frozen=True)
class Part:
    """A part of a table in one shard.

    Args:
        index: Key and first element of the shard.
        rows: First row, and number of rows.
        columns: First column, and number of columns.
        flat: Whether there is one number per row, for all of these columns.
        tensor: The shard, if this rank has it.
        ids: Of which rows of the table the rows are, all of `rows`; None: of those with the same
            number.
    """

    index: MetadataIndex
    rows: tuple[int, int]
    columns: tuple[int, int]
    flat: bool
    tensor: torch.Tensor | None
    ids: torch.Tensor | None

    def all_ids(self) -> torch.Tensor:
        """Returns which rows of the table these are."""
        first, count = self.rows
        return torch.arange(first, first + count) if self.ids is None else self.ids


@dataclass(frozen=True)
class Overlap:
    """What a part of a table has in common with a part that is stored.

    Args:
        wanted: The part that is to be filled.
        stored: The other one.
        offsets: First element in the stored shard.
        lengths: Size of what is read from there: [rows, columns], or [rows].
        columns: Columns of the wanted part.
    """

    wanted: Part
    stored: Part
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    columns: slice

    @property
    def _share(self) -> float:
        return float(self.columns.stop - self.columns.start) / self.wanted.columns[1]

    @property
    def is_added(self) -> bool:
        """Whether it is one addend of a mean: the wanted part has to be zero before."""
        return self.wanted.flat and self._share < 1

    @torch.no_grad()
    def write(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Writes values that were read to the shard of the wanted part."""
        for read, written in self._row_pairs():
            some = values[read].to(tensor)
            if not self.wanted.flat:
                tensor[:, self.columns][written] = some[:, None] if self.stored.flat else some
                continue
            mean = some if self.stored.flat else some.mean(1)
            tensor[written] = tensor[written] + mean * self._share if self.is_added else mean

    def _row_pairs(self) -> Iterator[tuple[Any, Any]]:
        """Yields which of the rows that are read go to which rows of the part, as indices."""
        wanted, stored = self.wanted, self.stored
        if wanted.ids is None and stored.ids is None:
            first = max(wanted.rows[0], stored.rows[0]) - wanted.rows[0]
            yield slice(None), slice(first, first + self.lengths[0])
            return
        ids, order = stored.all_ids().sort()
        for block in torch.split(torch.arange(wanted.rows[1]), _BLOCK):
            of_block = wanted.all_ids()[block]
            numbers = torch.searchsorted(ids, of_block).clamp_(max=len(ids) - 1)
            found = ids[numbers] == of_block
            yield order[numbers[found]], block[found]


def overlap(wanted: Part, stored: Part) -> Overlap | None:
    """Returns what two parts of a table have in common; None if that is nothing."""
    column = max(stored.columns[0], wanted.columns[0])
    width = min(sum(stored.columns), sum(wanted.columns)) - column
    row = max(wanted.rows[0], stored.rows[0])
    rows = min(sum(wanted.rows), sum(stored.rows)) - row
    if wanted.ids is not None or stored.ids is not None:
        row, rows = stored.rows  # any of them
    if width <= 0 or rows <= 0:
        return None
    dims = 1 if stored.flat else 2
    offsets = (row - stored.rows[0], column - stored.columns[0])[:dims]
    first = column - wanted.columns[0]
    columns = slice(first, first + width)
    return Overlap(wanted, stored, offsets, (rows, width)[:dims], columns)


class StoredTables:
    """The tables of a state or of a checkpoint.

    Args:
        tensors: Tensors by key.
        hot_ids: Ids of hot rows by table.
    """

    def __init__(
        self, tensors: Mapping[str, StoredTensor], hot_ids: Mapping[str, torch.Tensor]
    ) -> None:
        self.tensors, self.hot_ids = tensors, hot_ids
        self.weights = {
            tensor.name.table: tensor for tensor in tensors.values() if tensor.name.kind == WEIGHT
        }

    @staticmethod
    def of_checkpoint(
        metadata: Metadata,
        paths: Mapping[str, Sequence[Any]],
        hot_ids: Mapping[str, torch.Tensor],
    ) -> "StoredTables":
        """Returns the tables of a checkpoint; `paths` are those of its keys in the state."""
        found = dict[str, StoredTensor]()
        for key, value in metadata.state_dict_metadata.items():
            name = tensor_name(paths[key])
            if name is not None and isinstance(value, TensorStorageMetadata) and len(value.size):
                chunks = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in value.chunks]
                found[key] = StoredTensor(name, tuple(value.size), chunks, {})
        return StoredTables(found, hot_ids)

    @staticmethod
    def of_state(state: Mapping[str, Any], paths: Mapping[str, Sequence[Any]]) -> "StoredTables":
        """Returns the tables of which this rank has parts in its state."""
        found, hot_ids = dict[str, StoredTensor](), dict[str, torch.Tensor]()
        for key, value in state.items():
            if (table := table_of_hot_ids(paths[key])) is not None:
                hot_ids[table] = value.cpu()
            name = tensor_name(paths[key])
            if name is None or not isinstance(value, torch.Tensor) or not value.dim():
                continue
            size = tuple(value.size())
            start = (0,) * len(size)
            chunks, tensors = [(start, size)], {start: value}
            if isinstance(value, ShardedTensor):
                shards, own = value.metadata().shards_metadata, value.local_shards()
                chunks = [(tuple(each.shard_offsets), tuple(each.shard_sizes)) for each in shards]
                tensors = {tuple(shard.metadata.shard_offsets): shard.tensor for shard in own}
            found[key] = StoredTensor(name, size, chunks, tensors)
        return StoredTables(found, hot_ids)

    def rows_and_dims(self, joined: Iterable[str]) -> dict[str, tuple[int, int]]:
        """Returns rows and dim of each table; hot rows of `joined` belong to their table."""
        found = {name: (each.size[0], each.size[1]) for name, each in self.weights.items()}
        for table in set(joined) & set(self.hot_ids):
            found.pop(table + HOT, None)
            if table in found:
                found[table] = found[table][0] + len(self.hot_ids[table]), found[table][1]
        return found

    def parts(
        self, joined: Iterable[str], sizes: Mapping[str, tuple[int, int]]
    ) -> dict[TensorName, list[Part]]:
        """Returns the parts of what each tensor is of; `sizes` are rows and dim of whole tables."""
        ids, names = dict[str, torch.Tensor](), dict[str, str]()
        for table in set(joined) & set(self.hot_ids):
            numbers = row_numbers(table.split(".")[-1], self.hot_ids[table], sizes[table][0])
            ids[table + HOT], ids[table] = numbers.order()
            names[table + HOT] = table
        found = dict[TensorName, list[Part]]()
        for key, tensor in self.tensors.items():
            table = tensor.name.table
            name = tensor.name._replace(table=names.get(table, table))
            found.setdefault(name, []).extend(self._parts_of(key, tensor, ids.get(table)))
        return found

    def _parts_of(self, key: str, tensor: StoredTensor, ids: torch.Tensor | None) -> Iterator[Part]:
        table = tensor.name.table
        if table not in self.weights:
            raise UserError(f"table {table} has optimizer state and no weights")
        weight = self.weights[table]
        slices = sorted({(start[1], size[1]) for start, size in weight.chunks})
        flat = len(tensor.size) == 1
        if flat and tensor.size[0] == weight.size[0]:  # one number a row, wherever the row is
            slices = [(0, weight.size[1])]
        if tensor.size not in (weight.size, (weight.size[0] * len(slices),)):
            raise UserError(
                f"table {table} has {tensor.name.kind} of shape {tensor.size} for weights of shape "
                f"{weight.size} in {len(slices)} column slices, which is not known here"
            )
        for start, size in tensor.chunks:
            # TorchRec numbers rows of the second slice after those of the first one, and so on.
            first = start[0] % weight.size[0]
            columns = slices[start[0] // weight.size[0]] if flat else (start[1], size[1])
            some = None if ids is None else ids[first : first + size[0]]
            index, own = MetadataIndex(key, start), tensor.tensors.get(start)
            yield Part(index, (first, size[0]), columns, flat, own, some)


def tensor_name(path: Sequence[Any]) -> TensorName | None:
    """Returns what a tensor of a table is by its path in a state; None for all others."""
    for number, each in enumerate(path):
        if (found := _WEIGHT.fullmatch(str(each))) is None:
            continue
        head, rest = tuple(path[:number]), path[number + 1 :]
        table = name_of(found["path"] or "", found["table"])
        if not rest:
            return TensorName(head, table, WEIGHT)
        kind = str(rest[0]).removeprefix(f"{found['table']}.")
        return TensorName(head, table, _SUM if kind == _FUSED_SUM else kind)
    return None


def table_of_hot_ids(path: Sequence[Any]) -> str | None:
    """Returns the table whose hot rows are at a path in a state, if any are."""
    found = _HOT_IDS.fullmatch(str(path[-1]))
    return None if found is None else name_of(found["path"] or "", found["table"])
