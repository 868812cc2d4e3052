import gc
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from machines import CPUS, DOCKER_V1, JOB_V2, server, written
from simulated_gpu import SimulatedRuntime

from autoshard.benchmark import BenchmarkPool, MeasurementStore, ReferenceLevel
from autoshard.benchmark.backends.cpu import CpuBackend
from autoshard.benchmark.backends.cuda import CudaBackend
from autoshard.benchmark.machine.containers import memory_left
from autoshard.benchmark.machine.hardware import (
    CacheReport,
    SystemReport,
    cpu_fingerprint,
    cpu_report,
    free_memory_bytes,
    physical_cores,
)
from autoshard.benchmark.probe import memory as probing_memory
from autoshard.benchmark.probe import probing
from autoshard.benchmark.probe.probing import probe_here, run_probe
from autoshard.benchmark.probe.report import (
    MachineProbe,
    OperatorPrices,
    Passes,
    ProbedShard,
    ProbeError,
    RowTimes,
    UpdateTime,
    WorkingSet,
    load_probe,
    save_probe,
)
from autoshard.benchmark.probe.shards import PROBE_SHARDS
from autoshard.benchmark.store.parquet import export_parquet, import_parquet, read_parquet_probes
from autoshard.cost_model.learning.probed_machine import MIN_PROBE_SHARDS
from autoshard.workload import UserError

MIB = 2**20
PROBE = MachineProbe(
    hardware="cpu: Some CPU 6.1, avx2, 32 MiB cache",
    versions="torch 2",
    source="inferred",
    reference_level=ReferenceLevel(0.5, 4.5),
    system=SystemReport((CacheReport(2, 2 * MIB, 1), CacheReport(3, 32 * MIB, None)), ("avx2",)),
    operator=OperatorPrices(
        start_us=Passes(75.0, 35.0),
        row_ns=Passes(None, 15.0),
        updates=(UpdateTime("adagrad", 16, 46.5), UpdateTime("sgd", 16)),
    ),
    working_sets=(
        WorkingSet(MIB, 50.0, None, (RowTimes(32, Passes(4.0, None)), RowTimes(128))),
        WorkingSet(16 * MIB),
    ),
    shards=(ProbedShard("narrow1", Passes(0.3, None)),),
    seconds=4.5,
    measured_at=7.0,
)


@pytest.fixture(autouse=True)
def unfrozen() -> None:
    gc.unfreeze()


def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """One round over two working sets, which ends by itself."""
    monkeypatch.setattr(probing_memory, "SET_BYTES", (MIB // 2, 4 * MIB))
    monkeypatch.setattr(probing_memory, "_ROUNDS", 1)


# --- probing ------------------------------------------------------------------------------------


def test_a_core_is_probed_in_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    few(monkeypatch)
    before = os.sched_getaffinity(0), torch.get_num_threads()
    found = probe_here(seconds=600.0)
    assert (os.sched_getaffinity(0), torch.get_num_threads()) == before
    assert (found.hardware, found.kind, found.source) == (cpu_fingerprint(), "cpu", "measured")
    assert found.system.kernels == torch.backends.cpu.get_cpu_capability()
    level, start = found.reference_level, found.operator.start_us
    assert level is not None
    assert min(level.forward_ms, level.backward_ms) > 0
    assert None not in (start.forward, start.backward)
    assert [each.size_bytes for each in found.working_sets] == [MIB // 2, 4 * MIB]
    for each in found.working_sets:
        assert each.copy_gb_s is not None
        assert [row.row_bytes for row in each.rows] == list(probing_memory.ROW_BYTES)
    assert found.working_sets[1].rows[-1].ns.backward is not None
    assert {each.name for each in found.shards} == set(PROBE_SHARDS)
    for shard in found.shards:
        assert None not in (shard.ms.forward, shard.ms.backward)
    save_probe(found, tmp_path / "probe.json")
    assert load_probe(tmp_path / "probe.json") == found


@pytest.mark.parametrize("threads", [1, len(physical_cores())])
def test_a_probe_has_the_cores_that_it_asks_for(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many threads this process had, which it has again afterwards."""
    had = list[tuple[int, int]]()

    def looked_at(
        backend: CpuBackend, seconds: float, max_seconds: float | None = None
    ) -> MachineProbe:
        had.append((len(os.sched_getaffinity(0)), torch.get_num_threads()))
        return PROBE

    monkeypatch.setattr(probing, "run_probe", looked_at)
    cpus, before = os.sched_getaffinity(0), torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        probe_here(threads=threads)
        assert (os.sched_getaffinity(0), torch.get_num_threads()) == (cpus, 3)
    finally:
        torch.set_num_threads(before)
    assert had == [(threads, threads)]


def test_shards_of_a_probe_are_small() -> None:
    """Memory that is new to a process takes up to 20 us a page on a virtual machine."""
    shards = [of.shard for of in PROBE_SHARDS.values()]
    pieces = [piece for shard in shards for piece in shard.pieces]
    assert sum(4 * piece.table.rows * piece.width for piece in pieces) < 160 * MIB
    digests = {(of.shard.digest, of.batch_size) for of in PROBE_SHARDS.values()}
    assert len(digests) == len(PROBE_SHARDS)


def test_what_there_was_no_time_for_is_missing() -> None:
    found = probe_here(seconds=1e-6)
    assert replace(found.operator, updates=()) == OperatorPrices()
    assert {update.ns for update in found.operator.updates} == {None}
    # The shards that a model needs to adjust are timed even where it takes longer.
    assert found.reference_level is not None
    assert MIN_PROBE_SHARDS <= len(found.shards) < len(PROBE_SHARDS)
    for shard in found.shards:
        assert None not in (shard.ms.forward, shard.ms.backward)
    assert len(found.working_sets) == len(probing_memory.SET_BYTES)
    for each in found.working_sets:
        assert (each.copy_gb_s, each.latency_ns) == (None, None)
        assert {row.ns for row in each.rows} == {Passes()}
    assert found.system != SystemReport()  # takes no time


def test_time_that_ends_a_round_leaves_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    few(monkeypatch)
    visited: list[int] = []
    visit = probing_memory.MemoryProbe._visit

    def until_second(probe: probing_memory.MemoryProbe, size: int) -> None:
        if visited:
            probe._deadline = 0.0
        visited.append(size)
        visit(probe, size)

    monkeypatch.setattr(probing_memory.MemoryProbe, "_visit", until_second)
    first, second = probe_here(seconds=600.0).working_sets
    assert visited == [first.size_bytes, second.size_bytes]
    assert first.copy_gb_s is not None
    assert (second.copy_gb_s, second.rows[0].ns) == (None, Passes())


@given(st.integers(0, 2**40))
def test_it_takes_at_most_a_quarter_of_the_free_memory(free_bytes: int) -> None:
    try:
        sizes = probing._sizes_that_fit(free_bytes)
    except ProbeError:
        assert free_bytes < 400 * MIB
    else:
        assert 4 * (sizes[-1] + 80 * MIB) <= free_bytes
        assert sizes == list(probing_memory.SET_BYTES[: len(sizes)])


def test_large_sets_are_missing_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    few(monkeypatch)
    free = 4 * (MIB + probing._OWN_BYTES)
    monkeypatch.setattr(CpuBackend, "probe_memory_bytes", lambda backend: free)
    found = probe_here(seconds=600.0)
    first, second = found.working_sets
    assert first.copy_gb_s is not None
    assert second.copy_gb_s is None
    assert found.shards == ()
    monkeypatch.setattr(CpuBackend, "probe_memory_bytes", lambda backend: 100 * MIB)
    with pytest.raises(ProbeError, match=r"needs 386.000 MiB .* there are 100.000 MiB"):
        probe_here()


def test_rows_of_a_pass_are_distinct_and_others_in_each_turn() -> None:
    probe = probing_memory.MemoryProbe.__new__(probing_memory.MemoryProbe)
    probe._order, probe._orders = torch.randperm(probing_memory._ORDER), {}
    for rows, count in ((256, 256), (2**14, 2**12), (2**22, 2**16)):
        passes = [probe._random_rows(rows, count, turn) for turn in range(3)]
        for each in passes:
            assert len(each.unique()) == count
            assert 0 <= int(each.min()) <= int(each.max()) < rows
        if count < rows:
            assert not set(passes[0].tolist()) & set(passes[1].tolist())


def test_a_gpu_is_probed_by_the_same_names(monkeypatch: pytest.MonkeyPatch) -> None:
    few(monkeypatch)
    monkeypatch.setattr(CudaBackend, "probe_bytes", 2**21)
    runtime = SimulatedRuntime(pace_ms=(1.0, 2.0, 3.0, 2.0, 5.0))
    found = run_probe(CudaBackend(runtime), seconds=600.0)  # type: ignore[arg-type]
    assert found.kind == "cuda"
    assert found.reference_level == ReferenceLevel(3.0, 5.0)
    assert found.system == SystemReport((CacheReport(2, 50 * MIB, None),))
    for each in found.working_sets:
        assert each.copy_gb_s is not None
    assert MachineProbe.from_json(found.to_json()) == found


# --- the system's word --------------------------------------------------------------------------


def test_the_system_s_word(tmp_path: Path) -> None:
    assert cpu_report(0, tmp_path) == SystemReport()
    root = written(tmp_path, server(nodes=1, cores=4), {
        "proc/cpuinfo": "processor: 0\nflags: fpu avx2 avx512f sse4_2\ncpu MHz\t\t: 2300.000",
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
        f"{CPUS}/cpu1/cache/index1/level": "2",
    })  # fmt: skip
    caches = (CacheReport(2, 2 * MIB, 2), CacheReport(0, 32 * MIB, 8))
    vectors = ("avx512f", "avx2", "sse4_2")
    assert cpu_report(1, root) == SystemReport(caches, vectors, None, 2300.0, "madvise")
    written(root, {f"{CPUS}/cpu1/cpufreq/cpuinfo_max_freq": "3800000"})
    assert cpu_report(1, root).clock_mhz == 3800.0


def test_free_memory_is_the_machine_s_or_what_the_container_has_left(tmp_path: Path) -> None:
    files = {"proc/meminfo": "MemTotal: 4096 kB\nMemAvailable:   3072 kB"}
    root = written(tmp_path, files, DOCKER_V1)
    assert memory_left(root) is None
    assert free_memory_bytes(root) == 3 * MIB
    group = "sys/fs/cgroup/memory/memory"
    written(root, {f"{group}.limit_in_bytes": str(2 * MIB), f"{group}.usage_in_bytes": str(MIB)})
    assert free_memory_bytes(root) == MIB


def test_of_nested_groups_that_with_least_left_counts(tmp_path: Path) -> None:
    job = "sys/fs/cgroup/jobs.slice"
    root = written(tmp_path, JOB_V2, {
        f"{job}/memory.max": "1000", f"{job}/memory.current": "900",
        f"{job}/job-7.scope/memory.max": "500", f"{job}/job-7.scope/memory.current": "300",
    })  # fmt: skip
    assert memory_left(root) == 100
    assert memory_left(written(root, {f"{job}/memory.current": "1100"})) == 0


# --- files --------------------------------------------------------------------------------------


def test_a_file_keeps_everything_and_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "probe.json"
    save_probe(PROBE, path)
    assert load_probe(path) == load_probe(path, "cpu") == PROBE
    assert json.loads(path.read_text())["operator"]["row_ns"] == {"forward": None, "backward": 15.0}
    bare = MachineProbe("cuda: H100", source="data sheet")
    save_probe(bare, path)
    assert load_probe(path, "cuda") == bare


def test_a_probe_of_another_kind_of_device(tmp_path: Path) -> None:
    save_probe(PROBE, tmp_path / "p.json")
    with pytest.raises(UserError, match=r'p\.json: describes "cpu: Some CPU .* kind cuda is') as no:
        load_probe(tmp_path / "p.json", "cuda")
    assert "\n" not in str(no.value)


def operator_with(**changes: object) -> dict[str, object]:
    return {"operator": PROBE.to_json()["operator"] | changes}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"schema": "autoshard.plan"}, "autoshard.machine_probe"),
        ({"version": 2}, "has version 2"),
        ({"source": "guessed"}, "source is none of measured, inferred, data sheet: 'guessed'"),
        ({"operator": 3}, "wrong kind"),
        ({"operator": {"updates": [], "stop_us": {}}}, "operator has no field 'stop_us'"),
        ({"operator": {"start_us": {"forward": 1}}}, "no field 'backward'"),
        (operator_with(updates=3), "wrong kind"),
        (operator_with(updates=[{"optimizer": "adam"}]), "optimizer is none of"),
        ({"working_sets": [{"size_bytes": 1}]}, "no field 'copy_gb_s'"),
        ({"working_sets": [{"size_bytes": 1, "copy_gb_s": 0}]}, "neither positive nor missing"),
        ({"working_sets": [{"size_bytes": 1, "copy_gb_s": -1.5}]}, "neither positive nor missing"),
        ({"working_sets": [{"size_bytes": 1, "copy_gb_s": "fast"}]}, "neither positive"),
        ({"reference_level": {"forward_ms": 1}}, "no field 'backward_ms'"),
        ({"system": {}}, "no field 'caches'"),
        ({"hardware": None}, "hardware is no text: None"),
    ],
)
def test_a_damaged_file_ends_in_one_line(
    tmp_path: Path, change: dict[str, object], fault: str
) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(PROBE.to_json() | change))
    with pytest.raises(UserError) as error:
        load_probe(path)
    assert str(error.value).startswith(f"{path}: ")
    assert fault in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"3", b"\xff\xfe", b'{"schema": 1}'])
def test_a_file_that_holds_something_else(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(text)
    with pytest.raises(UserError, match=r"p\.json: "):
        load_probe(path)
    with pytest.raises(UserError, match="cannot be read"):
        load_probe(tmp_path / "none.json")


# --- stores and pools ---------------------------------------------------------------------------


def test_a_store_keeps_a_probe_for_each_kind_of_hardware(tmp_path: Path) -> None:
    other = replace(PROBE, hardware="cpu: another")
    with MeasurementStore(tmp_path / "s.db") as store:
        assert store.find_probe(PROBE.hardware) is None
        store.put_probe(PROBE)
        store.put_probe(other)
        store.put_probe(replace(PROBE, seconds=3.0))
    with MeasurementStore(tmp_path / "s.db", must_exist=True) as store:
        assert store.find_probe(PROBE.hardware) == replace(PROBE, seconds=3.0)
        assert store.find_probe(other.hardware) == other
        assert store.find_probe("cpu: a third") is None


def test_probes_travel_with_parquet_files(tmp_path: Path) -> None:
    path = tmp_path / "costs.parquet"
    with MeasurementStore(tmp_path / "a.db") as store:
        store.put_probe(PROBE)
        export_parquet(store, path)
    newer = replace(PROBE, seconds=3.0)
    with MeasurementStore(tmp_path / "b.db") as store:
        import_parquet(store, path)
        assert store.probes() == read_parquet_probes(path) == [PROBE]
        store.put_probe(newer)
        import_parquet(store, path)
        assert store.probes() == [newer]  # its own stays


def test_a_damaged_probe_in_a_parquet_file_ends_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "costs.parquet"
    with MeasurementStore(tmp_path / "a.db") as store:
        export_parquet(store, path)
    table = pq.read_table(path)
    for text in ("{", '[{"schema": 1}]'):
        pq.write_table(
            table.replace_schema_metadata({**table.schema.metadata, b"probes": text}), path
        )
        with pytest.raises(UserError, match=r"costs\.parquet: ") as error:
            read_parquet_probes(path)
        assert "\n" not in str(error.value)


def test_a_pool_probes_hardware_that_is_new_to_its_store(
    fresh_pool: Callable[..., BenchmarkPool], tmp_path: Path
) -> None:
    pool = fresh_pool()
    found = pool.probe(0.5)
    with MeasurementStore(tmp_path / "costs.db") as store:
        assert store.find_probe(cpu_fingerprint()) == found
    assert found is not None
    assert found.versions == pool.make()[1]
    assert pool.probe() == found  # the same
    assert fresh_pool("other.db").probe(0.2) != found
