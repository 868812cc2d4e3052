"""Tests that need real GPUs; `make gpu-check` runs them and all others that are marked `gpu`."""

from collections.abc import Callable
from contextlib import closing

import pytest
import torch
from conftest import needs_gpu

from autoshard.benchmark import BenchmarkPool, MeasureSettings
from autoshard.benchmark.rehearsal.rehearsal import Effort, RankGroup
from autoshard.workload import Device, ShardingPlan, ShardingTask, load_tables, random_shards

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


def test_more_columns_take_longer_to_exchange(fresh_pool: Callable[..., BenchmarkPool]) -> None:
    pool = fresh_pool(kind="cuda")
    ranks = len(pool.devices())
    if ranks < 2:
        pytest.skip("takes two GPUs")
    light, heavy = (pool.exchange([columns] * ranks, 8192) for columns in (64, 4096))
    assert max(light.forward_ms) < max(heavy.forward_ms)


def test_a_plan_trains_on_all_gpus(cluster: object) -> None:
    pytest.importorskip("torchrec")
    ranks = torch.cuda.device_count()
    task = ShardingTask(TABLES, Device.uniform(ranks, 2**40), 1024 * ranks)
    plan = ShardingPlan.table_wise(task, [number % ranks for number in range(len(TABLES))])
    with closing(RankGroup(ranks, "cuda")) as group:
        found = group.train_interleaved(task, {"": plan}, Effort(2))[""]
    assert not found.in_turns
    assert found.losses[-1] < found.losses[0]
    for step, wall_ms in zip(found.composed, found.round_ms, strict=True):
        assert step.step_ms / wall_ms == pytest.approx(1, rel=0.2)  # hosts' launches are in both
