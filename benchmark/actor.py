"""What runs inside the actor on a device: it owns the device and measures on it."""

import gc
import os
import resource
import socket
import time

import torch

from benchmark import exchange, fbgemm, hardware
from benchmark.core_lock import claimed, this_pool
from benchmark.embedding_op import EmbeddingOp, needed_bytes
from benchmark.hardware import DeviceInfo
from benchmark.measurement import (
    ExchangePart,
    Measurement,
    MeasureSettings,
    RankTimes,
    Status,
    Timing,
    TimingOptions,
)
from benchmark.memory import KEPT_BYTES, keep_freed_memory, release_freed_memory
from benchmark.reference import Reference
from benchmark.timing import CpuStopwatch, CudaStopwatch, Stopwatch, time_operator
from workload import Shard, UserError


class DeviceBenchmark:
    """Measures shards on one GPU, or on one CPU core that it pins itself to.

    Args:
        name: the device's name in reports.
        core: the CPU core to pin to; None for the GPU that Ray assigned.
        memory_bytes: what a shard may take on a CPU core; a GPU's is its own.
    """

    def __init__(self, name: str, core: int | None, memory_bytes: int) -> None:
        fbgemm.training_ops()
        self._core = core
        self._pool = this_pool()
        kind: hardware.Kind = "cuda" if core is None else "cpu"
        if core is None:
            self._torch_device = torch.device("cuda", 0)
            memory_bytes = torch.cuda.get_device_properties(0).total_memory
            self._watch: Stopwatch = CudaStopwatch(self._torch_device)
            fingerprint = hardware.cuda_fingerprint()
        else:
            self._torch_device = torch.device("cpu")
            os.sched_setaffinity(0, {core})
            torch.set_num_threads(1)
            keep_freed_memory()
            self._watch = CpuStopwatch(core, reference=Reference())
            fingerprint = hardware.cpu_fingerprint()
        self._info = DeviceInfo(name, kind, socket.gethostname(), fingerprint, memory_bytes)
        self._versions = fbgemm.library_versions()
        self._watch.quiet_ms()  # taken now, for later the clock of a time limit runs
        gc.collect()
        gc.freeze()  # later collections look at a shard's own objects only: 1 ms instead of 130

    def describe(self) -> tuple[DeviceInfo, str]:
        """The device and the versions of the libraries."""
        return self._info, self._versions

    def peak_bytes(self) -> int:
        """The most main memory that this process has ever taken."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def measure(
        self,
        shard: Shard,
        settings: MeasureSettings,
        timing: TimingOptions,
        quiet_ms: float | None = None,
    ) -> Measurement:
        """Measure a shard, or say why it was refused. DeviceBusy if the core is taken.

        `quiet_ms`: what the reference takes where the costs are told; by default here, in quiet.
        """
        with claimed(self._core, self._pool):
            needed, free = needed_bytes(shard, settings), self._free_bytes()
            if needed > free:
                reason = f"needs {needed:,} bytes, {self._info.name} has {free:,}"
                return self._answer(shard, settings, "refused", reason=reason)
            try:
                taken = self._time(shard, settings, timing, quiet_ms)
            except UserError as error:  # the shard's own fault, such as a trace that is not here
                return self._answer(shard, settings, "failed", reason=str(error))
            return self._answer(shard, settings, "ok", taken)

    def open_meeting_point(self) -> tuple[str, int]:
        """Host and port where the ranks of the next all-to-all find each other."""
        self._meeting_point = exchange.MeetingPoint()
        return self._meeting_point.host, self._meeting_point.port

    def exchange(self, part: ExchangePart) -> list[RankTimes]:
        """Run this device's ranks of an all-to-all."""
        with claimed(self._core, self._pool):
            return exchange.run_ranks(part, self._torch_device)

    def _time(
        self,
        shard: Shard,
        settings: MeasureSettings,
        timing: TimingOptions,
        quiet_ms: float | None,
    ) -> Timing:
        level = quiet_ms or self._watch.quiet_ms()
        op = EmbeddingOp(shard, settings, self._torch_device)
        try:
            return time_operator(op.forward, op.gradient, self._watch, timing, level)
        finally:
            del op
            gc.collect()  # modules are cycles: free their weights before the next shard's
            if needed_bytes(shard, settings) > KEPT_BYTES:
                release_freed_memory()
            if self._info.kind == "cuda":
                torch.cuda.empty_cache()

    def _free_bytes(self) -> int:
        if self._info.kind == "cpu":
            return self._info.memory_bytes
        return int(torch.cuda.mem_get_info(self._torch_device)[0])

    def _answer(
        self,
        shard: Shard,
        settings: MeasureSettings,
        status: Status,
        timing: Timing | None = None,
        reason: str = "",
    ) -> Measurement:
        return Measurement(
            shard=shard,
            settings=settings,
            hardware=self._info.hardware,
            versions=self._versions,
            status=status,
            device=self._info.name,
            node=self._info.node,
            measured_at=time.time(),
            timing=timing,
            reason=reason,
        )
