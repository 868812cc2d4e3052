"""Operator options, devices and lookups in TorchRec's and FBGEMM's types."""

from collections.abc import Mapping
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.planner.types import CustomTopologyData, ParameterConstraints, Topology
from torchrec.modules.embedding_configs import DataType

from autoshard.workload.data_sheets import DataSheet
from autoshard.workload.tables.operators import Optimizer, Weights
from autoshard.workload.tables.table import EmbeddingTable
from autoshard.workload.tasks.links import Network
from autoshard.workload.tasks.task import ShardingTask

DATA_TYPES: Mapping[Weights, DataType] = {"fp32": DataType.FP32, "fp16": DataType.FP16}
FUSED_OPTIMIZERS: Mapping[Optimizer, EmbOptimType] = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}

_BANDWIDTHS = ("intra_host_bw", "inter_host_bw")  # in bytes per millisecond
_MS, _GB = 1e3, 1e9


def topology_of(
    task: ShardingTask,
    device: str,
    sheet: DataSheet | None = None,
    bandwidths: Mapping[str, float] | None = None,
    for_rows: bool = False,
) -> Topology:
    """Returns the topology of a task's devices, with their usable memory as storage.

    Bandwidths are those of the objective's link, where it has one, and of the data sheet; TorchRec
    has no latency.

    Args:
        task: Task whose devices are the ranks.
        device: torch's type of the devices.
        sheet: Data sheet of the devices, if they are GPUs of a known kind.
        bandwidths: Further ones by TorchRec's names, in bytes per millisecond.
        for_rows: Whether rows may be in blocks on all devices. From the memory of each device the
            planner would make uneven blocks, which TorchRec looks up wrongly: all get the least.
    """
    kind, usable = "ddr_cap" if device == "cpu" else "hbm_cap", task.usable_bytes.tolist()
    memory: dict[str, Any] = {kind: min(usable)}
    if not for_rows:
        memory = {"custom_topology_data": CustomTopologyData({kind: usable}, len(usable))}
    ranks, link = len(task.devices), task.objective.link
    bandwidth, node = dict[str, float](), ranks
    if isinstance(link, Network):
        both = (link.inside.bytes_s / _MS, link.between.bytes_s / _MS)
        bandwidth = dict(zip(_BANDWIDTHS, both, strict=True))
        node = ranks // link.nodes(ranks)
    elif link is not None:
        bandwidth = dict.fromkeys(_BANDWIDTHS, link.bytes_s / _MS)
    bandwidth |= bandwidths or {}
    if sheet is not None:
        bandwidth["hbm_mem_bw"] = sheet.memory_gb_s * _GB / _MS
        if link in (None, sheet.link(ranks)):
            inside, outside = sheet.link_gb_s * _GB / _MS, sheet.network_gb_s * _GB / _MS
            bandwidth |= dict(zip(_BANDWIDTHS, (inside, outside), strict=True))
            if ranks % sheet.gpus_per_node == 0:
                node = sheet.gpus_per_node
            elif ranks > sheet.gpus_per_node:  # TorchRec knows no uneven nodes
                bandwidth |= dict.fromkeys(_BANDWIDTHS, outside)
    return Topology(
        world_size=ranks,
        local_world_size=node,
        compute_device=device,
        created_by_factory=True,  # else TorchRec warns
        **memory,
        **bandwidth,
    )


def device_type_here() -> str:
    """Returns torch's type of this machine's accelerator; "cpu" without one."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if found is None else found.type


def lookups_of(table: EmbeddingTable) -> ParameterConstraints:
    """Returns a table's lookups for TorchRec's planner, an even share for each feature."""
    return ParameterConstraints(
        pooling_factors=[table.pooling_factor / table.features] * table.features,
        is_weighted=table.weighted,
    )
