"""Reads CPU quota and memory limit of the control groups around this process.

Groups are nested, and any may set a limit: the lowest counts. Containers, batch systems and systemd
set limits this way, by version 1 or version 2 of the interface.
"""

import re
from pathlib import Path, PurePosixPath

from autoshard.benchmark.machine.system_files import ROOT, read_number, read_numbers, read_text

_NO_LIMIT = 2**60  # version 1 says "none" as the last page below 2**63, whatever a page's size
_MEMORY_LIMITS = ("memory.max", "memory.high", "memory.limit_in_bytes")
_MEMORY_USES = ("memory.current", "memory.usage_in_bytes")
# A line of mountinfo: three numbers, what is mounted, where, how; then the kind and its options.
_MOUNT = re.compile(r"^\S+ \S+ \S+ (\S+) (\S+) .* - (cgroup2?) \S+ (\S+)$", re.MULTILINE)


def cpu_quota(root: Path = ROOT) -> float | None:
    """Returns the number of CPUs that the container may use; None if not limited."""
    quotas = [quota for group in _groups("cpu", root) if (quota := _quota(group)) is not None]
    return min(quotas, default=None)


def throttled_seconds(root: Path = ROOT) -> float:
    """Returns how long quotas have stopped CPUs of this container so far, summed over CPUs.

    It grows when any process of the container exhausts the quota, and is 0 without a quota. Reading
    takes 0.2 ms.
    """
    total = 0.0
    for group in _groups("cpu", root):
        numbers = read_numbers(group / "cpu.stat")
        total += numbers.get("throttled_usec", 0) / 1e6 + numbers.get("throttled_time", 0) / 1e9
    return total


def memory_limit(root: Path = ROOT) -> int | None:
    """Returns the bytes that the container may use; None if not limited.

    `memory.high` counts as well: beyond it nothing fails, but everything slows down.
    """
    groups = _groups("memory", root)
    found = [read_number(group / name) for group in groups for name in _MEMORY_LIMITS]
    return min((limit for limit in found if limit is not None and limit < _NO_LIMIT), default=None)


def memory_left(root: Path = ROOT) -> int | None:
    """Returns the bytes that the container may still take; None if not limited."""
    found = []
    for group in _groups("memory", root):
        limits = [read_number(group / name) for name in _MEMORY_LIMITS]
        used = [read_number(group / name) for name in _MEMORY_USES]
        taken = next((size for size in used if size is not None), 0)
        found += [limit - taken for limit in limits if limit is not None and limit < _NO_LIMIT]
    return max(0, min(found)) if found else None


def _quota(group: Path) -> float | None:
    match read_text(group / "cpu.max").split():
        case [quota, period] if quota.isdigit() and period.isdigit() and int(period):
            return int(quota) / int(period)
    quota_us = read_number(group / "cpu.cfs_quota_us")
    period_us = read_number(group / "cpu.cfs_period_us")
    return quota_us / period_us if quota_us and quota_us > 0 and period_us else None


def _groups(controller: str, root: Path) -> list[Path]:
    """Returns the visible folders of the groups around this process, of either version."""
    members = _memberships(controller, root)
    found: dict[tuple[int, int], Path] = {}  # a hierarchy may be mounted twice: each group once
    for top, point, kind, options in _MOUNT.findall(read_text(root / "proc/self/mountinfo")):
        if kind not in members or (kind == "cgroup" and controller not in options.split(",")):
            continue
        base = root / _unescaped(point).lstrip("/")
        group = base / _below(members[kind], _unescaped(top))
        for folder in [group, *group.parents]:
            if folder.is_dir():
                status = folder.stat()
                found.setdefault((status.st_dev, status.st_ino), folder)
            if folder == base:
                break
    return list(found.values())


def _memberships(controller: str, root: Path) -> dict[str, str]:
    """Returns this process' group by version: "cgroup" is the first, "cgroup2" the second."""
    members: dict[str, str] = {}
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if not controllers:
            members["cgroup2"] = group
        elif controller in controllers.split(","):
            members["cgroup"] = group
    return members


def _below(group: str, top: str) -> PurePosixPath:
    """Returns a group's path below the mount point; containers mount their group as root."""
    path = PurePosixPath(group)
    if not path.is_relative_to(top) or ".." in path.parts:
        return PurePosixPath()
    return path.relative_to(top)


def _unescaped(field: str) -> str:
    """Returns a field of mountinfo, in which a space is written \\040 and a backslash \\134."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)
