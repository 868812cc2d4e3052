"""Machines made of the small text files with which Linux describes them."""

from collections.abc import Iterable, Mapping
from pathlib import Path

CPUS = "sys/devices/system/cpu"
NODES = "sys/devices/system/node"

# A container of version 1 as Docker starts it: its own group is mounted as if it were all there is.
DOCKER_V1 = {
    "proc/self/cgroup": "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n1:name=x:/docker/abc",
    "proc/self/mountinfo": (
        "30 25 0:26 /docker/abc /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct\n"
        "31 25 0:27 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
    ),
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
    "sys/fs/cgroup/cpu,cpuacct/cpu.stat": "nr_periods 0\nnr_throttled 0\nthrottled_time 0",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
}
# A batch job of version 2, two groups below the top, which has no files of limits.
JOB_V2 = {
    "proc/self/cgroup": "0::/jobs.slice/job-7.scope",
    "proc/self/mountinfo": "30 25 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n",
    "sys/fs/cgroup/cpu.stat": "usage_usec 123\nuser_usec 100",
    "sys/fs/cgroup/jobs.slice/cpu.max": "max 100000",
    "sys/fs/cgroup/jobs.slice/memory.max": "max",
    "sys/fs/cgroup/jobs.slice/job-7.scope/cpu.max": "max 100000",
    "sys/fs/cgroup/jobs.slice/job-7.scope/memory.max": "max",
    "sys/fs/cgroup/jobs.slice/job-7.scope/memory.high": "max",
}


def written(root: Path, *parts: Mapping[str, str]) -> Path:
    """The root of a tree of these files; what is named later replaces what is named earlier."""
    for part in parts:
        for name, text in part.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
    return root


def server(
    nodes: int, cores: int, threads: int = 2, node_gib: int = 64, caches: int = 1
) -> dict[str, str]:
    """Nodes of `cores` physical cores each, hyper-threads numbered last, `caches` L3s a node."""
    total = nodes * cores
    files = {"proc/meminfo": f"MemTotal:       {nodes * node_gib * 2**20} kB\nMemFree: 1 kB"}
    for node in range(nodes):
        own = range(node * cores, (node + 1) * cores)
        listed = [f"{own[0] + n * total}-{own[-1] + n * total}" for n in range(threads)]
        files[f"{NODES}/node{node}/cpulist"] = ",".join(listed)
        files[f"{NODES}/node{node}/meminfo"] = f"Node {node} MemTotal:  {node_gib * 2**20} kB"
        for core in own:
            siblings = [core + n * total for n in range(threads)]
            first = core - (core - own[0]) % (cores // caches)
            alike = range(first, first + cores // caches)
            sharing = [cpu + n * total for n in range(threads) for cpu in alike]
            for cpu in siblings:
                folder = f"{CPUS}/cpu{cpu}"
                files[f"{folder}/topology/thread_siblings_list"] = _listed(siblings)
                files |= _cache(f"{folder}/cache/index0", "64M", "Instruction", siblings)
                files |= _cache(f"{folder}/cache/index1", "2048K", "Unified", siblings)
                files |= _cache(f"{folder}/cache/index2", "32768K", "Unified", sharing)
    return files


def _cache(folder: str, size: str, kind: str, cpus: Iterable[int]) -> dict[str, str]:
    told = {"size": size, "type": kind, "shared_cpu_list": _listed(cpus)}
    return {f"{folder}/{name}": text for name, text in told.items()}


def _listed(cpus: Iterable[int]) -> str:
    return ",".join(map(str, cpus))
