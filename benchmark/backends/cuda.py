"""NVIDIA GPUs: Ray assigns each to one actor, which sees no other."""

import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from autoshard.benchmark.backends.base import (
    DeviceBackend,
    Iteration,
    Node,
    OperatorPlacement,
    Place,
    Stopwatch,
    TimedOperator,
)
from autoshard.benchmark.hardware import CacheReport, NodeReport, SystemReport
from autoshard.benchmark.process import release_freed_memory
from autoshard.benchmark.statistics import uncontended_level
from autoshard.workload import UserError

if TYPE_CHECKING:
    import torch

_SLOW_FLUSH = 1.3  # times the uncontended time of a flush
_FLUSHES = 300  # latest ones, for the uncontended time


class CudaRuntime:
    """The parts of torch, NCCL and NVML that `CudaBackend` uses, on the one visible GPU.

    Any object with these members can stand in for a GPU.
    """

    operator = OperatorPlacement("DEVICE", "CUDA")
    collectives = "nccl"

    @property
    def device(self) -> "torch.device":
        """The GPU."""
        import torch

        return torch.device("cuda", 0)

    @property
    def cuda(self) -> Any:
        """The module torch.cuda, or its stand-in."""
        import torch

        return torch.cuda

    def process_group(self, store: Any, rank: int, ranks: int, timeout: timedelta) -> Any:
        """Returns a process group of NCCL."""
        import torch.distributed as dist

        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, ranks, options)

    def processes(self) -> set[int]:
        """Returns the processes on the GPU; none if NVML is missing or not permitted."""
        try:
            import pynvml

            pynvml.nvmlInit()
            uuid = self.cuda.get_device_properties(self.device).uuid
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            return {each.pid for each in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
        except Exception:  # whatever NVML raises, processes are unknown
            return set()


class CudaBackend(DeviceBackend):
    """A GPU."""

    kind, noun = "cuda", "GPU"
    max_ranks, is_shared = 1, False
    patience_s = 900.0  # a cloud takes minutes to start a machine with GPUs
    num_gpus = 1
    probe_bytes = 2**28

    def __init__(self, runtime: CudaRuntime | None = None) -> None:
        self._runtime = runtime or CudaRuntime()
        self.operator, self.collectives = self._runtime.operator, self._runtime.collectives

    @property
    def device(self) -> "torch.device":
        """The GPU that Ray has assigned: the first that this process sees."""
        return self._runtime.device

    def is_on(self, nodes: Iterable[Node]) -> bool:
        """Returns whether any node declares a GPU to Ray."""
        return any(node["Resources"].get("GPU", 0) >= 1 for node in nodes)

    def places(
        self, nodes: Mapping[str, Node], reports: Sequence[NodeReport], taken: Iterable[Place]
    ) -> list[Place]:
        """Returns free GPUs, which are numbered by node."""
        units = {place.unit for place in taken}
        found = [
            Place(self.kind, report.node_id, number, report.node_id, f"gpu{number}@{report.host}")
            for report in reports
            for number in range(int(nodes[report.node_id]["Resources"].get("GPU", 0)))
        ]
        return [place for place in found if place.unit not in units]

    def is_here(self) -> bool:
        """Returns whether this machine has a GPU that torch can use."""
        return bool(self._runtime.cuda.is_available())

    def fingerprint(self) -> str:
        """Returns model, compute capability and memory."""
        found = self._properties()
        memory = round(found.total_memory / 2**30)
        return f"{self.kind}: {found.name} sm{found.major}{found.minor}, {memory} GiB"

    def system_report(self) -> SystemReport:
        """Returns the L2 cache, which all multiprocessors share, and the clock."""
        found = self._properties()
        l2 = CacheReport(2, found.L2_cache_size, getattr(found, "multi_processor_count", None))
        clock_khz = getattr(found, "clock_rate", None)
        return SystemReport((l2,), clock_mhz=clock_khz / 1e3 if clock_khz else None)

    def bind(self, place: Place) -> None:  # noqa: ARG002
        """Makes the GPU the default device; UserError if torch cannot use it."""
        if not self.is_here():
            raise UserError(
                "torch cannot use CUDA here: it takes an NVIDIA driver and a CUDA build"
            )
        self._runtime.cuda.set_device(self.device)

    @property
    def memory_bytes(self) -> int:
        """All of the GPU's memory."""
        return int(self._properties().total_memory)

    def free_bytes(self) -> int:
        """Returns the GPU's free memory."""
        return int(self._runtime.cuda.mem_get_info(self.device)[0])

    def peak_bytes(self) -> int:
        """Returns the peak memory of tensors on the GPU."""
        return int(self._runtime.cuda.max_memory_allocated(self.device))

    def flush(self, freed_bytes: int) -> None:  # noqa: ARG002
        """Releases torch's cached GPU memory, and freed main memory."""
        release_freed_memory()
        self._runtime.cuda.empty_cache()

    def stopwatch(
        self,
        flush: bool = True,
        references: Sequence[TimedOperator] = (),  # noqa: ARG002
    ) -> "CudaStopwatch":
        """Returns a stopwatch of the GPU. A GPU is not shared, so it runs no references."""
        return CudaStopwatch(self._runtime, self._properties().L2_cache_size * 2 if flush else 0)

    def process_group(self, store: Any, rank: int, ranks: int, timeout: timedelta) -> Any:
        """Returns a process group of NCCL."""
        return self._runtime.process_group(store, rank, ranks, timeout)

    def synchronize(self) -> None:
        """Waits until the GPU is done."""
        self._runtime.cuda.synchronize(self.device)

    def _properties(self) -> Any:
        return self._runtime.cuda.get_device_properties(self.device)


class CudaStopwatch(Stopwatch):
    """Times with CUDA events, so that launches and queues are excluded.

    The flush of the L2 cache before each iteration is always the same work. Where it takes longer
    than usual, another process is on the GPU.
    """

    def __init__(self, runtime: CudaRuntime, flush_bytes: int) -> None:
        super().__init__()
        import torch

        self._runtime = runtime
        self._flush = torch.empty(flush_bytes, dtype=torch.int8, device=runtime.device)
        self._flushes_ms: deque[float] = deque(maxlen=_FLUSHES)

    def iteration(self, subject: TimedOperator) -> Iteration:
        """Times one forward and backward pass; it is disturbed if the flush before it was slow."""
        marks = [self.mark()]
        self._flush.zero_()
        marks.append(self.mark())
        output = subject.forward()
        marks.append(self.mark())
        output.backward(subject.gradient)
        marks.append(self.mark())
        (flush_ms, _), (forward_ms, _), (backward_ms, _) = self.between(marks)
        self._flushes_ms.append(flush_ms)
        slow = (
            flush_ms > _SLOW_FLUSH * uncontended_level(self._flushes_ms) and self._flush.numel() > 0
        )
        return Iteration(forward_ms, backward_ms, forward_ms + backward_ms, slow)

    def foreign_load(self) -> float:
        """Returns 1.0 if another process is on the GPU (NVML does not say how much), else 0.0."""
        return 1.0 if self._runtime.processes() - {os.getpid()} else 0.0

    def mark(self) -> Any:
        """Returns an event in the current stream."""
        event = self._runtime.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, marks: Sequence[Any]) -> list[tuple[float, float]]:
        """Returns ms from each mark to the next, all of them ours; waits for the last."""
        marks[-1].synchronize()
        found = [before.elapsed_time(after) for before, after in pairwise(marks)]
        return [(milliseconds, milliseconds) for milliseconds in found]
