"""Times shards of tasks on one core, under a CPU quota; prints forward and backward ms as JSON.

A process of its own, for it joins a control group: python time_shards.py QUOTA_PERCENT ROUNDS
FILE, where the file has a list of lists of table specifications, one for each shard.
"""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch

from autoshard.benchmark import MeasureSettings, fbgemm
from autoshard.benchmark.backends.base import TimedOperator
from autoshard.benchmark.backends.cpu import CpuBackend
from autoshard.benchmark.embedding_op import EmbeddingOp
from autoshard.benchmark.hardware import physical_cores
from autoshard.workload import EmbeddingTable, Piece, Shard

_GROUPS = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")  # of version 1, and of version 2
_PERIOD_US = 5_000  # short beside an iteration, so that each is slowed alike
ROUND_SECONDS = 0.4  # of each shard


def limit(percent: int) -> Path:
    """Puts this process into a control group with so much of a core; returns its folder."""
    parent = next(folder for folder in _GROUPS if folder.is_dir())
    group = parent / f"autoshard-{os.getpid()}"
    group.mkdir()
    quota_us = _PERIOD_US * percent // 100
    if (group / "cpu.cfs_quota_us").exists():
        (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(quota_us))
    else:
        (group / "cpu.max").write_text(f"{quota_us} {_PERIOD_US}")
    (group / "cgroup.procs").write_text(str(os.getpid()))
    return group


def times_ms(shards: list[Shard], batch_size: int, count: int) -> list[tuple[float, float]]:
    """Returns forward and backward ms of each shard by the wall clock: medians of rounds."""
    built = [EmbeddingOp(shard, MeasureSettings(batch_size), CpuBackend()) for shard in shards]
    operators = [TimedOperator(operator.forward, operator.gradient) for operator in built]
    rounds = np.zeros((count + 1, len(shards), 2))
    for number in range(len(rounds)):
        for place, operator in enumerate(operators):
            spent, until = list[tuple[float, float]](), time.perf_counter() + ROUND_SECONDS
            while time.perf_counter() < until:
                start = time.perf_counter()
                output = operator.forward()
                between = time.perf_counter()
                output.backward(operator.gradient)
                spent.append((between - start, time.perf_counter() - between))
            rounds[number, place] = np.mean(spent, axis=0)
    found = 1e3 * np.median(rounds[1:], axis=0)  # the first warms up
    return [(float(forward), float(backward)) for forward, backward in found]


def main(percent: int, rounds: int, path: Path) -> None:
    """Times the shards of the file."""
    given = json.loads(path.read_text())
    shards = [
        Shard(tuple(Piece(EmbeddingTable.from_json(t), start, width) for t, start, width in pieces))
        for pieces in given["shards"]
    ]
    fbgemm.training_ops()
    os.sched_setaffinity(0, {physical_cores()[-1]})
    torch.set_num_threads(1)
    home = limit(percent) if percent < 100 else None
    try:
        sys.stdout.write(json.dumps(times_ms(shards, given["batch_size"], rounds)) + "\n")
    finally:
        if home is not None:  # a folder with a process in it cannot be removed
            (home.parent / "cgroup.procs").write_text(str(os.getpid()))
            home.rmdir()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
