"""Data sheets of GPUs, for plans on GPUs that nobody has measured."""

import math
from dataclasses import dataclass
from pathlib import Path

from autoshard.workload import documents
from autoshard.workload.errors import UserError
from autoshard.workload.tasks.links import AnyLink, Link, Network

_SCHEMA = documents.Schema("autoshard.data_sheet", 1)
_GIGA = 1e9
FOR_TABLES = 0.85  # of a GPU's memory: TorchRec's planner leaves as much for the rest by default
# What NCCL makes of links, by published all-reduces of 8 A100, H100 and H200 and of two nodes
# and all-to-alls of H100, GB200, GB300 and MI355X (tests/published_points.py).
_ALL_TO_ALL_SHARE, _RING_SHARE = 0.75, 0.85  # inside a node
_BETWEEN_SHARE = 0.9  # of network cards
_INSIDE_S, _EACH_INSIDE_S = 20e-6, 1e-6  # start of an all-to-all, and for each other device
_RING_INSIDE_S = 35e-6
_BETWEEN_S, _EACH_BETWEEN_S = 40e-6, 0.5e-6  # the same, for each device on another node
_RING_BETWEEN_S, _DOUBLED_S = 60e-6, 15e-6  # of two nodes, and for twice as many
_HOST_SHARE = 0.75  # of its bandwidth to the host's memory that rows reach: a guess
_BY_SHEET = ", by its data sheet"
_FIGURES = {  # which files have to give
    "memory_gb": "the GB of its memory",
    "memory_gb_s": "the GB/s of its memory",
    "link_gb_s": "the GB/s of a GPU to those of its node, in one direction",
    "network_gb_s": "the GB/s of a GPU to those of other nodes, in one direction",
    "gpus_per_node": "the number of GPUs in a node",
}
_OPTIONAL = ("host_gb_s", "tflops")


@dataclass(frozen=True)
class DataSheet:
    """Figures of a GPU by its data sheet; GB are 10^9 bytes.

    Args:
        name: The GPU's name, as torch and nvidia-smi print it.
        memory_gb: Memory.
        memory_gb_s: Bandwidth of its memory.
        link_gb_s: Bandwidth to the other GPUs of its node, of a GPU in one direction.
        network_gb_s: Bandwidth to GPUs of other nodes, of a GPU in one direction.
        gpus_per_node: GPUs that the faster link connects.
        host_gb_s: Bandwidth to the memory of the host, of a GPU in one direction.
        tflops: Dense bfloat16 products of its tensor cores; None if unknown.
        guesses_host: Whether its file does not have `host_gb_s`.
    """

    name: str
    memory_gb: float
    memory_gb_s: float
    link_gb_s: float
    network_gb_s: float
    gpus_per_node: int = 8
    host_gb_s: float = 32.0
    tflops: float | None = None
    guesses_host: bool = False

    def __post_init__(self) -> None:
        for field in (*_FIGURES, *_OPTIONAL):
            value = getattr(self, field)
            if value is None:
                continue
            if not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise UserError(f"{field} must be a number more than 0, got {value!r}")
        if not isinstance(self.gpus_per_node, int):
            raise UserError(f"gpus_per_node must be a whole number, got {self.gpus_per_node}")

    @property
    def hardware(self) -> str:
        """Fingerprint of the GPU as far as its data sheet goes."""
        return f"cuda: {self.name}{_BY_SHEET}"

    def is_of(self, hardware: str) -> bool:
        """Returns whether hardware with this fingerprint is such a GPU."""
        return _is_gpu(self.name, hardware)

    @property
    def for_tables_gb(self) -> float:
        """Returns the memory that is for tables by default, in GB as torch counts them (2^30)."""
        return FOR_TABLES * self.memory_gb

    @property
    def host_ms_of_byte(self) -> float:
        """Returns the milliseconds that a byte of a row takes to or from the host's memory."""
        return 1e3 / (_GIGA * self.host_gb_s * _HOST_SHARE)

    def uneven(self, ranks: int) -> bool:
        """Returns whether so many GPUs are more than a node, and do not fill whole ones."""
        return ranks > self.gpus_per_node and ranks % self.gpus_per_node > 0

    def link(self, ranks: int) -> AnyLink:
        """Returns the network between so many GPUs, in full nodes if these are more than one."""
        near = min(ranks, self.gpus_per_node)
        starts_s = _INSIDE_S + (near - 1) * _EACH_INSIDE_S, _RING_INSIDE_S
        inside = _nccl(self.link_gb_s, (_ALL_TO_ALL_SHARE, _RING_SHARE), starts_s)
        nodes = max(2, -(-ranks // self.gpus_per_node))
        starts_s = (
            _BETWEEN_S + (ranks - near) * _EACH_BETWEEN_S,
            _RING_BETWEEN_S + math.log2(nodes / 2) * _DOUBLED_S,
        )
        between = _nccl(self.network_gb_s, (_BETWEEN_SHARE, _BETWEEN_SHARE), starts_s)
        if ranks <= self.gpus_per_node:
            return inside
        if self.uneven(ranks):
            return between  # of nodes that are not full, the slowest part
        return Network(inside, between, self.gpus_per_node)


def _nccl(gb_s: float, shares: tuple[float, float], starts_s: tuple[float, float]) -> Link:
    """Returns a link as NCCL uses it, for all-to-alls and for rings."""
    all_to_alls, rings = (_GIGA * gb_s * share for share in shares)
    latency_s, ring_latency_s = (round(start_s, 6) for start_s in starts_s)
    return Link(all_to_alls, latency_s, rings, ring_latency_s)


# Figures of data sheets for each GPU: NVLink (PCIe for L4 and L40S, Infinity Fabric for AMD's) is
# half of the stated sum of both directions, as is the link to the host, which two GPUs share in
# GB200 and GB300. Networks are those of NVIDIA's DGX nodes (200, 400 or 800 Gbit/s a GPU); for L4
# and L40S, 100 Gbit/s. TFLOPS are of bfloat16 without sparsity. 72 GPUs of GB200 and GB300 share
# one NVLink.
DATA_SHEETS = {
    "a100-40gb": DataSheet("NVIDIA A100-SXM4-40GB", 40, 1555, 300, 25, tflops=312),
    "a100-80gb": DataSheet("NVIDIA A100-SXM4-80GB", 80, 2039, 300, 25, tflops=312),
    "h100-80gb": DataSheet("NVIDIA H100 80GB HBM3", 80, 3350, 450, 50, 8, 64, 989),
    "h200-141gb": DataSheet("NVIDIA H200", 141, 4800, 450, 50, 8, 64, 989),
    "b200-180gb": DataSheet("NVIDIA B200", 180, 8000, 900, 50, 8, 64, 2250),
    "b300-270gb": DataSheet("NVIDIA B300 SXM6 AC", 270, 7700, 900, 100, 8, 64, 2250),
    "gb200-192gb": DataSheet("NVIDIA GB200", 186, 8000, 900, 50, 72, 225, 2500),
    "gb300-288gb": DataSheet("NVIDIA GB300", 279, 8000, 900, 100, 72, 225, 2500),
    "mi300x-192gb": DataSheet("AMD Instinct MI300X", 192, 5300, 448, 50, 8, 64, 1307),
    "mi355x-288gb": DataSheet("AMD Instinct MI355X", 288, 8000, 536, 50, 8, 64, 2500),
    "l4-24gb": DataSheet("NVIDIA L4", 24, 300, 32, 12.5, tflops=121),
    "l40s-48gb": DataSheet("NVIDIA L40S", 48, 864, 32, 12.5, tflops=362),
}


def is_hardware(named: str, found: str) -> bool:
    """Returns whether hardware of this fingerprint is what is named: by it, or by a data sheet."""
    _, _, name = named.removesuffix(_BY_SHEET).partition(": ")
    return named == found or (named.endswith(_BY_SHEET) and _is_gpu(name, found))


def _is_gpu(name: str, hardware: str) -> bool:
    kind, _, rest = hardware.partition(": ")
    return kind == "cuda" and rest.startswith((f"{name} sm", f"{name},"))


def data_sheet_of(hardware: str) -> DataSheet | None:
    """Returns the known data sheet of hardware with this fingerprint."""
    return next((sheet for sheet in DATA_SHEETS.values() if sheet.is_of(hardware)), None)


def read_data_sheet(name: str, path: Path) -> DataSheet:
    """Reads the figures of a GPU from a JSON file; UserError names the file and the fault."""
    with documents.naming(path):
        document = documents.read(path)
        _SCHEMA.check(document)
        with documents.fields_of("the data sheet"):
            for field, meaning in _FIGURES.items():
                if field not in document:
                    usual = getattr(DATA_SHEETS["h100-80gb"], field)
                    raise UserError(
                        f"the data sheet has no field {field!r}: add {meaning} ({usual} of an H100)"
                    )
            given = {field: document[field] for field in _OPTIONAL if field in document}
            given["guesses_host"] = "host_gb_s" not in document
            return DataSheet(name, *(document[field] for field in _FIGURES), **given)
