"""The devices, the network and the hardware of a topology of TorchRec."""

from collections.abc import Sequence

import torch
from torchrec.distributed.planner.constants import (
    CROSS_NODE_BANDWIDTH,
    HBM_MEM_BW,
    INTRA_NODE_BANDWIDTH,
)
from torchrec.distributed.planner.types import Topology

from autoshard.workload.data_sheets import DATA_SHEETS, DataSheet
from autoshard.workload.errors import UserError
from autoshard.workload.tasks.links import AnyLink, Link, Network
from autoshard.workload.tasks.task import Device

_BYTES_S = 1e3  # TorchRec has bytes per millisecond
_DEFAULTS = (INTRA_NODE_BANDWIDTH, CROSS_NODE_BANDWIDTH)
_LATENCY_S = 20e-6  # of a collective, of which TorchRec knows nothing
_USUAL_GPU = "a100-80gb"


def storage_of(topology: Topology) -> str:
    """Returns the field of storage that tables are in: hbm, or ddr on CPUs."""
    return "ddr" if topology.compute_device == "cpu" else "hbm"


def devices_of(topology: Topology, lacking: Sequence[int] = ()) -> tuple[Device, ...]:
    """Returns a device for each rank, with its storage as memory.

    Args:
        topology: The topology, less what is reserved.
        lacking: Bytes of each rank that may not be used; by default none.

    Raises:
        UserError: No rank has storage.
    """
    field = storage_of(topology)
    free = [int(getattr(device.storage, field)) for device in topology.devices]
    if max(free) <= 0:
        raise UserError(
            f"no rank of the topology has {field} left for tables: give it more ({field}_cap), or "
            "reserve less (storage_reservation)"
        )
    usable = (had - (lacking[rank] if lacking else 0) for rank, had in enumerate(free))
    return tuple(Device(f"rank{rank}", max(1, size)) for rank, size in enumerate(usable))


def network_of(topology: Topology, known: AnyLink | None) -> AnyLink | None:
    """Returns the network of a topology: by its bandwidths, unless these are TorchRec's defaults.

    Args:
        topology: The topology.
        known: Network of so many ranks by the cost model; None if unknown.
    """
    ranks, node = topology.world_size, topology.intra_group_size
    if ranks == 1:
        return None
    given = (topology.intra_host_bw, topology.inter_host_bw)
    if given == _DEFAULTS:
        if known is None or node >= ranks or known.nodes(ranks) > 1:
            return known
        # Of the nodes' network nothing is known but TorchRec's default.
        inside, between = known.all_to_all(ranks), Link(given[1] * _BYTES_S, _LATENCY_S)
    else:
        inside, between = (Link(each * _BYTES_S, _LATENCY_S) for each in given)
    if node >= ranks:
        return inside
    # Of nodes that are not full, all-to-alls are as slow as between nodes.
    return between if ranks % node else Network(inside, between, node)


def gpu_of(topology: Topology) -> tuple[DataSheet, str | None]:
    """Returns the data sheet of the ranks' GPUs, and a note if it is a guess.

    It is that of the GPU of this machine; without one, that with the most similar bandwidth, if the
    topology says more than TorchRec's default.
    """
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        for sheet in DATA_SHEETS.values():
            if sheet.name == name:
                return sheet, None
        why = f"no data sheet of {name} is known"
    else:
        why = "no GPU is here"
    key = _USUAL_GPU
    if topology.hbm_mem_bw != HBM_MEM_BW:
        gb_s = topology.hbm_mem_bw * _BYTES_S / 1e9
        key = min(DATA_SHEETS, key=lambda each: abs(DATA_SHEETS[each].memory_gb_s / gb_s - 1))
    return DATA_SHEETS[key], (
        f"{why}: planned for {DATA_SHEETS[key].name}; name yours by hardware=, as in "
        f"hardware={key!r}"
    )
