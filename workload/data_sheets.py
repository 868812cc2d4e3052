"""Data sheets of GPUs, for plans on GPUs that nobody has measured."""

from dataclasses import dataclass
from pathlib import Path

from autoshard.workload import documents
from autoshard.workload.errors import UserError
from autoshard.workload.tasks.links import AnyLink, Link, Network

_SCHEMA = documents.Schema("autoshard.data_sheet", 1)
_GIGA = 1e9
_LATENCY_S = 20e-6  # start of an all-to-all
_HOST_SHARE = 0.75  # of its bandwidth to the host's memory that rows reach: a guess
_BY_SHEET = ", by its data sheet"
_FIGURES = ("memory_gb", "memory_gb_s", "link_gb_s", "network_gb_s", "gpus_per_node")
_OPTIONAL = ("host_gb_s",)


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
    """

    name: str
    memory_gb: float
    memory_gb_s: float
    link_gb_s: float
    network_gb_s: float
    gpus_per_node: int = 8
    host_gb_s: float = 32.0

    def __post_init__(self) -> None:
        for field in (*_FIGURES, *_OPTIONAL):
            value = getattr(self, field)
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
    def host_ms_of_byte(self) -> float:
        """Returns the milliseconds that a byte of a row takes to or from the host's memory."""
        return 1e3 / (_GIGA * self.host_gb_s * _HOST_SHARE)

    def link(self, ranks: int) -> AnyLink:
        """Returns the network between so many GPUs, in full nodes if these are more than one."""
        inside = Link(_GIGA * self.link_gb_s, _LATENCY_S)
        between = Link(_GIGA * self.network_gb_s, _LATENCY_S)
        if ranks <= self.gpus_per_node:
            return inside
        if ranks % self.gpus_per_node:
            return between  # of nodes that are not full, the slowest part
        return Network(inside, between, self.gpus_per_node)


# Figures of NVIDIA's data sheets for each GPU: NVLink (PCIe for L4 and L40S) is half of the stated
# sum of both directions, as is PCIe to the host. Networks are those of NVIDIA's DGX nodes (200 or
# 400 Gbit/s a GPU); for L4 and L40S, 100 Gbit/s.
DATA_SHEETS = {
    "a100-40gb": DataSheet("NVIDIA A100-SXM4-40GB", 40, 1555, 300, 25),
    "a100-80gb": DataSheet("NVIDIA A100-SXM4-80GB", 80, 2039, 300, 25),
    "h100-80gb": DataSheet("NVIDIA H100 80GB HBM3", 80, 3350, 450, 50, host_gb_s=64),
    "h200-141gb": DataSheet("NVIDIA H200", 141, 4800, 450, 50, host_gb_s=64),
    "b200-180gb": DataSheet("NVIDIA B200", 180, 8000, 900, 50, host_gb_s=64),
    "l4-24gb": DataSheet("NVIDIA L4", 24, 300, 32, 12.5),
    "l40s-48gb": DataSheet("NVIDIA L40S", 48, 864, 32, 12.5),
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
            given = {field: document[field] for field in _OPTIONAL if field in document}
            return DataSheet(name, *(document[field] for field in _FIGURES), **given)
