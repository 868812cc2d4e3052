"""What this machine is: cores, caches, memory, and the fingerprint that keeps costs apart."""

import os
import socket
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

Kind = Literal["cpu", "cuda"]

_CPU_ROOT = Path("/sys/devices/system/cpu")
_DEFAULT_CACHE_BYTES = 32 * 2**20
_USABLE_MEMORY = 0.85  # of a machine's memory that its benchmark actors may fill together


@dataclass(frozen=True)
class NodeReport:
    """What a Ray node has, as seen from a process on it."""

    node_id: str
    host: str
    machine_id: str
    cores: tuple[int, ...]
    memory_bytes: int
    hardware: str


@dataclass(frozen=True)
class DeviceInfo:
    """A device that measures."""

    name: str
    kind: Kind
    node: str
    hardware: str
    memory_bytes: int


def this_machine(node_id: str) -> NodeReport:
    """Report on the machine that this process runs on."""
    return NodeReport(
        node_id=node_id,
        host=socket.gethostname(),
        machine_id=machine_id(),
        cores=physical_cores(),
        memory_bytes=int(machine_memory_bytes() * _USABLE_MEMORY),
        hardware=cpu_fingerprint(),
    )


def machine_id() -> str:
    """Equal for processes on the same running machine, whichever Ray node they belong to."""
    boot = _text(Path("/proc/sys/kernel/random/boot_id"), "unknown")
    return f"{socket.gethostname()}:{boot}"


@lru_cache(maxsize=1)
def physical_cores() -> tuple[int, ...]:
    """One logical CPU of each physical core that this process may use.

    Hyper-threads share a core's caches and units: two of them measuring would disturb each other.
    """
    chosen: dict[str, int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        siblings = _text(_CPU_ROOT / f"cpu{cpu}/topology/thread_siblings_list", str(cpu))
        package = _text(_CPU_ROOT / f"cpu{cpu}/topology/physical_package_id", "0")
        chosen.setdefault(f"{package}:{siblings}", cpu)
    return tuple(sorted(chosen.values()))


def machine_memory_bytes() -> int:
    """Physical memory, or the container's limit if that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _text(Path("/sys/fs/cgroup/memory.max"), "max")
    return min(total, int(limit)) if limit.isdigit() else total


def last_level_cache_bytes(core: int = 0) -> int:
    """Size of the largest cache of a core; 32 MiB if the system does not say."""
    sizes = [
        _cache_bytes(entry / "size") for entry in (_CPU_ROOT / f"cpu{core}/cache").glob("index*")
    ]
    return max(sizes, default=0) or _DEFAULT_CACHE_BYTES


@lru_cache(maxsize=1)
def cpu_fingerprint() -> str:
    """Model, vector instructions and cache of the CPU: costs are comparable where it is equal."""
    fields: dict[str, str] = {}
    for line in _text(Path("/proc/cpuinfo"), "").splitlines():
        key, separator, value = line.partition(":")
        if separator:
            fields.setdefault(key.strip(), value.strip())
    model = fields.get("model name", "unknown CPU")
    generation = f"{fields.get('cpu family', '?')}.{fields.get('model', '?')}"
    flags = fields.get("flags", "").split()
    vectors = next((name for name in ("avx512f", "avx2", "sse4_2") if name in flags), "scalar")
    cache = last_level_cache_bytes() // 2**20
    return f"cpu: {model} {generation}, {vectors}, {cache} MiB cache"


def cuda_fingerprint(index: int = 0) -> str:
    """Model, compute capability and memory of a GPU."""
    import torch

    found = torch.cuda.get_device_properties(index)
    memory = round(found.total_memory / 2**30)
    return f"cuda: {found.name} sm{found.major}{found.minor}, {memory} GiB"


def _cache_bytes(path: Path) -> int:
    text = _text(path, "0")
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    return int(text[:-1]) * units[text[-1]] if text[-1:] in units else int(text or 0)


def _text(path: Path, default: str) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return default
