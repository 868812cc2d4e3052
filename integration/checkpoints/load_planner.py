"""A load planner of torch.distributed.checkpoint for models that are sharded by another plan.

The default planner finds parts of weights wherever they are. But optimizer state has other names in
copied tables, row-wise state has another shape with another number of column slices, and tables
with hot rows are two. This planner reads tables by what their numbers mean.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.storage import StorageReader

from autoshard.integration.checkpoints.table_parts import (
    WEIGHT,
    Part,
    StoredTables,
    TensorName,
    overlap,
    table_of_hot_ids,
    tensor_name,
)
from autoshard.workload.errors import UserError


class _Sink:
    """Takes what a reader has read, in place of a tensor that it would be copied to."""

    def __init__(self, size: torch.Size, write: Callable[[torch.Tensor], None]) -> None:
        self._size, self.copy_ = size, write

    def detach(self) -> "_Sink":
        return self

    def size(self) -> torch.Size:
        return self._size


class ReshardingPlanner(DefaultLoadPlanner):
    """Loads tables of a checkpoint of any plan; all else as `DefaultLoadPlanner` does.

    Args:
        reader: Reader of the checkpoint, for ids of hot rows.
    """

    def __init__(self, reader: StorageReader) -> None:
        super().__init__()
        self._reader = reader
        self._sinks: dict[ReadItem, _Sink] = {}
        self._sizes: Mapping[str, tuple[int, int]] = {}  # rows and dim of each table
        self._flat = list[torch.Tensor]()  # to which weighted parts are added

    def create_local_plan(self) -> LoadPlan:
        """Returns what this rank reads; UserError if the checkpoint is of something else."""
        metadata = cast("Metadata", self.metadata)
        paths = metadata.planner_data or {key: (key,) for key in metadata.state_dict_metadata}
        source = StoredTables.of_checkpoint(metadata, paths, self._hot_ids(paths))
        target = StoredTables.of_state(self.state_dict, self.mappings)
        joined = [
            table
            for table in {**source.hot_ids, **target.hot_ids}
            if table not in source.hot_ids
            or table not in target.hot_ids
            or not torch.equal(source.hot_ids[table], target.hot_ids[table])
        ]
        self._sizes, own = source.rows_and_dims(joined), target.rows_and_dims(joined)
        _check_tables(self._sizes, own)
        self._check_all_is_asked_for(target, paths)
        others = dict[str, Any]()
        for key, value in self.state_dict.items():
            path, is_stored = self.mappings[key], key in metadata.state_dict_metadata
            if key in target.tensors or table_of_hot_ids(path) is not None:
                continue
            if is_stored:
                others[key] = value
            elif tensor_name(path) is None:  # else a number of steps, which not all optimizers have
                raise UserError(f"{key} is not in the checkpoint: it is of another model")
        items = create_default_local_load_plan(others, metadata).items
        parts = source.parts(joined, self._sizes)
        for name, wanted in target.parts(joined, self._sizes).items():
            for part in wanted:
                if part.tensor is not None:
                    items += self._reads(part, part.tensor, parts.get(name, []), name)
        return LoadPlan(items, planner_data=set(own))

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Returns the plans of all ranks; UserError if no rank has a table of the checkpoint."""
        known: set[str] = set().union(*(plan.planner_data for plan in global_plan))
        for table in self._sizes:
            if table not in known:
                raise UserError(f"table {table} is not in the model: it is of another model")
        return global_plan

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Clears what is added up; by now no rank has found a fault."""
        for tensor in self._flat:
            tensor.zero_()
        return new_plan

    def resolve_tensor(self, read_item: ReadItem) -> Any:
        """Returns where to write what was read."""
        return self._sinks.get(read_item) or super().resolve_tensor(read_item)

    def _hot_ids(self, paths: Mapping[str, Sequence[Any]]) -> dict[str, torch.Tensor]:
        """Returns the ids of hot rows of each table of the checkpoint."""
        metadata = cast("Metadata", self.metadata)
        tables = {key: table_of_hot_ids(path) for key, path in paths.items()}
        ids = {
            key: torch.empty(value.size, dtype=torch.int64)
            for key, value in metadata.state_dict_metadata.items()
            if tables[key] is not None and isinstance(value, TensorStorageMetadata)
        }
        planner = DefaultLoadPlanner()
        planner.set_up_planner(dict(ids), metadata)
        self._reader.read_data(planner.create_local_plan(), planner).wait()
        return {str(tables[key]): values for key, values in ids.items()}

    def _check_all_is_asked_for(
        self, target: StoredTables, paths: Mapping[str, Sequence[Any]]
    ) -> None:
        """Raises UserError if the checkpoint has more than the state that it is loaded into."""
        trained = {tensor.name.table for tensor in target.tensors.values()
                   if tensor.name.kind != WEIGHT}  # fmt: skip
        for key, path in paths.items():
            if key in self.state_dict or str(path[0]) not in self.original_state_dict:
                continue
            name = tensor_name(path)
            if name is None and table_of_hot_ids(path) is None:
                how = ": run init_state() of its optimizer first" if "state" in path else ""
                raise UserError(f"{key} is in the checkpoint, and not in what is loaded{how}")
            if name is None or name.kind == WEIGHT or name.table in trained:
                continue
            held = target.weights.get(name.table)
            if held is not None and held.tensors:
                raise UserError(
                    f"table {name.table} has optimizer state in the checkpoint, and none in what "
                    "is loaded: train it by the same optimizer"
                )

    def _reads(
        self, wanted: Part, tensor: torch.Tensor, stored: Sequence[Part], name: TensorName
    ) -> Iterator[ReadItem]:
        """Yields what is to be read for a part of a table on this rank."""
        if not stored:
            raise UserError(
                f"table {name.table}: the checkpoint has no {name.kind} in "
                f"{'.'.join(map(str, name.head))}: it was saved without, or trained by another "
                "optimizer"
            )
        for part in stored:
            common = overlap(wanted, part)
            if common is None:
                continue
            size = torch.Size(common.lengths)
            nowhere = torch.Size([0] * len(size))  # a sink knows where to write
            item = ReadItem(
                LoadItemType.TENSOR,
                wanted.index,
                nowhere,
                part.index,
                torch.Size(common.offsets),
                size,
            )
            self._sinks[item] = _Sink(size, partial(common.write, tensor))
            if common.is_added:
                self._flat.append(tensor)
            yield item


def _check_tables(
    stored: Mapping[str, tuple[int, int]], wanted: Mapping[str, tuple[int, int]]
) -> None:
    for table, (rows, dim) in wanted.items():
        if table not in stored:
            raise UserError(f"table {table} is not in the checkpoint: it is of another model")
        if stored[table] != (rows, dim):
            raise UserError(
                f"table {table} has {stored[table][0]} rows of dim {stored[table][1]} in the "
                f"checkpoint, and {rows} of {dim} in the model"
            )
