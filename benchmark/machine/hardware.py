"""Describes this machine: cores, caches, memory, and the hardware fingerprint."""

import math
import os
import re
import socket
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from autoshard.benchmark.machine.containers import cpu_quota, memory_left, memory_limit
from autoshard.benchmark.machine.system_files import (
    ROOT,
    parsed_list,
    read_bytes,
    read_list,
    read_number,
    read_text,
)

_CPUS = "sys/devices/system/cpu"
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_THREADS = ", threads: "  # in fingerprints of CPU devices that have several cores
_VECTORS = ("avx512f", "avx2", "sse4_2", "sve2", "sve", "asimd")  # the widest first
_DEFAULT_CACHE_BYTES = 32 * 2**20
# Share for shards. The rest is for Ray, torch and freed pages: Ray kills processes when 95 % of the
# memory is in use. With 0.85, two actors on 24 GiB reached that.
_USABLE_MEMORY = 0.75


@dataclass(frozen=True)
class NumaNode:
    """Logical CPUs and the memory next to them."""

    number: int
    cpus: frozenset[int]
    memory_bytes: int


@dataclass(frozen=True)
class NodeReport:
    """The hardware of a Ray node, as seen from a process on it.

    `memory_bytes` and those of `numa` are what shards may fill.
    """

    node_id: str
    host: str
    machine_id: str
    cores: tuple[int, ...]
    memory_bytes: int
    hardware: str
    numa: tuple[NumaNode, ...] = ()


@dataclass(frozen=True)
class CacheReport:
    """A data cache of a device, and how many of its cores share it (None: not reported)."""

    level: int
    size_bytes: int
    num_cores: int | None


@dataclass(frozen=True)
class SystemReport:
    """A device as the system reports it; virtual machines may report it wrongly. None: unknown.

    Args:
        caches: Data caches, the nearest first.
        vectors: Vector instructions, the widest first.
        kernels: Instructions for which torch picks its kernels.
        clock_mhz: Highest clock, or the present one where that is all that is reported.
        huge_pages: Use of huge pages: always, madvise or never.
    """

    caches: tuple[CacheReport, ...] | None = None
    vectors: tuple[str, ...] | None = None
    kernels: str | None = None
    clock_mhz: float | None = None
    huge_pages: str | None = None


@dataclass(frozen=True)
class DeviceInfo:
    """A device that measures."""

    name: str
    kind: str
    node: str
    hardware: str
    memory_bytes: int


def this_machine(node_id: str) -> NodeReport:
    """Returns the report of the machine that this process runs on."""
    return NodeReport(
        node_id=node_id,
        host=socket.gethostname(),
        machine_id=machine_id(),
        cores=physical_cores(),
        memory_bytes=int(machine_memory_bytes() * _USABLE_MEMORY),
        hardware=cpu_fingerprint(),
        numa=tuple(
            replace(node, memory_bytes=int(node.memory_bytes * _USABLE_MEMORY))
            for node in numa_nodes()
        ),
    )


def machine_id() -> str:
    """Returns an id that all processes on this running machine share, whatever their Ray node."""
    boot = read_text(ROOT / "proc/sys/kernel/random/boot_id") or "unknown"
    return f"{socket.gethostname()}:{boot}"


@cache
def physical_cores() -> tuple[int, ...]:
    """Returns one logical CPU of each physical core that may measure. See `pick_cores`."""
    return pick_cores(os.sched_getaffinity(0))


def pick_cores(allowed: Iterable[int], root: Path = ROOT) -> tuple[int, ...]:
    """Returns one logical CPU of each physical core among those allowed, limited by the CPU quota.

    Hyper-threads share caches and units, so two of them would disturb each other. With a quota, as
    many cores measure as it has whole CPUs, at least one: more would exhaust it, and then all are
    stopped while they measure. These cores are spread over NUMA nodes and caches.
    """
    chosen: dict[frozenset[int], int] = {}
    for cpu in sorted(allowed):
        threads = read_list(root / _CPUS / f"cpu{cpu}/topology/thread_siblings_list")
        chosen.setdefault(threads or frozenset({cpu}), cpu)
    cores = list(chosen.values())
    quota = cpu_quota(root)
    if quota is not None and quota < len(cores):
        homes = {cpu: node.number for node in numa_nodes(root) for cpu in node.cpus}
        caches = {core: _last_level_cache(core, root).cpus for core in cores}
        cores = _round_robin(_round_robin(cores, caches), homes)[: max(1, math.floor(quota))]
    return tuple(sorted(cores))


def machine_memory_bytes(root: Path = ROOT) -> int:
    """Returns the memory of the nodes that this process may use, or its container's limit."""
    allowed = sum(node.memory_bytes for node in numa_nodes(root)) or _physical_memory_bytes(root)
    limit = memory_limit(root)
    return allowed if limit is None else min(allowed, limit)


def free_memory_bytes(root: Path = ROOT) -> int:
    """Returns the memory that a process may take now without pushing out others."""
    free = read_bytes(root / "proc/meminfo", "MemAvailable")
    free = machine_memory_bytes(root) if free is None else free
    left = memory_left(root)
    return free if left is None else min(free, left)


def numa_nodes(root: Path = ROOT) -> tuple[NumaNode, ...]:
    """Returns the machine's nodes by number; none if the system does not report them.

    Nodes get the machine's memory in proportion to their own reports, because some systems omit
    memory that was added later. A node that this process may not use has 0 bytes.
    """
    cpus: dict[int, frozenset[int]] = {}
    own: dict[int, int] = {}
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        number = int(folder.name.removeprefix("node"))
        cpus[number] = read_list(folder / "cpulist")
        own[number] = read_bytes(folder / "meminfo", "MemTotal") or 0
    # A cpuset may name the nodes on which this process may have memory.
    status = re.search(r"Mems_allowed_list:\s*(\S+)", read_text(root / "proc/self/status"))
    allowed = parsed_list(status[1]) if status else frozenset(cpus)
    total, whole = _physical_memory_bytes(root), sum(own.values()) or 1
    return tuple(
        NumaNode(number, cpus[number], total * own[number] // whole if number in allowed else 0)
        for number in sorted(cpus)
    )


def last_level_cache_bytes(core: int = 0, root: Path = ROOT) -> int:
    """Returns the size of a core's largest cache; 32 MiB if unknown."""
    return _last_level_cache(core, root).size_bytes or _DEFAULT_CACHE_BYTES


@cache
def cpu_fingerprint(root: Path = ROOT) -> str:
    """Returns model, vector instructions and cache of the CPU: costs are comparable where it is
    equal.

    ARM CPUs report maker and part by numbers; where nothing is reported the architecture stands.
    """
    fields = _cpu_fields(root)

    def first(*names: str, default: str) -> str:
        return next((fields[name] for name in names if fields.get(name)), default)

    model = first("model name", "cpu", "uarch", default=f"{os.uname().machine} CPU")
    family = first("cpu family", "CPU implementer", default="?")
    part = first("model", "CPU part", default="?")
    vectors = next(iter(_vectors(fields)), "scalar")
    cache_mib = last_level_cache_bytes(0, root) // 2**20
    return f"cpu: {model} {family}.{part}, {vectors}, {cache_mib} MiB cache"


def with_threads(fingerprint: str, threads: int) -> str:
    """Returns the fingerprint of devices that have so many cores of a CPU, one thread on each."""
    return f"{fingerprint}{_THREADS}{threads}" if threads > 1 else fingerprint


def threads_of(hardware: str) -> int:
    """Returns the number of cores of a CPU device by its fingerprint."""
    _, found, threads = hardware.partition(_THREADS)
    return int(threads) if found else 1


def cpu_report(core: int, root: Path = ROOT) -> SystemReport:
    """Returns what the system says of a core, apart from torch's `kernels`."""
    fields = _cpu_fields(root)
    caches = [
        CacheReport(each.level, each.size_bytes, len(each.cpus) or None)
        for each in _data_caches(core, root)
    ]
    max_khz = read_number(root / _CPUS / f"cpu{core}/cpufreq/cpuinfo_max_freq")
    now_mhz = re.match(r"[\d.]+", fields.get("cpu MHz", ""))
    pages = re.search(r"\[(\w+)\]", read_text(root / "sys/kernel/mm/transparent_hugepage/enabled"))
    return SystemReport(
        caches=tuple(caches) or None,
        vectors=_vectors(fields) or None,
        clock_mhz=max_khz / 1e3 if max_khz else float(now_mhz[0]) if now_mhz else None,
        huge_pages=pages[1] if pages else None,
    )


def _cpu_fields(root: Path) -> dict[str, str]:
    """Returns the fields of the first CPU that the system lists."""
    fields: dict[str, str] = {}
    for line in read_text(root / "proc/cpuinfo").splitlines():
        key, separator, value = line.partition(":")
        if separator:
            fields.setdefault(key.strip(), value.strip())
    return fields


def _vectors(fields: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the vector instructions among a CPU's flags, the widest first."""
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    return tuple(name for name in _VECTORS if name in flags)


@dataclass(frozen=True)
class _Cache:
    level: int  # 0 if unknown
    size_bytes: int  # 0 if unknown
    cpus: frozenset[int]  # CPUs that share it; none if unknown


def _data_caches(core: int, root: Path) -> list[_Cache]:
    """Returns the data caches of a core in the system's order, which is by level."""
    found = []
    for entry in sorted((root / _CPUS / f"cpu{core}/cache").glob("index*")):
        size = re.match(r"(\d+)([KMG]?)", read_text(entry / "size"))
        if size is None or read_text(entry / "type") == "Instruction":
            continue
        size_bytes, cpus = int(size[1]) * _UNITS[size[2]], read_list(entry / "shared_cpu_list")
        found.append(_Cache(read_number(entry / "level") or 0, size_bytes, cpus))
    return found


def _last_level_cache(core: int, root: Path) -> _Cache:
    """Returns the largest data cache of a core."""
    unknown = _Cache(0, 0, frozenset({core}))
    found = max(_data_caches(core, root), key=lambda cache: cache.size_bytes, default=unknown)
    return found if found.cpus else replace(found, cpus=unknown.cpus)


def _round_robin(cores: Sequence[int], group: Mapping[int, Hashable]) -> list[int]:
    """Returns the first core of each group, then the second of each, and so on."""
    counts: Counter[Hashable] = Counter()
    rank: dict[int, int] = {}
    for core in cores:
        rank[core] = counts[group.get(core)]
        counts[group.get(core)] += 1
    return sorted(cores, key=lambda core: rank[core])


def _physical_memory_bytes(root: Path) -> int:
    total = read_bytes(root / "proc/meminfo", "MemTotal")
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if total is None else total
