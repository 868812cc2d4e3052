"""NVIDIA GPUs: Ray assigns each to one actor, which sees no other."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

from autoshard.benchmark.backends.base import (
    CLAIM_PATIENCE_S,
    DeviceBackend,
    Node,
    OperatorPlacement,
    Place,
    TimedOperator,
)
from autoshard.benchmark.backends.cuda_stopwatch import CudaStopwatch
from autoshard.benchmark.backends.nvml import NvmlReadings
from autoshard.benchmark.machine.device_lock import claimed
from autoshard.benchmark.machine.hardware import CacheReport, NodeReport, SystemReport
from autoshard.benchmark.machine.process import release_freed_memory
from autoshard.workload import Shard, UserError
from autoshard.workload.packing.gpu_memory import MAX_COLUMNS, SORT_BYTES

if TYPE_CHECKING:
    import torch


# Architectures for which fbgemm-gpu has code: there is none that drivers could translate.
ANY_MINOR, EXACT = 8, ((9, 0), (10, 0))  # sm_80 code runs on all of 8.x
_DRIVERS = {"12": "525", "13": "580"}  # by the major version of CUDA


class CudaRuntime:
    """The parts of torch, NCCL and NVML that `CudaBackend` uses, on the one visible GPU.

    Any object with these members can stand in for a GPU.
    """

    operator = OperatorPlacement("DEVICE", "CUDA", "WARNING")
    collectives = "nccl"
    reference_samples = 16_384

    @property
    def device(self) -> "torch.device":
        """The GPU."""
        import torch

        return torch.device("cuda", 0)

    @property
    def build(self) -> str | None:
        """Version of CUDA that torch is built for; None if for CPUs alone."""
        import torch

        return torch.version.cuda

    @property
    def cuda(self) -> Any:
        """The module torch.cuda, or its stand-in."""
        import torch

        return torch.cuda

    def buffer(self, size: int) -> Any:
        """Returns so many bytes of the GPU's memory."""
        import torch

        return torch.empty(size, dtype=torch.int8, device=self.device)

    def wait(self, cycles: int) -> None:
        """Launches a kernel that does nothing for so many clock cycles."""
        self.cuda._sleep(cycles)

    def process_group(self, store: Any, rank: int, ranks: int, timeout: timedelta) -> Any:
        """Returns a process group of NCCL."""
        import torch.distributed as dist

        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, ranks, options)

    @cached_property  # torch may not be able to say which GPU it is once that is lost
    def nvml(self) -> NvmlReadings:
        """Readings of the GPU by NVML."""
        is_here = self.cuda.is_available()
        return NvmlReadings(
            str(self.cuda.get_device_properties(self.device).uuid) if is_here else ""
        )


class CudaBackend(DeviceBackend):
    """A GPU."""

    kind, noun = "cuda", "GPU"
    max_ranks, is_shared = 1, False
    patience_s = 900.0  # a cloud takes minutes to start a machine with GPUs
    num_gpus = 1
    probe_bytes = 2**28
    lookup_bytes = SORT_BYTES
    throttle = "its limit of power or heat: cool it, or lock its clocks with nvidia-smi -lgc"
    max_width = MAX_COLUMNS

    def __init__(self, runtime: CudaRuntime | None = None) -> None:
        self._runtime = runtime or CudaRuntime()
        self.operator, self.collectives = self._runtime.operator, self._runtime.collectives
        self.reference_samples = self._runtime.reference_samples
        self._own: frozenset[int] = frozenset()

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
        """Makes the GPU the default device; UserError if torch or fbgemm cannot use it."""
        if (problem := self.problem()) is not None:
            raise UserError(problem)
        before = self._runtime.nvml.processes()
        self._runtime.cuda.set_device(self.device)
        self._runtime.buffer(1)  # makes this process one of the GPU's
        self._own = frozenset(self._runtime.nvml.processes() - before)

    def problem(self) -> str | None:
        """Returns why nothing can run on the GPU, and what to do about it; None if it can."""
        build = self._runtime.build
        if build is None:
            return "torch is a build for CPUs: install autoshard with EXTRA=gpu"
        if not self.is_here():
            return (
                f"torch finds no NVIDIA GPU that it can use: its build for CUDA {build} needs "
                f"driver {_DRIVERS.get(build.partition('.')[0], 'of that version')} or newer "
                "(nvidia-smi prints the driver that is here)"
            )
        found = self._properties()
        if found.major != ANY_MINOR and (found.major, found.minor) not in EXACT:
            return (
                f"fbgemm-gpu has no code for {found.name} (sm_{found.major}{found.minor}): its "
                "builds are for sm_80 to sm_89, sm_90 and sm_100 (A100, L4, H100, B200 and alike)"
            )
        return None

    def name_of(self, place: Place) -> str:
        """Returns the name with the GPU's identity: a number may stand for another one tomorrow."""
        return f"gpu-{str(self._properties().uuid)[:8]}@{place.name.partition('@')[2]}"

    @property
    def memory_bytes(self) -> int:
        """All of the GPU's memory."""
        return int(self._properties().total_memory)

    def claim(
        self,
        label: str,
        patience_s: float = CLAIM_PATIENCE_S,
        waiting: Callable[[str], None] | None = None,
    ) -> AbstractContextManager[None]:
        """Holds the GPU against other Ray clusters of this machine, which assign it, too."""
        return claimed(f"GPU {self._properties().uuid}", label, patience_s, waiting)

    def free_bytes(self) -> int:
        """Returns the GPU's free memory."""
        return int(self._runtime.cuda.mem_get_info(self.device)[0])

    def peak_bytes(self) -> int:
        """Returns the peak memory of tensors on the GPU."""
        return int(self._runtime.cuda.max_memory_allocated(self.device))

    def reset_peak(self) -> None:
        """Resets what `peak_bytes` returns."""
        self._runtime.cuda.reset_peak_memory_stats(self.device)

    def is_lost(self) -> bool:
        """Returns whether the driver has lost the GPU."""
        return self._runtime.nvml.is_lost()

    def flush(self, freed_bytes: int) -> None:  # noqa: ARG002
        """Releases torch's cached GPU memory, and freed main memory."""
        release_freed_memory()
        self._runtime.cuda.empty_cache()

    def batch(
        self, shard: Shard, batch_size: int, seed: int
    ) -> "tuple[torch.Tensor, torch.Tensor]":
        """Returns indices and offsets of a shard's batch, drawn on the GPU."""
        from autoshard.benchmark.machine.device_batches import draw_on

        return draw_on(self.device, shard, batch_size, seed)

    def throttled_seconds(self) -> float:
        """Returns for how long power or heat have lowered the GPU's clock so far."""
        return self._runtime.nvml.limited_seconds()

    def state(self) -> str:
        """Returns clock, power and limits of the GPU now."""
        return self._runtime.nvml.state()

    def stopwatch(
        self, flush: bool = True, references: Sequence[TimedOperator] = ()
    ) -> CudaStopwatch:
        """Returns a stopwatch of the GPU."""
        flush_bytes = self._properties().L2_cache_size * 2 if flush else 0
        return CudaStopwatch(self._runtime, flush_bytes, references, self._own)

    def process_group(self, store: Any, rank: int, ranks: int, timeout: timedelta) -> Any:
        """Returns a process group of NCCL."""
        return self._runtime.process_group(store, rank, ranks, timeout)

    def synchronize(self) -> None:
        """Waits until the GPU is done."""
        self._runtime.cuda.synchronize(self.device)

    def _properties(self) -> Any:
        return self._runtime.cuda.get_device_properties(self.device)
