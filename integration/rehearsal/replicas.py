"""Replica groups of a rehearsal: process groups as DMPCollection has them, on any device."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torchrec.distributed.types import ShardingEnv2D

from autoshard.benchmark.operator import fbgemm
from autoshard.workload.plans.replicas import ReplicaGroups


class Replicas:
    """The groups of this rank: those with a copy of all tables, and those that hold its shards.

    `DMPCollection` is for GPUs only. This gives `DistributedModelParallel` the same environment,
    and averages the same weights and optimizer states.

    Args:
        groups: The layout; all ranks make it at the same time.
        device: Device of this rank.
    """

    def __init__(self, groups: ReplicaGroups, device: torch.device) -> None:
        self._groups, self._device, self._steps = groups, device, 0
        mesh = DeviceMesh(
            device.type,
            [list(groups.ranks(number)) for number in range(groups.count)],
            mesh_dim_names=("replicate", "shard"),
        )
        self._holders = mesh.get_group("replicate")
        self.env = ShardingEnv2D(
            sharding_pg=mesh.get_group("shard"),
            replica_pg=self._holders,
            global_pg=dist.group.WORLD,
            device_mesh=mesh,
            node_group_size=groups.node_size,
            use_inter_host_allreduce=groups.consecutive,
        )
        rank = dist.get_rank()
        self.members = next(
            list(ranks) for ranks in map(groups.ranks, range(groups.count)) if rank in ranks
        )

    def step(self, model: nn.Module) -> None:
        """Counts a step, and averages the copies if it is time."""
        self._steps += 1
        if self._steps % self._groups.sync_interval:
            return
        fused = fbgemm.training_ops().SplitTableBatchedEmbeddingBagsCodegen
        operators = [
            part
            for module in model.modules()
            for lookup in getattr(module, "_lookups", ())  # which are no submodules
            for part in lookup.modules()
            if isinstance(part, fused)
        ]
        self._average([w for each in operators for w in each.split_embedding_weights()])
        self._average([s["sum"] for each in operators for s in each.get_optimizer_state()])

    def _average(self, tensors: list[torch.Tensor]) -> None:
        """Averages tensors in one all-reduce, as ranks with other numbers of tensors do."""
        if not tensors:  # on no rank that holds this shard
            tensors = [torch.zeros(1, device=self._device)]
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(flat, group=self._holders)
        flat /= self._groups.count
        means = torch.split(flat, [tensor.numel() for tensor in tensors])
        for tensor, mean in zip(tensors, means, strict=True):
            tensor.copy_(mean.view_as(tensor))
