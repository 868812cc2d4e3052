"""Timing an operator until its median is known, and noticing when something got in the way."""

import itertools
import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from benchmark.garbage import collector_paused
from benchmark.hardware import last_level_cache_bytes
from benchmark.measurement import Timing, TimingOptions
from benchmark.quiet import QuietLevel, quiet_level
from benchmark.reference import Reference
from benchmark.statistics import FEWEST_FOR_INTERVAL, median_spread

Operator = Callable[[], Any]  # runs the forward pass and returns its output

_WARM_UP = 2
# Ray's own processes take a core for 0.1 ms every few milliseconds. More than that, in wall time
# beyond CPU time or in involuntary context switches, is somebody else.
_DESCHEDULED_SHARE = 0.15
_DESCHEDULED_MS = 0.3
_MOST_SWITCHES = 8
_SLOW_FLUSH = 1.3  # times the quiet level of a GPU's flush
_GAUGED = 200  # runs of the reference that its quiet level is taken from
_ATTEMPTS = 3  # iterations tried for each one that is wanted, when most are disturbed


@dataclass(frozen=True)
class Iteration:
    """One forward and backward pass; `wall_ms` is the time that timed work kept the device.

    `disturbance` says how far it is to be mistrusted; beyond 1 it does not count. `reference_ms`
    is what the reference took beside it.
    """

    forward_ms: float
    backward_ms: float
    wall_ms: float
    disturbance: float = 0.0
    reference_ms: float | None = None

    @property
    def total_ms(self) -> float:
        """Both passes."""
        return self.forward_ms + self.backward_ms

    def told_at(self, quiet_ms: float | None) -> "Iteration":
        """The same as on a machine on which the reference takes so long."""
        if quiet_ms is None or self.reference_ms is None:
            return self
        factor = quiet_ms / self.reference_ms
        return replace(
            self, forward_ms=self.forward_ms * factor, backward_ms=self.backward_ms * factor
        )


class Stopwatch(Protocol):
    """Runs and times single iterations on a kind of device."""

    def iteration(self, forward: Operator, gradient: torch.Tensor) -> Iteration:
        """One forward and backward pass after the cache was flushed."""
        ...

    def foreign_load(self) -> float:
        """Share of the device that other processes took since the last call."""
        ...

    def quiet_ms(self) -> float | None:
        """What the reference takes here when all is quiet; None without a reference."""
        ...


def time_operator(
    forward: Operator,
    gradient: torch.Tensor,
    watch: Stopwatch,
    options: TimingOptions,
    quiet_ms: float | None = None,
) -> Timing:
    """Warm up, then iterate until the median of forward plus backward is known to `precision`.

    With `quiet_ms` costs are told as where the reference takes so long.
    """
    started = time.monotonic()
    kept: list[Iteration] = []
    disturbed: list[Iteration] = []
    with collector_paused():
        warm_up = [watch.iteration(forward, gradient) for _ in range(_WARM_UP)]
        watch.foreign_load()
        while not _enough(kept, options):
            run = watch.iteration(forward, gradient).told_at(quiet_ms)
            (disturbed if run.disturbance > 1 else kept).append(run)
            tried = len(disturbed) + len(kept)
            if tried >= _ATTEMPTS * options.max_iterations:
                break
            if tried > 2 and time.monotonic() - started > options.max_seconds:
                break
        load = watch.foreign_load()
    timed = [*warm_up, *kept, *disturbed]
    if len(kept) < FEWEST_FOR_INTERVAL:  # nothing better was to be had: take the calmest
        kept = sorted(kept + disturbed, key=lambda run: run.disturbance)[:FEWEST_FOR_INTERVAL]
    return Timing(
        forward_ms=float(np.median([run.forward_ms for run in kept])),
        backward_ms=float(np.median([run.backward_ms for run in kept])),
        spread=median_spread([run.total_ms for run in kept]),
        iterations=len(kept),
        disturbed=len(disturbed),
        foreign_load=load,
        operator_seconds=sum(run.wall_ms for run in timed) / 1e3,
        quiet_ms=quiet_ms,
    )


def _enough(kept: list[Iteration], options: TimingOptions) -> bool:
    if len(kept) < FEWEST_FOR_INTERVAL:
        return len(kept) >= options.max_iterations
    spread = median_spread([run.total_ms for run in kept])
    return spread <= options.precision or len(kept) >= options.max_iterations


class CpuStopwatch:
    """Times the calling thread, which must be pinned to `core`.

    The clock is the thread's own CPU time. On a core of its own that is wall time; where the
    system takes the core for a moment it leaves that moment out. An iteration that lost more
    than a moment is disturbed, for it has lost its caches too.

    Args:
        core: the core.
        flush_cache: read as much as the last-level cache holds before each iteration.
        reference: run beside each iteration, so that costs can be told apart from the hour.
    """

    def __init__(
        self, core: int, flush_cache: bool = True, reference: Reference | None = None
    ) -> None:
        self._core = core
        flush_bytes = last_level_cache_bytes(core) if flush_cache else 0
        # Reading evicts as well as writing and takes half the time.
        self._flush = torch.ones(flush_bytes // 8, dtype=torch.float64) if flush_bytes else None
        self._reference = reference
        self._quiet_ms: float | None = None
        self._seen = _CoreTime.now(core)

    def iteration(self, forward: Operator, gradient: torch.Tensor) -> Iteration:
        """One forward and backward pass; disturbed if the thread was slowed down meanwhile."""
        self._clear_cache()
        switches = _involuntary_switches()
        start_wall, start = time.perf_counter_ns(), time.thread_time_ns()
        output = forward()
        between = time.thread_time_ns()
        output.backward(gradient)
        end, end_wall = time.thread_time_ns(), time.perf_counter_ns()
        wall, total = (end_wall - start_wall) / 1e6, (end - start) / 1e6
        descheduled = (wall - total) / max(_DESCHEDULED_MS, _DESCHEDULED_SHARE * total)
        switched = (_involuntary_switches() - switches) / _MOST_SWITCHES
        reference_ms = None if self._reference is None else self._reference.run_ms()
        return Iteration(
            forward_ms=(between - start) / 1e6,
            backward_ms=(end - between) / 1e6,
            wall_ms=wall + (reference_ms or 0.0),
            disturbance=max(descheduled, switched),
            reference_ms=reference_ms,
        )

    def quiet_ms(self) -> float | None:
        """The quiet level of the reference, taken at the first call: a second's work."""
        if self._reference is not None and self._quiet_ms is None:
            times = []
            for _ in range(_GAUGED):
                self._clear_cache()
                times.append(self._reference.run_ms())
            self._quiet_ms = quiet_level(times[_WARM_UP:])
        return self._quiet_ms

    def _clear_cache(self) -> None:
        if self._flush is not None:
            self._flush.sum()

    def foreign_load(self) -> float:
        """Share of the core's time that others took: busy and stolen time beyond our own."""
        before, self._seen = self._seen, _CoreTime.now(self._core)
        return self._seen.foreign_share(before)


def _involuntary_switches() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


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
        """Foreign share since `before`; the kernel ticks every 10 ms, so short spans say 0."""
        wall = self.wall - before.wall
        foreign = (self.busy - before.busy) - (self.own - before.own) - 0.02
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

    def iteration(self, forward: Operator, gradient: torch.Tensor) -> Iteration:
        """One forward and backward pass; disturbed if the flush before it was slow."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]  # type: ignore[no-untyped-call]
        marks[0].record()
        self._flush.zero_()
        marks[1].record()
        output = forward()
        marks[2].record()
        output.backward(gradient)
        marks[3].record()
        torch.cuda.synchronize(self._device)
        flush_ms, forward_ms, backward_ms = (
            first.elapsed_time(last) for first, last in itertools.pairwise(marks)
        )
        disturbance = 0.0
        if self._flush.numel():
            disturbance = self._flush_level.slowdown(flush_ms) / _SLOW_FLUSH
        return Iteration(forward_ms, backward_ms, forward_ms + backward_ms, disturbance)

    def quiet_ms(self) -> None:
        """A GPU is nobody else's: it needs no reference."""
        return

    def foreign_load(self) -> float:
        """1.0 if another process holds the GPU (NVML says who, not how much), else 0.0."""
        return 1.0 if gpu_is_shared(self._device.index or 0) else 0.0


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
