"""Tests that need real GPUs; `make gpu-check` runs them and all others that are marked `gpu`."""

import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
from bench.yardstick import compare_with_fbgemm
from conftest import needs_gpu

from autoshard.benchmark import BenchmarkPool, MeasureSettings
from autoshard.benchmark.backends.base import Place
from autoshard.benchmark.backends.cuda import CudaBackend
from autoshard.experiments import shard
from autoshard.experiments.shard import ShardConfig
from autoshard.integration.rehearsal.rank_group import Effort, RankGroup
from autoshard.workload import Device, ShardingPlan, ShardingTask, load_tables, random_shards
from autoshard.workload.data_sheets import DATA_SHEETS, data_sheet_of

pytestmark = [pytest.mark.gpu, needs_gpu]

TABLES = load_tables("synthetic:24:1:small")
SETTINGS = MeasureSettings(8192)


def test_repeats_agree_on_every_gpu(fresh_pool: Callable[..., BenchmarkPool]) -> None:
    pool = fresh_pool(kind="cuda")
    shards = random_shards(TABLES, 40, 8, seed=1)
    first = pool.measure(shards, SETTINGS, repeats=1)
    again = pool.measure(shards, SETTINGS, repeats=2)
    assert all(answer.ok for answer in again), [answer.reason for answer in again]
    for one, both in zip(first, again, strict=True):
        assert both.total_ms == pytest.approx(one.total_ms, rel=0.1)
        assert one.timing is not None
        assert one.timing.disturbed < one.timing.iterations / 2  # launches were ahead


def test_timing_agrees_with_that_of_fbgemm() -> None:
    gpu = CudaBackend()
    gpu.bind(Place("cuda", "", 0, "", "gpu0@here"))
    ratios = compare_with_fbgemm(gpu, gpu.stopwatch(flush=False), batch_size=131_072)
    assert ratios.step == pytest.approx(1, rel=0.05)
    assert ratios.backward == pytest.approx(1, rel=0.05)


def test_a_plan_by_a_data_sheet_holds_once_it_is_calibrated(
    cluster: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = data_sheet_of(CudaBackend().fingerprint())
    (name,) = [name for name, sheet in DATA_SHEETS.items() if sheet == known] or [""]
    if not name:
        pytest.skip("its data sheet is not known")
    config = ShardConfig(
        tables="synthetic:24:1:small", num_devices=2, memory_gb="8", batch_size=8192, hardware=name,
        measure=True, seconds=60, store=tmp_path / "costs.db", out=tmp_path / "plan.json",
    )  # fmt: skip
    shard.main(config)
    said = " ".join(capsys.readouterr().out.split())
    promised = re.search(r"pred/meas ([\d.]+)", said)
    assert promised, said
    assert float(promised[1]) == pytest.approx(1, rel=0.15)


def test_more_columns_take_longer_to_exchange(fresh_pool: Callable[..., BenchmarkPool]) -> None:
    pool = fresh_pool(kind="cuda")
    ranks = len(pool.devices())
    if ranks < 2:
        pytest.skip("takes two GPUs")
    light, heavy = (pool.exchange([columns] * ranks, 8192) for columns in (64, 4096))
    assert max(light.forward_ms) < max(heavy.forward_ms)


def test_a_plan_trains_on_all_gpus(cluster: object) -> None:
    ranks = torch.cuda.device_count()
    task = ShardingTask(TABLES, Device.uniform(ranks, 2**40), 1024 * ranks)
    plan = ShardingPlan.table_wise(task, [number % ranks for number in range(len(TABLES))])
    with closing(RankGroup(ranks, "cuda")) as group:
        found = group.train_interleaved(task, {"": plan}, Effort(2))[""]
    assert not found.in_turns
    assert found.losses[-1] < found.losses[0]
    for step, wall_ms in zip(found.composed, found.round_ms, strict=True):
        assert step.step_ms / wall_ms == pytest.approx(1, rel=0.2)  # hosts' launches are in both
