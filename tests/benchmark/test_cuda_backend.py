"""What the CUDA backend does with a GPU, on one that is simulated: control flow, no kernels."""

import asyncio
import gc
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from simulated_gpu import SimulatedRuntime

from autoshard.benchmark import MeasurementError, MeasureSettings, TimingOptions
from autoshard.benchmark.actor import DeviceBenchmark
from autoshard.benchmark.backends import backend_of, best_backend, fingerprint_here
from autoshard.benchmark.backends.base import Place, TimedOperator
from autoshard.benchmark.backends.cuda import CudaBackend, CudaRuntime
from autoshard.benchmark.backends.nvml import NvmlReadings
from autoshard.benchmark.machine.device_lock import DeviceBusy
from autoshard.benchmark.machine.hardware import DeviceInfo, NodeReport, cpu_fingerprint
from autoshard.benchmark.measurement import ExchangeKey, ExchangePart, Order, ReferenceLevel
from autoshard.benchmark.operator.exchange import ExchangeRanks
from autoshard.benchmark.pool.exchanges import measure_exchange
from autoshard.benchmark.pool.fleet import Fleet, PoolDevice
from autoshard.benchmark.rehearsals.trace import FORWARD
from autoshard.workload import EmbeddingTable, Shard, UserError, table_lookups

# Bits of NVML's header, by pynvml's names.
REASONS = {
    "SwPowerCap": 0x4,
    "HwSlowdown": 0x8,
    "SwThermalSlowdown": 0x20,
    "HwThermalSlowdown": 0x40,
    "HwPowerBrakeSlowdown": 0x80,
}
PLACE = Place("cuda", "n0", 1, "n0", "gpu1@m0")
FINGERPRINT = "cuda: NVIDIA H100 80GB HBM3 sm90, 79 GiB"


def backend(**options: Any) -> tuple[CudaBackend, SimulatedRuntime]:
    runtime = SimulatedRuntime(**options)
    return CudaBackend(runtime), runtime  # type: ignore[arg-type]


def test_places_are_the_gpus_that_nodes_declare_and_are_auto_s_first_choice() -> None:
    nodes = {"n0": {"Resources": {"GPU": 2.0}}, "n1": {"Resources": {"CPU": 8.0}}}
    reports = [NodeReport(name, "m0", "machine", (0, 1), 100, "hw") for name in nodes]
    found = CudaBackend().places(nodes, reports, [])
    assert found == [Place("cuda", "n0", n, "n0", f"gpu{n}@m0") for n in (0, 1)]
    assert CudaBackend().places(nodes, reports, found[:1]) == found[1:]
    # A core of that number is another device.
    (core, *_) = backend_of("cpu").places(nodes, reports, found)
    assert (core.number, core.kind) == (0, "cpu")
    assert best_backend(nodes.values()).kind == "cuda"
    assert best_backend([nodes["n1"]]).kind == best_backend([]).kind == "cpu"


def test_an_actor_holds_a_gpu_or_no_more_than_a_pinned_core() -> None:
    for kind, gpus in (("cuda", 1), ("cpu", 0)):
        node = "ab" * 28  # as long as Ray's own
        options = backend_of(kind).ray_options(replace(PLACE, node_id=node))
        strategy = options.pop("scheduling_strategy")
        assert (strategy.node_id, strategy.soft) == (node, False)
        assert options == {"num_cpus": 0, "num_gpus": gpus}


def test_bound_to_a_gpu_it_reports_what_the_gpu_reports() -> None:
    gpu, runtime = backend()
    gpu.bind(PLACE)
    assert runtime.calls == ["set_device"]
    assert gpu.fingerprint() == FINGERPRINT
    assert (gpu.memory_bytes, gpu.free_bytes(), gpu.peak_bytes()) == (85_028_765_696, 2**36, 7)
    gpu.flush(1)
    assert runtime.calls[1:] == ["empty_cache"]
    assert gpu.name_of(PLACE) == "gpu-00000001@m0"
    with (
        gpu.claim("one cluster"),
        pytest.raises(DeviceBusy, match="is held by one cluster"),
        gpu.claim("another cluster of this machine", patience_s=0),
    ):
        pass


def test_a_gpu_that_cannot_be_used_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    t4, runtime = backend(capability=(7, 5))
    with pytest.raises(UserError, match=r"fbgemm-gpu has no code for NVIDIA .* \(sm_75\)"):
        t4.bind(PLACE)
    assert runtime.calls == []
    for capability, fits in (((8, 0), True), ((8, 9), True), ((10, 0), True), ((12, 0), False)):
        assert (backend(capability=capability)[0].problem() is None) == fits
    gpu, runtime = backend()
    monkeypatch.setattr(runtime.cuda, "is_available", lambda: False)
    assert "its build for CUDA 13.0 needs driver 580 or newer" in str(gpu.problem())
    monkeypatch.setattr(runtime, "build", None)
    with pytest.raises(UserError, match="torch is a build for CPUs: install autoshard with EXTRA"):
        gpu.bind(PLACE)


def test_in_a_container_it_does_not_take_itself_for_another() -> None:
    """NVML has the numbers of the host there."""
    for others, load in ((frozenset(), 0.0), (frozenset({4}), 1.0)):
        gpu, _ = backend(others=others, own=31_337)
        gpu.bind(PLACE)
        assert gpu.stopwatch().foreign_load() == load


def test_a_model_of_gpus_is_compared_with_the_gpu_that_is_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not CudaBackend().is_here():
        assert fingerprint_here(FINGERPRINT) == cpu_fingerprint()
    monkeypatch.setattr(CudaBackend.__init__, "__defaults__", (SimulatedRuntime(),))
    assert fingerprint_here("cuda: another") == FINGERPRINT
    assert fingerprint_here("cpu: another") == fingerprint_here("abacus") == cpu_fingerprint()


def test_its_stopwatch_waits_reads_events_and_looks_for_others() -> None:
    gpu, runtime = backend(pace_ms=(100.0, 2.0, 3.0, 2.0, 5.0), others=frozenset({1}))
    watch = gpu.stopwatch()
    weight = torch.ones(4, requires_grad=True)
    found = watch.iteration(TimedOperator(lambda: weight * 2, torch.ones(4)))
    assert (found.forward_ms, found.backward_ms, found.wall_ms) == (3.0, 5.0, 8.0)
    assert weight.grad is not None
    assert runtime.calls == ["wait", "event"]
    assert watch.reference() is None
    assert watch.foreign_load() == 1.0
    assert backend()[0].stopwatch().foreign_load() == 0.0


def test_marks_of_phases_are_distinguished() -> None:
    gpu, runtime = backend(pace_ms=(1.0, 2.0, 4.0))
    watch = gpu.stopwatch(flush=False)
    marks = [watch.mark() for _ in range(3)]
    assert runtime.calls == []  # nothing waits before all is done
    assert watch.between(marks) == [(2.0, 2.0), (4.0, 4.0)]


def test_steps_of_training_are_launched_without_waiting() -> None:
    from autoshard.integration.rehearsal.phases import Phases

    gpu, runtime = backend()
    phases = Phases(gpu.stopwatch(flush=False))
    steps = []
    for _ in range(3):
        phases.start()
        phases.begin(FORWARD)
        steps.append(phases.stop())
    assert runtime.calls == []
    for read in steps:
        assert read().wall_ms == 2.0  # from the first of its three marks to the last
    assert runtime.calls == ["event"] * 3


@pytest.fixture
def freezing() -> Iterator[None]:
    """A benchmark freezes what is there for good: here only for a test."""
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("freezing")
def test_a_shard_is_measured_or_refused_for_want_of_memory() -> None:
    small = Shard.of_tables([EmbeddingTable("small", 100, 16, 4.0)])
    large = Shard.of_tables([EmbeddingTable("large", 100_000, 64, 4.0)])
    settings, quick = MeasureSettings(32), TimingOptions(precision=0.2, max_iterations=9)
    gpu, runtime = backend(pace_ms=(9.0, 1.0, 2.0, 1.0, 3.0), free_bytes=2**20, limited_s=3600.0)
    benchmark = DeviceBenchmark(gpu, PLACE)
    info, _ = benchmark.describe()
    assert info == DeviceInfo(
        "gpu-00000001@m0", "cuda", socket.gethostname(), FINGERPRINT, 85_028_765_696
    )
    wide = Shard.of_tables([EmbeddingTable("wide", 8, 2052, 1.0)])
    measured, refused, too_wide = benchmark.measure(
        [Order(shard, settings, quick) for shard in (small, large, wide)]
    )
    assert measured.timing is not None
    assert (measured.timing.forward_ms, measured.timing.backward_ms) == (2.0, 3.0)
    assert measured.timing.reference_level == ReferenceLevel(2.0, 3.0)
    assert measured.hardware == FINGERPRINT
    assert refused.status == "refused"
    assert "gpu-00000001@m0 has 1,048,576" in refused.reason
    assert too_wide.reason == "fbgemm takes at most 2,048 columns of a table on this device"
    assert runtime.calls.count("empty_cache") == 3  # no two fit together
    assert benchmark.peak_bytes() == 7
    # Whenever it is asked, power or heat have slowed it for an hour more.
    assert (measured.throttled, measured.device_state) == (1.0, "1755 MHz, 412 W, power cap")
    fleet = Quiet()
    fleet.add(PoolDevice(PLACE, None, *benchmark.describe()))
    fleet.observe(fleet.devices[0], measured)
    (line,) = fleet.notices()
    assert line == (
        "gpu-00000001@m0 is slowed down for 20% of the time by its limit of power or heat: cool "
        "it, or lock its clocks with nvidia-smi -lgc"
    )


class Quiet(Fleet):
    async def grow(self) -> None:
        """Has all of its devices."""


def test_nvml_is_asked_for_what_limits_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def init() -> None:
        asked.append("init")

    def time_of(gpu: str, policy: int) -> SimpleNamespace:
        return SimpleNamespace(referenceTime=0, violationTime=(policy + 1) * 10**9)

    def handle(uuid: str) -> str:
        if uuid != "GPU-1a2b":
            raise NvmlError(6)  # not found
        if lost:
            raise lost[0]
        return "the GPU"

    def memory(gpu: str) -> None:
        if faults:
            raise faults[0]

    faults: list[NvmlError] = []
    lost: list[NvmlError] = []
    fake = SimpleNamespace(
        nvmlInit=init,
        nvmlDeviceGetHandleByUUID=handle,
        NVML_CLOCK_SM=1,
        nvmlDeviceGetClockInfo=lambda gpu, kind: 1755,
        nvmlDeviceGetPowerUsage=lambda gpu: 411_600,
        nvmlDeviceGetCurrentClocksEventReasons=lambda gpu: 0x24,
        **{f"nvmlClocksEventReason{name}": bit for name, bit in REASONS.items()},
        NVML_PERF_POLICY_POWER=0,
        NVML_PERF_POLICY_THERMAL=1,
        nvmlDeviceGetViolationStatus=time_of,
        nvmlDeviceGetComputeRunningProcesses=lambda gpu: [SimpleNamespace(pid=7)],
        NVMLError=NvmlError,
        NVML_ERROR_GPU_IS_LOST=15,
        nvmlDeviceGetMemoryInfo=memory,
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    assert NvmlReadings("1a2b").state() == "1755 MHz, 412 W, power cap, heat"
    assert NvmlReadings("1a2b").limited_seconds() == pytest.approx(3.0)
    assert NvmlReadings("1a2b").processes() == {7}
    assert (NvmlReadings("other").state(), NvmlReadings("other").limited_seconds()) == ("", 0.0)
    assert asked
    assert [NvmlReadings("1a2b").is_lost(), NvmlReadings("other").is_lost()] == [False, False]
    faults.append(NvmlError(999))  # unknown to the driver
    assert not NvmlReadings("1a2b").is_lost()
    faults[0] = NvmlError(15)
    assert NvmlReadings("1a2b").is_lost()
    faults.clear()
    lost.append(NvmlError(15))  # the driver says so as soon as it is asked for the GPU
    assert NvmlReadings("1a2b").is_lost()


class NvmlError(Exception):
    def __init__(self, value: int) -> None:
        self.value = value


def test_ranks_meet_through_what_the_runtime_has() -> None:
    assert CudaRuntime.collectives == CudaBackend().collectives == "nccl"
    gpu, runtime = backend()
    assert gpu.collectives == "gloo"
    meeting = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    part = ExchangePart(ExchangeKey((8, 24), 64, 1), (0, 1), "127.0.0.1", meeting.port, "x", 2)
    ranks = ExchangeRanks(part, gpu)
    first, second = ranks.run()
    assert [len(first.forward_ms), len(second.backward_ms)] == [2, 2]
    passes = 2 * 2 * (2 + 3)  # 2 ranks, forward and backward, 2 timed passes and 3 that warm up
    assert [runtime.calls.count(each) for each in ("synchronize", "wait", "event")] == [passes] * 3
    assert len(ranks.run()) == 2  # they have met already
    ranks.close()


def test_a_gpu_runs_one_rank() -> None:
    info = DeviceInfo("gpu0@m0", "cuda", "m0", FINGERPRINT, 0)
    device = PoolDevice(PLACE, None, info, "versions")
    with pytest.raises(MeasurementError, match="among 3 GPUs needs as many, the pool has 1: nccl"):
        asyncio.run(measure_exchange(ExchangeKey((8,) * 3, 64, 1), [device], FINGERPRINT, "v"))


def test_a_batch_drawn_on_the_device_has_the_rows_of_any_other(
    tables: tuple[EmbeddingTable, ...],
) -> None:
    """In another order, which the seed gives."""
    gpu, _ = backend()
    some = replace(tables[0], features=3), *tables[1:6], EmbeddingTable("none", 9, 8, 0.0)
    for table in some:
        indices, offsets = gpu.batch(Shard.of_tables([table]), 64, seed=1)
        known, lengths = table_lookups(table, 64, seed=1)
        assert indices.sort().values.tolist() == sorted(known.tolist())
        assert len(offsets) == len(lengths) + 1
        assert offsets.diff().sort().values.tolist() == sorted(lengths.tolist())
    together = Shard.of_tables(some)
    indices, offsets = gpu.batch(together, 64, seed=1)
    again, other = (gpu.batch(together, 64, seed)[0] for seed in (1, 2))
    assert torch.equal(indices, again)
    assert not torch.equal(indices, other)
    assert int(offsets[-1]) == len(indices)
    assert (indices.dtype, offsets.dtype) == (torch.int64, torch.int64)
