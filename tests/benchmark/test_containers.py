import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from machines import DOCKER_V1, JOB_V2, written

from autoshard.benchmark.machine.containers import cpu_quota, memory_limit, throttled_seconds
from autoshard.benchmark.machine.hardware import pick_cores

V1 = "sys/fs/cgroup/cpu,cpuacct"
JOBS = "sys/fs/cgroup/jobs.slice"
JOB = f"{JOBS}/job-7.scope"


@pytest.mark.parametrize("machine", [{}, DOCKER_V1, JOB_V2])
def test_without_limits_there_are_none(tmp_path: Path, machine: dict[str, str]) -> None:
    root = written(tmp_path, machine)
    assert cpu_quota(root) is None
    assert memory_limit(root) is None
    assert throttled_seconds(root) == 0


def test_limits_of_version_1(tmp_path: Path) -> None:
    limits = {
        f"{V1}/cpu.cfs_quota_us": "250000",
        f"{V1}/cpu.stat": "nr_periods 9\nnr_throttled 3\nthrottled_time 1500000000",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(3 * 2**30),
    }
    root = written(tmp_path, DOCKER_V1, limits)
    assert cpu_quota(root) == 2.5
    assert memory_limit(root) == 3 * 2**30
    assert throttled_seconds(root) == 1.5


def test_limits_of_version_2(tmp_path: Path) -> None:
    limits = {
        f"{JOB}/cpu.max": "50000 100000",
        f"{JOB}/cpu.stat": "usage_usec 7\nnr_throttled 3\nthrottled_usec 250000",
        f"{JOB}/memory.max": str(2**30),
    }
    root = written(tmp_path, JOB_V2, limits)
    assert cpu_quota(root) == 0.5
    assert memory_limit(root) == 2**30
    assert throttled_seconds(root) == 0.25


def test_the_lowest_limit_counts_whichever_group_has_it(tmp_path: Path) -> None:
    outer = {f"{JOBS}/cpu.max": "300000 100000", f"{JOBS}/memory.max": str(2**30)}
    inner = {f"{JOB}/cpu.max": "200000 50000", f"{JOB}/memory.max": str(2**31)}
    beside = {"sys/fs/cgroup/other.slice/cpu.max": "1 100000", f"{JOB}/deeper/memory.max": "1"}
    root = written(tmp_path, JOB_V2, outer, inner, beside)
    assert cpu_quota(root) == 3
    assert memory_limit(root) == 2**30
    written(root, {f"{JOB}/memory.high": str(2**29)})  # soft, but slow beyond
    assert memory_limit(root) == 2**29
    stopped = {f"{JOBS}/cpu.stat": "throttled_usec 2000000", f"{JOB}/cpu.stat": "throttled_usec 1"}
    assert throttled_seconds(written(root, stopped)) == pytest.approx(2.000001)


def test_both_versions_at_once_and_a_group_mounted_twice(tmp_path: Path) -> None:
    """As systemd's hybrid mode mounts them; a second mount must not count what it has twice."""
    again = "35 25 0:26 /docker/abc /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpuacct,cpu\n"
    unified = "36 25 0:30 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    both = {
        "proc/self/cgroup": DOCKER_V1["proc/self/cgroup"] + "\n0::/",
        "proc/self/mountinfo": DOCKER_V1["proc/self/mountinfo"] + again + unified,
        "sys/fs/cgroup/unified/cpu.stat": "usage_usec 5",
        f"{V1}/cpu.cfs_quota_us": "100000",
        f"{V1}/cpu.stat": "throttled_time 2000000000",
    }
    root = written(tmp_path, DOCKER_V1, both)
    assert cpu_quota(root) == 1
    assert throttled_seconds(root) == 2


@pytest.mark.parametrize(
    ("group", "top", "folder"),
    [
        ("/pods/p1/c1", "/pods", "p1/c1"),  # part of the tree is mounted
        ("/", "/", "."),  # the container sees its own group as the top
        ("/../other", "/", "."),  # started from outside that view
        ("/docker/abc", "/elsewhere", "."),  # a name that means nothing in this view
        (r"/a\x2db c", "/", r"a\x2db c"),  # systemd's names; mountinfo writes \ and space otherwise
    ],
)
def test_where_a_group_is_found(tmp_path: Path, group: str, top: str, folder: str) -> None:
    files = {
        "proc/self/cgroup": f"0::{group}",
        "proc/self/mountinfo": f"30 25 0:26 {top} /run/c\\040g rw - cgroup2 cgroup2 rw",
        f"run/c g/{folder}/cpu.max": "150000 100000",
        "run/cpu.max": "1 100000",  # not a group
    }
    assert cpu_quota(written(tmp_path, files)) == 1.5


@pytest.mark.parametrize("told", ["", "max", "0 0", "100000 0", "-1 100000", "much 100000"])
def test_odd_quotas_limit_nothing(tmp_path: Path, told: str) -> None:
    files = {f"{JOB}/cpu.max": told, f"{JOB}/memory.max": told, f"{JOB}/cpu.stat": told}
    root = written(tmp_path, JOB_V2, files)
    assert cpu_quota(root) is None
    assert memory_limit(root) is None
    assert throttled_seconds(root) == 0


@pytest.fixture
def tight_group() -> Iterator[Path]:
    """A real group that may use a fifth of a CPU; the process in it ends with the test."""
    for point, quota in (
        (Path("/sys/fs/cgroup/cpu"), {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "20000"}),
        (Path("/sys/fs/cgroup"), {"cpu.max": "20000 100000"}),
    ):
        group = point / f"autoshard-test-{time.time_ns()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if not all((group / name).exists() for name in quota):
                continue
            for name, value in quota.items():
                (group / name).write_text(value)
            yield group
            return
        finally:
            group.rmdir()
    pytest.skip("no control group with a CPU quota can be made here")


def test_a_real_quota_is_seen_and_its_stops_are_counted(tight_group: Path, tmp_path: Path) -> None:
    busy = subprocess.Popen(["/bin/sh", "-c", "while :; do :; done"])
    try:
        (tmp_path / "proc").mkdir()
        (tmp_path / "proc/self").symlink_to(f"/proc/{busy.pid}")
        (tmp_path / "sys").symlink_to("/sys")
        outside = throttled_seconds(tmp_path)
        try:
            (tight_group / "cgroup.procs").write_text(str(busy.pid))
        except OSError:
            pytest.skip("no process may be moved to another control group here")
        assert cpu_quota(tmp_path) == 0.2
        assert len(pick_cores({0, 1}, tmp_path)) == 1
        while throttled_seconds(tmp_path) <= outside:
            time.sleep(0.01)
    finally:
        busy.kill()
        busy.wait()
