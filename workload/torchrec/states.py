"""Loads weights into a sharded model with pieces of any widths."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor

from autoshard.workload.errors import UserError
from autoshard.workload.torchrec.bags import HOT_IDS


def load_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Loads weights into a DistributedModelParallel, in place, without communication.

    `load_state_dict` fails on a sharded state with pieces of different widths: some ranks raise,
    others wait. A sharded state must have the same plan. Optimizer state is not loaded.

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
            if isinstance(target, ShardedTensor):
                _load_table(name, target, state[name])
            else:
                _copy(name, target, state[name])


def _load_table(name: str, target: ShardedTensor, source: Any) -> None:
    pieces: Any = None  # by first row and column, if the state is sharded
    if isinstance(source, ShardedTensor):
        pieces = {tuple(s.metadata.shard_offsets): s.tensor for s in source.local_shards()}
        if pieces.keys() != {tuple(s.metadata.shard_offsets) for s in target.local_shards()}:
            raise UserError(f"weight {name}: the state is sharded by another plan")
    elif tuple(source.shape) != tuple(target.metadata().size):
        raise _misshapen(name, target.metadata().size, source.shape)
    for shard in target.local_shards():
        (row, column), (rows, width) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
        whole = pieces is None
        part = source[row : row + rows, column : column + width] if whole else pieces[row, column]
        _copy(name, shard.tensor, part)


def _copy(name: str, target: torch.Tensor, source: torch.Tensor) -> None:
    if target.shape != source.shape:
        raise _misshapen(name, target.shape, source.shape)
    target.copy_(source)


def _misshapen(name: str, wanted: torch.Size, found: torch.Size) -> UserError:
    return UserError(
        f"weight {name} is {tuple(found)} in the state and {tuple(wanted)} in the model"
    )
