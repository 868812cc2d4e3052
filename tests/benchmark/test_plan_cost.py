from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from rich.console import Console

from autoshard.benchmark import BenchmarkPool, DeviceCost, PlanCost, measure_plan, price_plan
from autoshard.benchmark.exchange import samples_of_ranks
from autoshard.benchmark.measurement import ExchangeKey
from autoshard.workload import (
    Device,
    EmbeddingTable,
    Placement,
    PlanError,
    Shard,
    ShardCost,
    ShardingPlan,
    ShardingTask,
    UserError,
)

A, B = EmbeddingTable("a", 100, 16, 1.0), EmbeddingTable("b", 100, 8, 1.0)
TASK = ShardingTask((A, B), Device.uniform(3, 10**6), 64)


class ByWidth:
    """An oracle that is easy to check by hand."""

    def costs(self, shards: Sequence[Shard]) -> list[ShardCost]:
        return [ShardCost(shard.total_dim, 2 * shard.total_dim, 0.01) for shard in shards]


def test_a_plan_is_priced_by_hand() -> None:
    plan = ShardingPlan(
        (Placement("a", 0, 4, 0), Placement("a", 4, 12, 2), Placement("b", 0, 8, 2)), 3
    )
    cost = price_plan(plan, TASK, ByWidth(), ((1, 1, 2), (0, 0, 3)))
    assert [device.total_ms for device in cost.devices] == [13, 1, 65]
    assert [device.tables for device in cost.devices] == [1, 0, 2]
    assert [device.compute_ms for device in cost.devices] == [12, 0, 60]
    assert cost.max_ms == 65
    assert cost.max_compute_ms == 60
    assert cost.mean_ms == pytest.approx(79 / 3)
    assert cost.balance == pytest.approx(79 / 3 / 65)
    assert cost.devices[0].memory_bytes == plan.device_bytes(TASK)[0]


def test_a_plan_that_does_not_fit_is_not_priced() -> None:
    with pytest.raises(PlanError):
        price_plan(ShardingPlan((), 3), TASK, ByWidth())


def test_the_report_and_the_picture(tmp_path: Path) -> None:
    cost = PlanCost(
        tuple(DeviceCost(f"d{n}", n, n * 10**6, n, 2 * n, 0.5, 0.25, 0.01) for n in range(3)),
        ranks_per_core=2,
    )
    console = Console(width=100, record=True)
    console.print(cost.table("greedy"))
    text = console.export_text()
    for part in ("greedy", "d2", "6.75", "max 6.75 ms", "balance 0.556", "2 ranks on each device"):
        assert part in text
    cost.picture(tmp_path / "plan.png", "greedy")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="cannot be written"):
        cost.picture(tmp_path / "plan.nothing", "greedy")


def test_a_plan_is_measured_with_its_all_to_all(
    make_pool: Callable[..., BenchmarkPool], tables: tuple[EmbeddingTable, ...]
) -> None:
    """More ranks than this machine has cores, one of them without tables, uneven columns."""
    pool = make_pool()
    count = len(pool.devices())
    task = ShardingTask(tables[:6], Device.uniform(count + 2, 2**34), 256)
    plan = ShardingPlan.table_wise(task, [0, 0, 1, 1, 1, 2])
    first = measure_plan(plan, task, pool)
    assert first.ranks_per_core == pytest.approx((count + 2) / count)
    assert all(device.forward_exchange_ms > 0 for device in first.devices)
    assert all(device.backward_exchange_ms > 0 for device in first.devices)
    assert first.devices[-1].compute_ms == 0
    assert first.devices[0].compute_ms > 0
    again = measure_plan(plan, task, pool)  # all of it from the store
    for old, new in zip(first.devices, again.devices, strict=True):
        assert new.phases_ms == pytest.approx(old.phases_ms)
    alone = measure_plan(plan, task, pool, with_exchange=False)
    assert [d.compute_ms for d in alone.devices] == [d.compute_ms for d in again.devices]
    assert all(device.forward_exchange_ms == 0 for device in alone.devices)


def test_more_columns_take_longer_to_exchange(make_pool: Callable[..., BenchmarkPool]) -> None:
    pool = make_pool()
    if len(pool.devices()) < 2:
        pytest.skip("an all-to-all needs two devices")
    light, heavy = pool.exchange([8, 8], 4096), pool.exchange([2048, 2048], 4096)
    assert max(heavy.forward_ms) > 2 * max(light.forward_ms)
    assert max(heavy.backward_ms) > 2 * max(light.backward_ms)
    assert heavy.iterations >= 40


def test_samples_are_split_as_evenly_as_it_goes() -> None:
    assert samples_of_ranks(ExchangeKey((8, 8, 8), 11, 3)) == [4, 4, 3]
    assert samples_of_ranks(ExchangeKey((8, 8), 1, 2)) == [1, 0]
