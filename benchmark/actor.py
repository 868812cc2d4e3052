"""What runs inside the actor on a device: it owns the device and measures on it."""

import gc
import os
import resource
import socket
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from autoshard.benchmark import exchange, fbgemm, hardware
from autoshard.benchmark.containers import cpu_quota, throttled_seconds
from autoshard.benchmark.core_lock import claimed, this_pool
from autoshard.benchmark.embedding_op import EmbeddingOp
from autoshard.benchmark.hardware import DeviceInfo
from autoshard.benchmark.measurement import (
    ExchangePart,
    Measurement,
    Order,
    RankTimes,
    ShardFault,
    Status,
    Timing,
)
from autoshard.benchmark.memory import keep_freed_memory, release_freed_memory
from autoshard.benchmark.reference import reference_operators
from autoshard.benchmark.stopwatch import CpuStopwatch, CudaStopwatch, Stopwatch, Subject
from autoshard.benchmark.timing import SubjectFault, time_by_turns
from autoshard.workload import UserError

# Of a core's memory, what its actor may keep beside shards: of freed pages, and for the flush.
_KEPT_SHARE, _FLUSH_SHARE = 24, 32


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
            self._kept_bytes = 0
            memory_bytes = torch.cuda.get_device_properties(0).total_memory
            self._watch: Stopwatch = CudaStopwatch(self._torch_device)
            fingerprint = hardware.cuda_fingerprint()
        else:
            self._torch_device = torch.device("cpu")
            os.sched_setaffinity(0, {core})
            torch.set_num_threads(1)
            self._kept_bytes = memory_bytes // _KEPT_SHARE
            keep_freed_memory(self._kept_bytes)
            cache_bytes = min(hardware.last_level_cache_bytes(core), memory_bytes // _FLUSH_SHARE)
            self._watch = CpuStopwatch(core, cache_bytes, reference_operators())
            fingerprint = hardware.cpu_fingerprint()
        self._info = DeviceInfo(name, kind, socket.gethostname(), fingerprint, memory_bytes)
        self._versions = fbgemm.library_versions()
        self._has_quota = core is not None and cpu_quota() is not None
        gc.collect()
        gc.freeze()  # later collections look at a shard's own objects only: 1 ms instead of 130

    def describe(self) -> tuple[DeviceInfo, str]:
        """The device and the versions of the libraries."""
        return self._info, self._versions

    def peak_bytes(self) -> int:
        """The most main memory that this process has ever taken."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def measure(self, orders: Sequence[Order]) -> list[Measurement]:
        """Measure shards by turns, or say why one was refused. DeviceBusy if the core is taken.

        ShardFault if an operator fails: then this process must not measure on.
        """
        with claimed(self._core, self._pool):
            started, stopped_s = time.monotonic(), throttled_seconds() if self._has_quota else 0.0
            answers: dict[int, Measurement] = {}
            waiting = list(range(len(orders)))
            while waiting:
                together = self._that_fit(orders, waiting)
                waiting = waiting[len(together) :]
                answers.update(self._by_turns(orders, together))
            if self._has_quota:
                share = min(1.0, (throttled_seconds() - stopped_s) / (time.monotonic() - started))
                answers = {n: replace(answer, throttled=share) for n, answer in answers.items()}
            return [answers[number] for number in range(len(orders))]

    def check_free(self) -> None:
        """DeviceBusy if the core is taken."""
        with claimed(self._core, self._pool):
            pass

    def open_meeting_point(self) -> tuple[str, int]:
        """Host and port where the ranks of the next all-to-all find each other."""
        self._meeting_point = exchange.MeetingPoint()
        return self._meeting_point.host, self._meeting_point.port

    def exchange(self, part: ExchangePart) -> list[RankTimes]:
        """Run this device's ranks of an all-to-all."""
        with claimed(self._core, self._pool):
            return exchange.run_ranks(part, self._torch_device)

    def _that_fit(self, orders: Sequence[Order], waiting: Sequence[int]) -> list[int]:
        """The first of those that wait, as many as fit into the memory at once; at least one."""
        free, taken, chosen = self._free_bytes(), 0, 0
        for number in waiting:
            taken += orders[number].settings.needed_bytes(orders[number].shard)
            if taken > free and chosen:
                break
            chosen += 1
        return list(waiting[:chosen])

    def _by_turns(self, orders: Sequence[Order], numbers: Sequence[int]) -> dict[int, Measurement]:
        """Measure these orders, all at once in memory."""
        answers: dict[int, Measurement] = {}
        operators: dict[int, EmbeddingOp] = {}
        free = self._free_bytes()
        for number in numbers:
            shard, settings, _ = orders[number]
            needed = settings.needed_bytes(shard)
            if needed > free:
                reason = f"needs {needed:,} bytes, {self._info.name} has {free:,}"
                answers[number] = self._answer(orders[number], "refused", reason=reason)
                continue
            try:
                operators[number] = EmbeddingOp(shard, settings, self._torch_device)
            except UserError as error:  # the shard's own fault, such as a trace that is not here
                answers[number] = self._answer(orders[number], "failed", reason=str(error))
        numbered = list(operators)
        try:
            timings = time_by_turns(
                [Subject(op.forward, op.gradient) for op in operators.values()],
                self._watch,
                [orders[number].timing for number in numbered],
            )
        except SubjectFault as fault:
            raise ShardFault(numbered[fault.number], fault.reason) from fault
        finally:
            operators.clear()
            gc.collect()  # modules are cycles: free their weights before the next shard's
            if sum(orders[n].settings.needed_bytes(orders[n].shard) for n in numbers) > (
                self._kept_bytes
            ):
                release_freed_memory()
            if self._info.kind == "cuda":
                torch.cuda.empty_cache()
        for number, timing in zip(numbered, timings, strict=True):
            answers[number] = self._answer(orders[number], "ok", timing)
        return answers

    def _free_bytes(self) -> int:
        if self._info.kind == "cpu":
            return self._info.memory_bytes
        return int(torch.cuda.mem_get_info(self._torch_device)[0])

    def _answer(
        self, order: Order, status: Status, timing: Timing | None = None, reason: str = ""
    ) -> Measurement:
        return Measurement(
            shard=order.shard,
            settings=order.settings,
            hardware=self._info.hardware,
            versions=self._versions,
            status=status,
            device=self._info.name,
            node=self._info.node,
            measured_at=time.time(),
            timing=timing,
            reason=reason,
        )
