"""A GPU that exists in numbers only: it stands in for `CudaRuntime`.

Kernels run on the CPU, events read a clock of their own, and gloo connects ranks. So it proves what
is called and in which order, never what a kernel does or takes.
"""

import datetime
import os
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from autoshard.benchmark.backends.base import OperatorPlacement


class SimulatedRuntime:
    """An H100, by what torch says of one.

    Args:
        pace_ms: by which its clock goes on from one event to the next, in turn.
        free_bytes: of its memory.
        others: processes on it besides this one.
    """

    operator = OperatorPlacement("HOST", "CPU")
    collectives = "gloo"
    device = torch.device("cpu")

    def __init__(
        self,
        pace_ms: tuple[float, ...] = (1.0,),
        free_bytes: int = 2**36,
        others: frozenset[int] = frozenset(),
    ) -> None:
        self.calls: list[str] = []
        self._pace_ms, self._free, self._others = pace_ms, free_bytes, others
        self._ms, self._events = 0.0, 0

    def is_available(self) -> bool:
        return True

    def select(self) -> None:
        self.calls.append("select")

    def properties(self) -> SimpleNamespace:
        return SimpleNamespace(
            name="NVIDIA H100 80GB HBM3",
            major=9,
            minor=0,
            total_memory=85_028_765_696,
            L2_cache_size=50 * 2**20,
        )

    def free_bytes(self) -> int:
        return self._free

    def peak_bytes(self) -> int:
        return 7

    def empty_cache(self) -> None:
        self.calls.append("empty_cache")

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def event(self) -> "_Event":
        return _Event(self)

    def processes(self) -> set[int]:
        return {os.getpid(), *self._others}

    def process_group(self, store: Any, rank: int, ranks: int, timeout: datetime.timedelta) -> Any:
        return dist.ProcessGroupGloo(store, rank, ranks, timeout)

    def tick(self) -> float:
        """The time of the next event."""
        self._ms += self._pace_ms[self._events % len(self._pace_ms)]
        self._events += 1
        return self._ms


class _Event:
    def __init__(self, runtime: SimulatedRuntime) -> None:
        self._runtime = runtime
        self.ms = -1.0
        self.is_known = False

    def record(self) -> None:
        self.ms = self._runtime.tick()

    def synchronize(self) -> None:
        self._runtime.calls.append("event")
        self.is_known = True

    def elapsed_time(self, after: "_Event") -> float:
        assert self._runtime.calls[-1] == "event"  # else it would be asked before the GPU is there
        return after.ms - self.ms
