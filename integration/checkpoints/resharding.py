"""Moves tables between ranks while a model trains.

TorchRec shards a collection anew, as it did at first, and all state goes over to it. TorchRec
1.8.0's own `DistributedModelParallel.reshard` is for less: with gloo it fails where columns of a
table stay on their rank, it moves no blocks of rows, and row-wise Adagrad only in whole slices.
Afterwards `in_backward_optimizer_filter` no longer finds the tables.
"""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple, cast

import torch
from torch import distributed
from torch.distributed import P2POp, ProcessGroup, batch_isend_irecv, irecv, isend
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from autoshard.integration.checkpoints.table_parts import (
    Overlap,
    Part,
    StoredTables,
    TensorName,
    overlap,
)
from autoshard.integration.models.bags import BagTable, name_of
from autoshard.integration.plans.conversion import plan_of_tables
from autoshard.integration.plans.hot_cold import prepare_as
from autoshard.integration.plans.table_shardings import COPIED, FUSED
from autoshard.workload.errors import UserError
from autoshard.workload.plans.plan import ShardingPlan

_INSTEAD = "use save_checkpoint, and load_checkpoint in a new model"
_Parts = list[tuple[TensorName, Part]]


def reshard(model: DistributedModelParallel, plan: ShardingPlan) -> None:
    """Moves the tables of a model that trains to where another plan has them; all ranks call it.

    Weights and the state of the fused optimizer go along; row-wise Adagrad's as in
    `load_checkpoint`. Call it between steps. Each collection that changes is there twice meanwhile.
    `model.fused_optimizer` stays the same object, so a `CombinedOptimizer` that has it stays
    valid; make pipelines, and wrappers of the optimizer, anew.

    Args:
        model: Model that is sharded by `to_torchrec`, or by a planner with the fused kernel.
        plan: Plan for the same number of ranks.

    Raises:
        UserError: Something cannot be moved, or ranks have different plans; nothing has changed. Or
            a rank is gone; then a new training must load the last checkpoint.
    """
    group: ProcessGroup = model._env.process_group
    plans = [plan] * distributed.get_world_size(group)
    with _naming_lost_ranks():
        distributed.all_gather_object(plans, plan, group)
    if any(other != plan for other in plans):
        raise UserError("ranks were given different plans: load one file on all of them")
    sharded = {
        path: module
        for path, module in model.module.named_modules()
        if isinstance(module, ShardedEmbeddingBagCollection)
    }
    unsharded = {path: _unsharded(module) for path, module in sharded.items()}
    tables = {
        name_of(path, config.name): BagTable(path, config, module)
        for path, module in unsharded.items()
        for config in module.embedding_bag_configs()
    }
    new = plan_of_tables(plan, tables, len(plans), model.device.type).plan
    changed = [
        path
        for path, module in sharded.items()
        if _shards(module.module_sharding_plan) != _shards(new[path])
    ]
    for path in changed:
        _check(path, sharded[path].module_sharding_plan)
        _check(path, new[path])
    for path in changed:
        sharder = model._sharder_map[EmbeddingBagCollection]
        module = sharder.shard(unsharded[path], new[path], model._env, model.device, path)
        _move(sharded.pop(path), module, group)
        if path:
            model.module.set_submodule(path, module)
        else:
            model._dmp_wrapped_module = module
        model._plan.plan[path] = new[path]
        gc.collect()  # what was there refers to itself in circles, and it is as large
    # In place, for those who hold it.
    model._optim._optims = model._init_optim(model.module)._optims


@contextmanager
def _naming_lost_ranks() -> Iterator[None]:
    """Raises UserError where a collective fails, as it does if a rank is gone."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"moving tables failed, most likely because a rank is gone ({reason}): start all ranks "
            "again from the last checkpoint"
        ) from error


def _unsharded(module: ShardedEmbeddingBagCollection) -> EmbeddingBagCollection:
    """Returns a collection without weights that has the tables and optimizers of a sharded one."""
    bags = EmbeddingBagCollection(
        tables=module._embedding_bag_configs,
        is_weighted=module._is_weighted,
        device=torch.device("meta"),
    )
    for infos in module.sharding_type_to_sharding_infos.values():
        for info in infos:
            prepare_as(bags.embedding_bags[info.embedding_config.name].weight, info.param)
    return bags


def _shards(plan: Mapping[str, ParameterSharding]) -> dict[str, Any]:
    """Returns the shards of each table: first element, size and rank."""
    return {
        table: {
            (tuple(shard.shard_offsets), tuple(shard.shard_sizes), rank)
            for shard, rank in zip(
                getattr(sharding.sharding_spec, "shards", ()), sharding.ranks or (), strict=False
            )
        }
        for table, sharding in plan.items()
    }


def _check(path: str, plan: EmbeddingModuleShardingPlan) -> None:
    """Raises UserError unless all tables of a collection can be moved."""
    for table, sharding in plan.items():
        name = name_of(path, table)
        if sharding.sharding_type == COPIED:
            raise UserError(
                f"table {name} has copies, which an optimizer of your own trains, so its "
                f"collection cannot be changed in place: {_INSTEAD}"
            )
        if sharding.compute_kernel != FUSED:
            raise UserError(
                f"table {name} runs in kernel {sharding.compute_kernel}, and tables can be moved "
                f"in {FUSED}: {_INSTEAD}"
            )


def _parts(module: ShardedEmbeddingBagCollection) -> _Parts:
    """Returns the parts of weights and optimizer state that this rank has."""
    state = {"model": module.state_dict(), "optimizer": module.fused_optimizer.state_dict()}
    found = StoredTables.of_state(*flatten_state_dict(state)).parts((), {})
    parts = [(name, part) for name, some in found.items() for part in some]
    return [(name, part) for name, part in parts if part.tensor is not None]


def _rates(module: ShardedEmbeddingBagCollection) -> dict[str, float]:
    """Returns the learning rate of each table that this rank has parts of."""
    return {
        table: optimizer.param_groups[0]["lr"]
        for _, optimizer in module.fused_optimizer.optimizers
        for table in optimizer.params
    }


class _RankParts(NamedTuple):
    """What a rank has before and after, without tensors, and its learning rates."""

    sources: _Parts
    targets: _Parts
    rates: dict[str, float]


class _Transfer(NamedTuple):
    """A piece of a table that goes from a part of one rank to a part of another, or of the same."""

    sender: int
    source: int
    receiver: int
    target: int
    common: Overlap


def _move(
    old: ShardedEmbeddingBagCollection, new: ShardedEmbeddingBagCollection, group: ProcessGroup
) -> None:
    """Copies all weights, optimizer state and learning rates."""
    rank, sources, targets = distributed.get_rank(group), _parts(old), _parts(new)
    own = _RankParts(_without_tensors(sources), _without_tensors(targets), _rates(old))
    told = [own] * distributed.get_world_size(group)
    with _naming_lost_ranks():
        distributed.all_gather_object(told, own, group)
    for name in sorted({name for of_rank in told for name, _ in of_rank.sources}):
        operations, writes = list[P2POp](), list[tuple[Overlap, torch.Tensor, torch.Tensor]]()
        for tag, (sender, source, receiver, target, common) in enumerate(_transfers(name, told)):
            if rank == sender:
                values = _read(_tensor(sources[source]), common)
            elif rank == receiver:
                values = _tensor(targets[target]).new_empty(common.lengths)
            else:
                continue
            if sender != receiver:
                does, peer = (isend, receiver) if rank == sender else (irecv, sender)
                operations.append(P2POp(does, values, group=group, tag=tag, group_peer=peer))
            if rank == receiver:
                writes.append((common, _tensor(targets[target]), values))
        with _naming_lost_ranks():
            for work in batch_isend_irecv(operations) if operations else ():
                work.wait()
        for tensor in [tensor for common, tensor, _ in writes if common.is_added]:
            tensor.zero_()
        for common, tensor, values in writes:
            common.write(tensor, values)
    _set_rates(new, {table: rate for of_rank in told for table, rate in of_rank.rates.items()})


def _set_rates(new: ShardedEmbeddingBagCollection, rates: Mapping[str, float]) -> None:
    """Sets the learning rates of tables."""
    for _, optimizer in new.fused_optimizer.optimizers:
        optimizer.param_groups[0]["lr"] = rates[next(iter(optimizer.params))]
        optimizer.zero_grad()  # tells the operator


def _transfers(name: TensorName, told: Sequence[_RankParts]) -> Iterator[_Transfer]:
    """Yields what is to be moved of a tensor, in the same order on all ranks."""
    for (sender, had), (receiver, gets) in product(enumerate(told), repeat=2):
        for (source, (of, stored)), (target, (to, wanted)) in product(
            enumerate(had.sources), enumerate(gets.targets)
        ):
            if of == to == name and (common := overlap(wanted, stored)) is not None:
                yield _Transfer(sender, source, receiver, target, common)


def _read(tensor: torch.Tensor, common: Overlap) -> torch.Tensor:
    for dim, (start, length) in enumerate(zip(common.offsets, common.lengths, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor.contiguous()


def _tensor(part: tuple[TensorName, Part]) -> torch.Tensor:
    return cast("torch.Tensor", part[1].tensor)


def _without_tensors(parts: _Parts) -> _Parts:
    return [(name, replace(part, tensor=None)) for name, part in parts]
