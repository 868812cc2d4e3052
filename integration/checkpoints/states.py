"""Loads weights into a sharded model with pieces of any widths."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

from autoshard.integration.models.bags import HOT_IDS
from autoshard.workload.errors import UserError


def load_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Loads weights into a DistributedModelParallel or DMPCollection, in place.

    Nothing is communicated. `load_state_dict` fails on a sharded state with pieces of different
    widths: some ranks raise, others wait. A sharded state must have the same plan. Optimizer state
    is not loaded.

    Args:
        model: Sharded model.
        state: State of the same model, sharded or not. From tables that are not sharded, each rank
            takes its own columns.

    Raises:
        UserError: A weight is missing, unknown or of another shape.
    """
    own = model.state_dict()
    for name in (*own, *state):
        if name not in own or name not in state:
            where = "state" if name in own else "model"
            raise UserError(f"weight {name} is not in the {where}: it is of another model")
    with torch.no_grad():
        for name, target in own.items():
            if name.endswith(f".{HOT_IDS}") and not torch.equal(target.cpu(), state[name].cpu()):
                raise UserError(f"{name}: the state has other hot rows; take its file of hot ids")
            if isinstance(target, ShardedTensor | DTensor):
                _load_table(name, target, state[name])
            else:
                _copy(name, target, state[name])


def local_parts(weights: ShardedTensor | DTensor) -> dict[tuple[int, int], torch.Tensor]:
    """Returns the parts of a sharded table on this rank, by first row and column.

    DMPCollection's tables are DTensors, those of DistributedModelParallel ShardedTensors.
    """
    if isinstance(weights, ShardedTensor):
        shards = [(shard.metadata.shard_offsets, shard.tensor) for shard in weights.local_shards()]
        return {(row, column): part for (row, column), part in shards}
    local: Any = weights.to_local()
    # A rank without parts has an offset nevertheless.
    return dict(zip(map(tuple, local.local_offsets()), local.local_shards(), strict=False))


def _load_table(name: str, target: ShardedTensor | DTensor, source: Any) -> None:
    own, pieces = local_parts(target), None
    size = target.metadata().size if isinstance(target, ShardedTensor) else target.shape
    if isinstance(source, ShardedTensor | DTensor):
        pieces = local_parts(source)
        if pieces.keys() != own.keys():
            raise UserError(f"weight {name}: the state is sharded by another plan")
    elif tuple(source.shape) != tuple(size):
        raise _misshapen(name, size, source.shape)
    for (row, column), part in own.items():
        if pieces is not None:
            _copy(name, part, pieces[row, column])
        else:
            _copy(name, part, source[row : row + len(part), column : column + part.shape[1]])


def _copy(name: str, target: torch.Tensor, source: torch.Tensor) -> None:
    if target.shape != source.shape:
        raise _misshapen(name, target.shape, source.shape)
    target.copy_(source)


def _misshapen(name: str, wanted: torch.Size, found: torch.Size) -> UserError:
    return UserError(
        f"weight {name} is {tuple(found)} in the state and {tuple(wanted)} in the model"
    )
