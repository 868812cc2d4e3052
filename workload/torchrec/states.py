"""Loading weights into a sharded model, whatever the widths of its slices."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor

from autoshard.workload.errors import UserError


def load_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load weights into a DistributedModelParallel, in place and on every rank for itself.

    Its own `load_state_dict` fails on a sharded state whose slices differ in width: some ranks
    raise, others wait. A sharded state must be of the same plan. State of optimizers is not loaded.

    Args:
        model: sharded.
        state: of the same model, sharded or not. Of tables that are not sharded in it, each rank
            takes the columns that it holds.

    Raises:
        UserError: a line on the first weight that is missing, unknown or of another shape.
    """
    own = model.state_dict()
    for name in (*own, *state):
        if name not in own or name not in state:
            where = "state" if name in own else "model"
            raise UserError(f"weight {name} is not in the {where}: it is of another model")
    with torch.no_grad():
        for name, target in own.items():
            if isinstance(target, ShardedTensor):
                _load_table(name, target, state[name])
            else:
                _copy(name, target, state[name])


def _load_table(name: str, target: ShardedTensor, source: Any) -> None:
    theirs: Any = None  # by first row and column, of a state that is sharded
    if isinstance(source, ShardedTensor):
        theirs = {tuple(s.metadata.shard_offsets): s.tensor for s in source.local_shards()}
        if theirs.keys() != {tuple(s.metadata.shard_offsets) for s in target.local_shards()}:
            raise UserError(f"weight {name}: the state is sharded by another plan")
    elif tuple(source.shape) != tuple(target.metadata().size):
        raise _misshapen(name, target.metadata().size, source.shape)
    for shard in target.local_shards():
        (row, column), (rows, width) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
        whole = theirs is None
        part = source[row : row + rows, column : column + width] if whole else theirs[row, column]
        _copy(name, shard.tensor, part)


def _copy(name: str, target: torch.Tensor, source: torch.Tensor) -> None:
    if target.shape != source.shape:
        raise _misshapen(name, target.shape, source.shape)
    target.copy_(source)


def _misshapen(name: str, wanted: torch.Size, found: torch.Size) -> UserError:
    return UserError(
        f"weight {name} is {tuple(found)} in the state and {tuple(wanted)} in the model"
    )
