"""Pool and rehearsal on GPUs of a Ray cluster that exist in numbers only: kernels run on cores.

What is real: Ray's assignment, actors, the pool, the store, TorchRec over gloo.
"""

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import ray
import simulated_gpu
from commands import backlog, wait_until

from autoshard.benchmark import BenchmarkPool, MeasurementStore, MeasureSettings
from autoshard.benchmark.backends.base import DeviceBackend
from autoshard.benchmark.backends.cpu import CpuBackend
from autoshard.benchmark.backends.cuda import CudaBackend
from autoshard.benchmark.pool import devices
from autoshard.benchmark.pool.fleet import PoolError
from autoshard.benchmark.pool.pool import end_pool
from autoshard.integration.rehearsal import rank_group
from autoshard.integration.rehearsal.rank_group import Effort, RankError, RankGroup
from autoshard.workload import (
    Device,
    EmbeddingTable,
    PlanError,
    Shard,
    ShardingPlan,
    ShardingTask,
    UserError,
    random_shards,
)

GPUS = 2
TABLES = tuple(EmbeddingTable(f"t{number}", 200 + number, 16, 3.0) for number in range(4))
SHARDS = [Shard.of_tables([table]) for table in TABLES]
SETTINGS = MeasureSettings(64)
FREE_BYTES = 2**30


def fake(kind: str) -> DeviceBackend:
    if kind == "cpu":
        return CpuBackend()
    runtime = simulated_gpu.SimulatedRuntime((9.0, 1.0, 2.0, 1.0, 3.0), FREE_BYTES)
    return CudaBackend(runtime)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def gpus(cluster: object) -> Iterator[None]:
    """A node with GPUs, the only one that measures."""
    ray.cloudpickle.register_pickle_by_value(simulated_gpu)
    end_pool()
    node = cluster.add_node(num_cpus=2, num_gpus=GPUS, resources={"benchmark": 1})  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "requested_backend", fake)
        patch.setattr(rank_group, "requested_backend", fake)
        yield
    end_pool()
    cluster.remove_node(node)  # type: ignore[attr-defined]
    ray.cloudpickle.unregister_pickle_by_value(simulated_gpu)


@pytest.fixture
def pool(gpus: None, tmp_path: Path) -> Iterator[BenchmarkPool]:
    """The pool that tests share, whose GPUs are started once; idle again after each of them."""
    found = BenchmarkPool(tmp_path / "costs.db", "cuda")
    yield found
    # Shards of a dropped request that are being measured hold their GPU.
    wait_until("an empty backlog", lambda: backlog(found) == 0)


@pytest.fixture
def no_pool(gpus: None) -> Iterator[None]:
    """For tests that start one of their own, or none."""
    end_pool()
    yield
    end_pool()


def task_of(ranks: int = GPUS) -> ShardingTask:
    return ShardingTask(TABLES, Device.uniform(ranks, 2**40), 64)


def test_a_pool_hands_its_gpus_over_to_a_rehearsal_and_gets_them_back(pool: BenchmarkPool) -> None:
    while len(pool.devices()) < GPUS:
        time.sleep(0.2)
    first = pool.measure(SHARDS[:2], SETTINGS)
    assert {answer.timing.forward_ms for answer in first if answer.timing} == {2.0}
    assert len({answer.device for answer in first}) == GPUS
    assert {device.kind for device in pool.devices()} == {"cuda"}
    task = task_of()
    plans = {"": ShardingPlan.table_wise(task, [0, 1, 0, 1])}
    with closing(RankGroup(GPUS, "cuda")) as ranks:
        assert not ranks.in_turns
        assert [device.memory_bytes for device in ranks.devices()] == [FREE_BYTES] * GPUS
        found = ranks.train_interleaved(task, plans, Effort(2))[""]
        assert len(found.rounds) == 2
        giant = EmbeddingTable("giant", 10**7, 64, 1.0)
        large = ShardingTask((giant,), task.devices, 64)
        with pytest.raises(PlanError, match=r"more than its 1\.000 GiB"):  # which the GPU has
            ranks.prepare("large", large, ShardingPlan.table_wise(large, [0]))
    again = pool.measure(SHARDS, SETTINGS)
    assert [answer.reused for answer in again] == [True, True, False, False]
    pool.close()
    with MeasurementStore(pool.store) as store:
        assert len(store) == len(SHARDS)


def test_a_pool_that_measures_keeps_its_gpus(
    pool: BenchmarkPool, tables: tuple[EmbeddingTable, ...]
) -> None:
    pool.devices()
    many = random_shards(tables, 200, 4, seed=1)
    answers = pool.stream(many, SETTINGS)
    next(answers)
    with pytest.raises(UserError, match=r"pool holds its GPUs \(it measures, and \d+ shards wait"):
        RankGroup(GPUS, "cuda")
    next(answers)  # it goes on
    answers.close()


def test_a_gpu_that_another_cluster_measures_on_is_left_alone(
    pool: BenchmarkPool, tables: tuple[EmbeddingTable, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both clusters of a machine count its GPUs as theirs."""
    while len(pool.devices()) < GPUS:
        time.sleep(0.2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # as Ray tells the other cluster's actor
    shards = random_shards(tables, 8, 4, seed=3)
    with fake("cuda").claim("a pool of another cluster"):
        answers = pool.measure(shards, SETTINGS)
    assert {answer.status for answer in answers} == {"ok"}
    assert len({answer.device for answer in answers}) == GPUS - 1
    assert any("is held by a pool of another cluster" in line for line in pool.notices())


def test_ranks_do_not_wait_for_ever_for_gpus_that_others_hold(
    no_pool: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    @ray.remote(num_cpus=0, num_gpus=1)
    class Trainer:
        def ready(self) -> bool:
            return True

    monkeypatch.setattr(rank_group, "_START_S", 4.0)
    other = Trainer.remote()
    assert ray.get(other.ready.remote())
    with pytest.raises(
        RankError, match=r"[12] of 2 ranks got no GPU within 4 s: 0 are free in the Ray"
    ):
        RankGroup(GPUS, "cuda")
    ray.kill(other)
    with pytest.raises(UserError, match="3 ranks need a GPU each, and the cluster has 2"):
        RankGroup(GPUS + 1, "cuda", in_turns=False)


def test_more_ranks_than_gpus_take_turns_on_one(no_pool: None) -> None:
    """They learn what ranks in turns on cores learn."""
    ranks, batch_size = GPUS + 1, 66
    task = replace(task_of(ranks), batch_size=batch_size)
    plan = ShardingPlan.table_wise(task, [0, 1, 2, 1])
    losses = {}
    for kind in ("cuda", "cpu"):
        with closing(RankGroup(ranks, kind)) as group:  # type: ignore[arg-type]
            assert group.in_turns
            group.prepare("", task, plan)
            found = group.train("", 3)
            losses[kind] = found.losses
            if kind == "cpu":
                assert found.launch_ms == 0
                break
            memory = [device.memory_bytes for device in group.devices()]
            assert memory == [FREE_BYTES // ranks] * ranks
            assert {place.name for place in group.places} == {group.places[0].name}
            (made,) = found.rounds
            assert made.launch_ms > 0
            # Rank 1 may have more than its share, but not all ranks together more than the GPU.
            rows = FREE_BYTES // (ranks * 64 * 4)
            large = tuple(EmbeddingTable(f"large{n}", rows, 64, 1.0) for n in range(ranks))
            wide = replace(task, tables=large)
            with pytest.raises(
                PlanError, match=r"on one GPU, whose ranks have 1,024\.000 MiB together"
            ):
                group.prepare("large", wide, ShardingPlan.table_wise(wide, [0, 1, 1]))
    assert losses["cuda"] == losses["cpu"]


def test_ranks_in_turns_are_not_spread_over_gpus_that_others_use_in_part(no_pool: None) -> None:
    """Ray fills up the GPU with the least room, which here is too little for all ranks."""

    @ray.remote(num_cpus=0, num_gpus=0.6)
    class Trainer:
        def ready(self) -> bool:
            return True

    other = Trainer.remote()
    assert ray.get(other.ready.remote())
    with pytest.raises(
        RankError, match=r"parts of gpu-\w+@.*, gpu-\w+@.*, and ranks in turns need"
    ):
        RankGroup(GPUS + 1, "cuda")
    ray.kill(other)


def test_a_gpu_that_disappears_costs_no_shard(
    no_pool: None,
    tmp_path: Path,
    tables: tuple[EmbeddingTable, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def one_goes(kind: str) -> DeviceBackend:
        runtime = simulated_gpu.SimulatedRuntime(
            (9.0, 1.0, 2.0, 1.0, 3.0), FREE_BYTES, lost_after={"0": 40}
        )
        return CudaBackend(runtime)  # type: ignore[arg-type]

    monkeypatch.setattr(devices, "requested_backend", one_goes)
    pool = BenchmarkPool(tmp_path / "costs.db", "cuda")
    while len(pool.devices()) < GPUS:
        time.sleep(0.2)
    answers = pool.measure(random_shards(tables, 12, 4, seed=2), SETTINGS)
    assert [answer.status for answer in answers] == ["ok"] * 12
    (line,) = [line for line in pool.notices() if "the driver has lost it" in line]
    assert line.endswith("(RuntimeError: CUDA error: unspecified launch failure)")
    assert len(pool.devices()) == GPUS - 1  # for a while it is not tried again


def test_a_gpu_that_cannot_be_used_is_one_line(
    no_pool: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def old(kind: str) -> DeviceBackend:
        return CudaBackend(simulated_gpu.SimulatedRuntime(capability=(7, 5)))  # type: ignore[arg-type]

    monkeypatch.setattr(devices, "requested_backend", old)
    with pytest.raises(PoolError, match=r"gpu\d@.*: .*fbgemm-gpu has no code for NVIDIA") as raised:
        BenchmarkPool(tmp_path / "costs.db", "cuda").devices()
    assert "\n" not in str(raised.value)
