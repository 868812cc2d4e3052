"""Times shards of tasks on one core, under several CPU quotas; prints forward and backward ms.

A process of its own, for it joins a control group: python time_shards.py PERCENTS ROUNDS FILE,
where quotas are separated by commas, and the file has a list of lists of table specifications, one
for each shard. What is printed is JSON, [quotas, shards, 2].

Shards are timed as a pool does: in huge pages, after the cache was cleared. In warm caches, shards
of 1 to 4 tables took 0.6 of that; without huge pages those of 16 and 24 tables took 1.2 times that.
"""

import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from autoshard.benchmark import MeasureSettings
from autoshard.benchmark.backends.base import Place, Stopwatch, TimedOperator
from autoshard.benchmark.backends.cpu import CpuBackend
from autoshard.benchmark.machine.hardware import free_memory_bytes, machine_id, physical_cores
from autoshard.benchmark.operator import fbgemm
from autoshard.benchmark.operator.embedding_op import EmbeddingOp
from autoshard.workload import EmbeddingTable, Piece, Shard

_GROUPS = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")  # of version 1, and of version 2
_PERIOD_US = 5_000  # short beside an iteration, so that each is slowed alike
ROUND_SECONDS = 0.4  # of each shard


class Quota:
    """The share of a core that this process has, by a control group of its own."""

    def __init__(self, group: Path) -> None:
        self._group = group

    @staticmethod
    @contextmanager
    def joined() -> "Iterator[Quota]":
        """Yields the quota of a new group, in which this process is meanwhile."""
        parent = next(folder for folder in _GROUPS if folder.is_dir())
        group = parent / f"autoshard-{os.getpid()}"
        group.mkdir()
        try:
            (group / "cgroup.procs").write_text(str(os.getpid()))
            yield Quota(group)
        finally:  # a folder with a process in it cannot be removed
            (parent / "cgroup.procs").write_text(str(os.getpid()))
            group.rmdir()

    def set(self, percent: int) -> None:
        """Sets the share; 100: all of it."""
        quota_us = _PERIOD_US * percent // 100
        if (self._group / "cpu.cfs_quota_us").exists():
            (self._group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (self._group / "cpu.cfs_quota_us").write_text(str(quota_us if percent < 100 else -1))
        else:
            (self._group / "cpu.max").write_text(
                f"{quota_us if percent < 100 else 'max'} {_PERIOD_US}"
            )


def times_ms(
    shards: Sequence[Shard],
    batch_size: int,
    count: int,
    percents: Sequence[int],
    quota: Quota,
    core: int,
) -> list[Any]:
    """Returns forward and backward ms by the wall clock, medians of rounds: [quotas, shards, 2].

    A shard is timed under one quota after the other, so a minute in which the machine is slower
    counts for all alike.
    """
    backend, name = CpuBackend(), f"core {core}"
    backend.bind(Place("cpu", machine_id(), core, "", name, free_memory_bytes(), (core,)))
    watch = backend.stopwatch()
    built = [EmbeddingOp(shard, MeasureSettings(batch_size), backend) for shard in shards]
    operators = [TimedOperator(operator.forward, operator.gradient) for operator in built]
    rounds = np.zeros((count + 1, len(percents), len(shards), 2))
    for number in range(len(rounds)):
        for place, operator in enumerate(operators):
            for kind, percent in enumerate(percents):
                quota.set(percent)
                rounds[number, kind, place] = np.mean(_spent(operator, watch), axis=0)
    found: list[Any] = (1e3 * np.median(rounds[1:], axis=0)).tolist()  # the first warms up
    return found


def _spent(operator: TimedOperator, watch: Stopwatch) -> list[tuple[float, float]]:
    """Returns the seconds of forward and backward passes of a round."""
    spent, until = list[tuple[float, float]](), time.perf_counter() + ROUND_SECONDS
    while time.perf_counter() < until:
        watch.clear_cache(math.inf)
        start = time.perf_counter()
        output = operator.forward()
        between = time.perf_counter()
        output.backward(operator.gradient)
        spent.append((between - start, time.perf_counter() - between))
    return spent


def main(percents: Sequence[int], rounds: int, path: Path) -> None:
    """Times the shards of the file."""
    given = json.loads(path.read_text())
    shards = [
        Shard(tuple(Piece(EmbeddingTable.from_json(t), start, width) for t, start, width in pieces))
        for pieces in given["shards"]
    ]
    fbgemm.training_ops()
    core = physical_cores()[-1]
    with Quota.joined() as quota:
        found = times_ms(shards, given["batch_size"], rounds, percents, quota, core)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main([int(each) for each in sys.argv[1].split(",")], int(sys.argv[2]), Path(sys.argv[3]))
