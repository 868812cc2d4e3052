"""Single iterations of an operator, timed on a CPU core or on a GPU."""

import itertools
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from autoshard.benchmark.clearing import Clearing
from autoshard.benchmark.embedding_op import EmbeddingOp
from autoshard.benchmark.quiet import QuietLevel

LOST_SHARE = 0.15  # of its time: so much taken by others is worth telling
_FIRST_FLUSH = 2**17  # of 8 bytes: enough to learn how fast they are read
# Forward passes before the one that counts. What ran before the reference makes its forward pass
# by up to 40 % slower or faster, and with it what is told beside it; after two of them by 4 %.
REFERENCE_WARM_UPS = 2
_SLOW_FLUSH = 1.3  # times the quiet level of a GPU's flush, which is always the same work


@dataclass(frozen=True)
class Subject:
    """An operator to be timed. `forward` runs the forward pass and returns its output."""

    forward: Callable[[], Any]
    gradient: torch.Tensor


@dataclass(frozen=True)
class Iteration:
    """One forward and backward pass; `wall_ms` is the time that it kept the device.

    `disturbed`: others took much of its time. It counts all the same: the clock leaves out what
    they took, and what is left they slow down no more than the reference beside it.
    """

    forward_ms: float
    backward_ms: float
    wall_ms: float
    disturbed: bool = False


class Stopwatch(Protocol):
    """Runs and times single iterations on a kind of device."""

    clearing: Clearing

    def iteration(self, subject: Subject) -> Iteration:
        """One forward and backward pass."""
        ...

    def reference(self) -> Iteration | None:
        """The same of the reference; None where there is none."""
        ...

    def clear_cache(self, most_ms: float) -> bool:
        """Put what was used out of the cache, as far as that is done in so long; True if all is."""
        ...

    def foreign_load(self) -> float:
        """Share of the device that other processes took since the last call."""
        ...

    def now(self) -> float:
        """Seconds on a clock that only goes forward."""
        ...


class CpuStopwatch:
    """Times the calling thread, which must be pinned to `core`.

    The clock is the thread's own CPU time. On a core of its own that is wall time; where others
    take the core for a while it leaves that while out.

    Args:
        core: the core.
        cache_bytes: of its last-level cache, as far as clearing it may take memory; 0 leaves the
            cache alone.
        references: run beside iterations, in turn, so that costs can be told apart from the hour.
    """

    def __init__(
        self, core: int, cache_bytes: int = 0, references: Sequence[EmbeddingOp] = ()
    ) -> None:
        self._core = core
        # Reading evicts as well as writing and takes half the time. Memory is taken as it is read.
        self._flush = torch.empty(cache_bytes // 8, dtype=torch.float64)
        self._touched = 0  # of its elements: they have pages of their own
        self._per_ms = 0.0  # elements read in a millisecond
        self._references = itertools.cycle([Subject(op.forward, op.gradient) for op in references])
        self._seen = _CoreTime.now(core)
        self.clearing = Clearing()

    def iteration(self, subject: Subject) -> Iteration:
        """One forward and backward pass of the thread."""
        start_wall, start = time.perf_counter_ns(), time.thread_time_ns()
        output = subject.forward()
        between = time.thread_time_ns()
        output.backward(subject.gradient)
        end, end_wall = time.thread_time_ns(), time.perf_counter_ns()
        wall_ms = (end_wall - start_wall) / 1e6
        return Iteration(
            forward_ms=(between - start) / 1e6,
            backward_ms=(end - between) / 1e6,
            wall_ms=wall_ms,
            disturbed=wall_ms - (end - start) / 1e6 > LOST_SHARE * wall_ms,
        )

    def reference(self) -> Iteration | None:
        """One run of the reference that is next, and runs before it that do not count."""
        following = next(self._references, None)
        if following is None:
            return None
        start = time.perf_counter_ns()
        for _ in range(REFERENCE_WARM_UPS):
            following.forward()
        found = self.iteration(following)
        return replace(found, wall_ms=(time.perf_counter_ns() - start) / 1e6)

    def clear_cache(self, most_ms: float) -> bool:
        """Read as much as the cache holds, or as can be read in so long; True if all of it."""
        whole = self._flush.numel()
        wanted = whole
        if math.isfinite(most_ms):
            wanted = min(whole, int(self._per_ms * most_ms) or _FIRST_FLUSH)
        if not wanted:
            return True
        if wanted > self._touched:  # pages that were never written are all the same page of zeros
            self._flush[self._touched : wanted].fill_(1.0)
            self._touched = wanted
        start = time.thread_time_ns()
        self._flush[:wanted].sum()
        self._per_ms = wanted / max((time.thread_time_ns() - start) / 1e6, 1e-3)
        return wanted == whole

    def foreign_load(self) -> float:
        """Share of the core's time that others took: busy and stolen time beyond our own."""
        before, self._seen = self._seen, _CoreTime.now(self._core)
        return self._seen.foreign_share(before)

    def now(self) -> float:
        """Seconds of the system's clock."""
        return time.monotonic()


@dataclass(frozen=True)
class _CoreTime:
    """Seconds a core was busy (or stolen by the hypervisor), and seconds this process ran."""

    wall: float
    busy: float
    own: float

    @staticmethod
    def now(core: int) -> "_CoreTime":
        wall, own = time.monotonic(), time.process_time()
        for line in Path("/proc/stat").read_text().splitlines():
            fields = line.split()
            if fields[0] == f"cpu{core}":
                user, nice, system, _, _, irq, soft, steal = map(int, fields[1:9])
                ticks = user + nice + system + irq + soft + steal
                return _CoreTime(wall, ticks / os.sysconf("SC_CLK_TCK"), own)
        return _CoreTime(wall, own, own)

    def foreign_share(self, before: "_CoreTime") -> float:
        """Foreign share since `before`; the kernel counts in ticks, so short spans say 0."""
        wall = self.wall - before.wall
        ticks = 2 / os.sysconf("SC_CLK_TCK")
        foreign = (self.busy - before.busy) - (self.own - before.own) - ticks
        return min(1.0, max(0.0, foreign / wall)) if wall > 0 else 0.0


class CudaStopwatch:
    """Times with CUDA events, so that launches and queues are not charged to the kernels.

    The flush of the L2 cache before each iteration is always the same work, so where it takes
    longer than it can, somebody else is on the GPU.
    """

    def __init__(self, device: torch.device, flush_cache: bool = True) -> None:
        self._device = device
        size = torch.cuda.get_device_properties(device).L2_cache_size * 2 if flush_cache else 0
        self._flush = torch.empty(size, dtype=torch.int8, device=device)
        self._flush_level = QuietLevel()
        self.clearing = Clearing()

    def iteration(self, subject: Subject) -> Iteration:
        """One forward and backward pass; disturbed if the flush before it was slow."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]  # type: ignore[no-untyped-call]
        marks[0].record()
        self._flush.zero_()
        marks[1].record()
        output = subject.forward()
        marks[2].record()
        output.backward(subject.gradient)
        marks[3].record()
        torch.cuda.synchronize(self._device)
        flush_ms, forward_ms, backward_ms = (
            first.elapsed_time(last) for first, last in itertools.pairwise(marks)
        )
        slow = self._flush.numel() > 0 and self._flush_level.slowdown(flush_ms) > _SLOW_FLUSH
        return Iteration(forward_ms, backward_ms, forward_ms + backward_ms, slow)

    def reference(self) -> None:
        """A GPU is nobody else's: it needs none."""
        return

    def clear_cache(self, most_ms: float) -> bool:  # noqa: ARG002
        """Done before each iteration."""
        return True

    def foreign_load(self) -> float:
        """1.0 if another process holds the GPU (NVML says who, not how much), else 0.0."""
        return 1.0 if gpu_is_shared(self._device.index or 0) else 0.0

    def now(self) -> float:
        """Seconds of the system's clock."""
        return time.monotonic()


def gpu_is_shared(index: int) -> bool:
    """True if NVML lists a process on the GPU besides this one."""
    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        return any(
            process.pid != os.getpid()
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        )
    except Exception:  # NVML is missing or not allowed here: then it cannot be told
        return False
