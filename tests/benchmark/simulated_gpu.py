"""A GPU that exists in numbers only: it stands in for `CudaRuntime`.

Kernels run on the CPU, events read a clock of their own, and gloo connects ranks. So it proves what
is called and in which order, never what a kernel does or takes.
"""

import os
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from autoshard.benchmark.backends.base import OperatorPlacement


class SimulatedRuntime:
    """An H100, by what torch says of one. `calls` are those of torch.cuda that change something.

    Args:
        pace_ms: by which its clock goes on from one event to the next, in turn.
        free_bytes: of its memory.
        others: processes on it besides this one.
        capability: compute capability.
        own: number of this process for NVML; by default the one that it has.
        limited_s: by which the time that its power limit lowers the clock goes on, when asked.
        lost_after: events after which the driver loses it, by what CUDA_VISIBLE_DEVICES says.
    """

    operator = OperatorPlacement("HOST", "CPU", "NONE")
    collectives = "gloo"
    build: str | None = "13.0"
    reference_samples = 64  # the reference runs on a core here
    device = torch.device("cpu")

    def __init__(
        self,
        pace_ms: tuple[float, ...] = (1.0,),
        free_bytes: int = 2**36,
        others: frozenset[int] = frozenset(),
        capability: tuple[int, int] = (9, 0),
        own: int | None = None,
        limited_s: float = 0.0,
        lost_after: dict[str, int] | None = None,
    ) -> None:
        self.calls: list[str] = []
        self._pace_ms, self._others = pace_ms, others
        self._own, self._has_context = own or os.getpid(), False
        self._ms, self._events = 0.0, 0
        self._limited_s, self._asked = limited_s, 0
        self._lost_after, self._is_lost = lost_after, False
        h100 = SimpleNamespace(
            name="NVIDIA H100 80GB HBM3",
            major=capability[0],
            minor=capability[1],
            total_memory=85_028_765_696,
            L2_cache_size=50 * 2**20,
        )
        self.cuda = SimpleNamespace(
            is_available=lambda: True,
            get_device_properties=lambda device: _identified(h100),
            mem_get_info=lambda device: (free_bytes, h100.total_memory),
            max_memory_allocated=lambda device: 7,
            set_device=lambda device: self.calls.append("set_device"),
            reset_peak_memory_stats=lambda device: self.calls.append("reset_peak"),
            empty_cache=lambda: self.calls.append("empty_cache"),
            synchronize=lambda device: self.calls.append("synchronize"),
            Event=lambda enable_timing: _Event(self),
        )

    @property
    def nvml(self) -> "SimulatedRuntime":
        return self

    def buffer(self, size: int) -> torch.Tensor:
        self._has_context = True
        return torch.empty(size, dtype=torch.int8)

    def wait(self, cycles: int) -> None:
        self.calls.append("wait")

    def processes(self) -> set[int]:
        return {*self._others, *([self._own] if self._has_context else [])}

    def is_lost(self) -> bool:
        return self._is_lost

    def state(self) -> str:
        return "1755 MHz, 412 W, power cap" if self._limited_s else "1980 MHz, 300 W"

    def limited_seconds(self) -> float:
        self._asked += 1
        return self._asked * self._limited_s

    def process_group(self, store: Any, rank: int, ranks: int, timeout: timedelta) -> Any:
        return dist.ProcessGroupGloo(store, rank, ranks, timeout)

    def tick(self) -> float:
        """The time of the next event."""
        events = (self._lost_after or {}).get(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
        if events is not None and self._events >= events:
            self._is_lost = True
            raise RuntimeError("CUDA error: unspecified launch failure")
        self._ms += self._pace_ms[self._events % len(self._pace_ms)]
        self._events += 1
        return self._ms


def _identified(gpu: SimpleNamespace) -> SimpleNamespace:
    """Which one it is depends on what Ray has assigned to this process."""
    number = os.environ.get("CUDA_VISIBLE_DEVICES") or "1"
    gpu.uuid = f"{number:0>8}-4e5f-0000-0000-0a1b2c3d4e5f"
    return gpu


class _Event:
    def __init__(self, runtime: SimulatedRuntime) -> None:
        self._runtime = runtime
        self.ms = -1.0

    def record(self) -> None:
        self.ms = self._runtime.tick()

    def synchronize(self) -> None:
        self._runtime.calls.append("event")

    def query(self) -> bool:
        return False  # the GPU still waits

    def elapsed_time(self, after: "_Event") -> float:
        assert self._runtime.calls[-1] == "event"  # else it would be asked before the GPU is there
        return after.ms - self.ms
