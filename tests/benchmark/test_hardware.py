import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from machines import CPUS, DOCKER_V1, JOB_V2, NODES, server, written

from autoshard.benchmark.backends.cpu import CpuBackend, share_memory
from autoshard.benchmark.machine.hardware import (
    NodeReport,
    NumaNode,
    cpu_fingerprint,
    last_level_cache_bytes,
    machine_memory_bytes,
    numa_nodes,
    pick_cores,
    this_machine,
)

GIB = 2**30
QUOTA = "sys/fs/cgroup/jobs.slice/cpu.max"


def test_of_hyper_threads_one_measures(tmp_path: Path) -> None:
    root = written(tmp_path, server(nodes=2, cores=4))
    assert pick_cores(range(16), root) == tuple(range(8))
    assert pick_cores({1, 9, 10, 15}, root) == (1, 10, 15)  # a cpuset with and without siblings


def test_without_a_word_of_threads_each_cpu_is_a_core(tmp_path: Path) -> None:
    assert pick_cores({0, 2, 5}, tmp_path) == (0, 2, 5)


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        (0.3, (0,)),
        (1.9, (0,)),
        (2, (0, 8)),  # a node each
        (4.5, (0, 4, 8, 12)),  # a cache each
        (6, (0, 1, 4, 8, 9, 12)),
        (16, tuple(range(16))),
        (64, tuple(range(16))),
    ],
)
def test_a_quota_pays_for_whole_cores_far_apart(
    tmp_path: Path, quota: float, cores: tuple[int, ...]
) -> None:
    limit = {QUOTA: f"{quota * 100000:.0f} 100000"}
    root = written(tmp_path, server(nodes=2, cores=8, caches=2), JOB_V2, limit)
    assert pick_cores(range(32), root) == cores


def test_a_quota_on_a_machine_that_tells_nothing_else(tmp_path: Path) -> None:
    root = written(tmp_path, JOB_V2, {QUOTA: "200000 100000"})
    assert pick_cores(range(4), root) == (0, 1)


def test_memory_is_the_machines_or_the_containers(tmp_path: Path) -> None:
    root = written(tmp_path, server(nodes=2, cores=4, node_gib=8), DOCKER_V1)
    assert machine_memory_bytes(root) == 16 * GIB
    limit = "sys/fs/cgroup/memory/memory.limit_in_bytes"
    assert machine_memory_bytes(written(root, {limit: str(3 * GIB)})) == 3 * GIB
    assert machine_memory_bytes(written(root, {limit: str(300 * GIB)})) == 16 * GIB
    written(root, {"proc/self/status": "Name: x\nMems_allowed:\t2\nMems_allowed_list:\t1"})
    assert machine_memory_bytes(root) == 8 * GIB
    assert [node.memory_bytes for node in numa_nodes(root)] == [0, 8 * GIB]


def test_memory_of_a_machine_that_tells_nothing(tmp_path: Path) -> None:
    assert machine_memory_bytes(tmp_path) == os.sysconf("SC_PAGE_SIZE") * os.sysconf(
        "SC_PHYS_PAGES"
    )
    assert numa_nodes(tmp_path) == ()


def test_nodes_share_all_memory_though_they_know_of_a_part(tmp_path: Path) -> None:
    plugged_in = {"proc/meminfo": f"MemTotal: {40 * 2**20} kB"}
    root = written(tmp_path, server(nodes=2, cores=2, node_gib=8), plugged_in)
    cpus = [frozenset({0, 1, 4, 5}), frozenset({2, 3, 6, 7})]
    assert numa_nodes(root) == tuple(NumaNode(n, cpus[n], 20 * GIB) for n in range(2))


def test_nodes_without_files_are_known_by_name_alone(tmp_path: Path) -> None:
    (tmp_path / NODES / "node0").mkdir(parents=True)
    (tmp_path / NODES / "node_settings").mkdir()
    written(tmp_path, {"proc/meminfo": "MemTotal: 1024 kB"})
    assert numa_nodes(tmp_path) == (NumaNode(0, frozenset(), 0),)
    assert machine_memory_bytes(tmp_path) == 2**20


def report(memory: int, *nodes: tuple[Sequence[int], int]) -> NodeReport:
    numa = tuple(NumaNode(n, frozenset(cpus), share) for n, (cpus, share) in enumerate(nodes))
    return NodeReport("n", "host", "machine", (), memory, "hw", numa)


@pytest.mark.parametrize(
    ("machine", "cores", "shares"),
    [
        (report(100), [0, 1], [50, 50]),
        (report(200, ([0, 1], 100), ([2, 3], 100)), [0, 1, 2, 3], [50, 50, 50, 50]),
        (report(200, ([0, 1], 100), ([2, 3], 100)), [0, 1], [50, 50]),  # not the other node's
        (report(200, ([0, 1], 100), ([2, 3], 100)), [0, 2, 3], [100, 50, 50]),
        (report(120, ([0, 1], 100), ([2, 3], 100)), [0, 2, 3], [40, 40, 40]),  # a limit
        (report(140, ([0, 1], 100), ([2, 3], 60)), [0, 2, 3], [80, 30, 30]),
        (report(100, ([0, 1], 100), ([2, 3], 0)), [0, 2], [50, 50]),  # a node without memory
        (report(300, ([0], 100), ([], 200)), [0], [100]),  # memory without cores
    ],
)
def test_a_core_has_its_share_of_its_nodes_memory(
    machine: NodeReport, cores: list[int], shares: list[int]
) -> None:
    found = share_memory(cores, machine)
    assert [found[core] for core in cores] == shares
    assert sum(found.values()) <= machine.memory_bytes


def test_ray_nodes_on_parts_of_a_machine_do_not_deal_its_memory_twice() -> None:
    whole = report(200, ([0, 1], 100), ([2, 3], 100))
    halves = [
        replace(whole, node_id=name, cores=cores) for name, cores in (("a", (0, 1)), ("b", (2, 3)))
    ]
    places = CpuBackend().places({}, halves, [])
    assert [(place.node_id, place.number) for place in places] == [
        ("a", 0),
        ("a", 1),
        ("b", 2),
        ("b", 3),
    ]
    assert sum(place.memory_bytes for place in places) == 200


def test_this_machine_is_consistent() -> None:
    here = this_machine("n")
    found = share_memory(here.cores, here)
    assert sorted(found) == list(here.cores)
    assert 0 < min(found.values()) <= sum(found.values()) <= here.memory_bytes


def test_the_last_cache_is_the_largest_that_holds_data(tmp_path: Path) -> None:
    root = written(tmp_path, server(nodes=1, cores=8, caches=2))
    assert last_level_cache_bytes(3, root) == 32 * 2**20


@pytest.mark.parametrize(
    ("size", "size_bytes"),
    [("480M", 480 * 2**20), ("1G", 2**30), ("33554432", 2**25), ("", 2**25), ("big", 2**25)],
)
def test_a_cache_in_other_units_or_none(tmp_path: Path, size: str, size_bytes: int) -> None:
    root = written(tmp_path, {f"{CPUS}/cpu1/cache/index3/size": size})
    assert last_level_cache_bytes(1, root) == size_bytes
    assert last_level_cache_bytes(0, root) == 32 * 2**20


XEON = """processor	: 0
cpu family	: 6
model		: 167
model name	: Intel(R) Xeon(R) Processor
flags		: fpu sse4_2 avx2 avx512f amx_bf16

processor	: 1
model name	: another
"""
NEOVERSE = """processor	: 0
BogoMIPS	: 243.75
Features	: fp asimd evtstrm aes {more}
CPU implementer	: 0x41
CPU architecture: 8
CPU part	: {part}
"""


def test_an_ordinary_cpus_fingerprint_stays_what_stores_know(tmp_path: Path) -> None:
    root = written(tmp_path, {"proc/cpuinfo": XEON, f"{CPUS}/cpu0/cache/index3/size": "491520K"})
    known = "cpu: Intel(R) Xeon(R) Processor 6.167, avx512f, 480 MiB cache"
    assert cpu_fingerprint(root) == known


def test_cpus_without_a_name_are_distinguished(tmp_path: Path) -> None:
    n1 = {"proc/cpuinfo": NEOVERSE.format(more="asimddp", part="0xd0c")}
    v1 = {"proc/cpuinfo": NEOVERSE.format(more="sve", part="0xd40")}
    found = [
        cpu_fingerprint(written(tmp_path / str(number), files))
        for number, files in enumerate([n1, v1, {"proc/cpuinfo": "cpu : POWER9"}, {}])
    ]
    machine = os.uname().machine
    assert found == [
        f"cpu: {machine} CPU 0x41.0xd0c, asimd, 32 MiB cache",
        f"cpu: {machine} CPU 0x41.0xd40, sve, 32 MiB cache",
        "cpu: POWER9 ?.?, scalar, 32 MiB cache",
        f"cpu: {machine} CPU ?.?, scalar, 32 MiB cache",
    ]
