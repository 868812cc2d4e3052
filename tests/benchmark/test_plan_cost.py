from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from commands import whole
from rich.console import Console

from autoshard.benchmark import (
    BenchmarkPool,
    DeviceCost,
    MeasurementStore,
    PlanCost,
    export_parquet,
    measure_plan,
    price_plan,
    read_parquet_exchanges,
)
from autoshard.benchmark.measurement import ExchangeKey, MeasuredCollective, MeasurementError
from autoshard.benchmark.operator.exchange import samples_of_ranks
from autoshard.workload import (
    Device,
    EmbeddingTable,
    Link,
    Objective,
    Placement,
    PlanError,
    Shard,
    ShardCost,
    ShardingPlan,
    ShardingTask,
    UserError,
)
from autoshard.workload.plans.step_price import StepPrice
from autoshard.workload.ways.option import ShardingOption

A, B = EmbeddingTable("a", 100, 16, 1.0), EmbeddingTable("b", 100, 8, 1.0)
TASK = ShardingTask((A, B), Device.uniform(3, 10**6), 64)


class ByWidth:
    """An oracle that is easy to check by hand."""

    def costs(self, shards: Sequence[Shard], hardware: Sequence[str] = ()) -> list[ShardCost]:
        return [ShardCost(shard.total_dim, 2 * shard.total_dim, 0.01) for shard in shards]


def test_a_plan_is_priced_by_hand() -> None:
    plan = ShardingPlan(
        (Placement("a", 0, 4, 0), Placement("a", 4, 12, 2), Placement("b", 0, 8, 2)), 3
    )
    cost = price_plan(plan, TASK, ByWidth(), ((1, 1, 2), (0, 0, 3)))
    assert [device.total_ms for device in cost.devices] == [13, 1, 65]
    assert [device.tables for device in cost.devices] == [1, 0, 2]
    assert [device.compute_ms for device in cost.devices] == [12, 0, 60]
    assert cost.step_ms == 60  # 20 forward and 40 backward; nobody knows a link
    assert cost.mean_ms == pytest.approx(72 / 3)
    assert cost.balance == pytest.approx(72 / 3 / 60)
    assert cost.devices[0].memory_bytes == plan.device_bytes(TASK)[0]


def test_a_step_is_what_its_objective_says() -> None:
    """Device 0 is slow forward, device 2 backward and in the all-to-alls."""
    costs = [(9.0, 1.0, 1.0), (2.0, 2.0, 1.0), (3.0, 8.0, 4.0)]
    devices = tuple(DeviceCost("d", 1, 1, f, b, a, a, 0.0) for f, b, a in costs)
    link = Link(1e9)
    for objective, common, step, mean in (
        (Objective("operators", link), 0, 9 + 8 + 4 + 4, (14 + 11 + 6 + 6) / 3),
        (Objective("pipelined", link), 0, 9 + 8 + 4 + 4, (14 + 11 + 6 + 6) / 3),
        (Objective("step"), 5, 9 + 8 + 5, (14 + 11) / 3 + 5),
        (Objective("operators"), 0, 9 + 8, (14 + 11) / 3),
        (Objective("compute"), 0, 11, 25 / 3),
    ):
        cost = PlanCost(devices, objective, common_ms=common)
        assert (cost.step_ms, cost.mean_ms) == pytest.approx((step, mean))
        assert cost.balance == pytest.approx(mean / step)


def test_all_to_alls_go_over_the_link_that_the_task_names() -> None:
    task = replace(TASK, objective=Objective("operators", Link(1e6, 1e-3)))
    plan = ShardingPlan.table_wise(task, [0, 1])
    cost = price_plan(plan, task, ByWidth())
    told = StepPrice.of_task(task).exchange_ms(np.array([16.0, 8.0, 0.0])).tolist()
    assert [d.forward_exchange_ms for d in cost.devices] == told
    assert [d.backward_exchange_ms for d in cost.devices] == told
    assert cost.step_ms == pytest.approx(16 + 32 + 2 * max(told))


def test_a_plan_that_does_not_fit_is_not_priced() -> None:
    with pytest.raises(PlanError):
        price_plan(ShardingPlan((), 3), TASK, ByWidth())


def test_the_report_and_the_picture(tmp_path: Path) -> None:
    cost = PlanCost(
        tuple(DeviceCost(f"d{n}", n, n * 10**6, n, 2 * n, 0.5, 0.25, 0.01) for n in range(3)),
        Objective("operators", Link(25e9)),
        ranks_per_core=2,
    )
    console = Console(width=200, record=True, force_terminal=True)
    console.print(cost.table("greedy"))
    text = " ".join(console.export_text(clear=False).split())
    for part in ("greedy", "d2", "6.75",
                 "a step takes 6.75 ms (operators, all-to-alls over 25 GB/s",
                 "mean 3.75 ms, balance 0.556", "2 ranks on each device"):  # fmt: skip
        assert part in text
    styled = console.export_text(styles=True)
    assert "\x1b[1m2.00" in styled
    assert "\x1b[1m1.00" not in styled
    cost.picture(tmp_path / "plan.png", "greedy")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="cannot be written"):
        cost.picture(tmp_path / "plan.nothing", "greedy")


def test_a_plan_is_measured_with_its_all_to_all(
    make_pool: Callable[..., BenchmarkPool], tables: tuple[EmbeddingTable, ...]
) -> None:
    """More ranks than this machine has cores, one of them without tables, uneven columns."""
    pool = whole(make_pool())
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
    pool = whole(make_pool())
    if len(pool.devices()) < 2:
        pytest.skip("an all-to-all needs two devices")
    light, heavy = pool.exchange([8, 8], 4096), pool.exchange([2048, 2048], 4096)
    assert max(heavy.forward_ms) > 2 * max(light.forward_ms)
    assert max(heavy.backward_ms) > 2 * max(light.backward_ms)
    assert heavy.iterations >= 40


def test_other_collectives_are_kept_beside_all_to_alls(
    make_pool: Callable[..., BenchmarkPool], tmp_path: Path
) -> None:
    pool = whole(make_pool())
    if len(pool.devices()) < 2:
        pytest.skip("a collective needs two devices")
    kinds: tuple[MeasuredCollective, ...] = ("all_to_all", "reduce_scatter", "all_reduce")
    found = [
        pool.exchange([columns] * 2, 512, collective=each)
        for each in kinds
        for columns in (8, 2048)
    ]
    for light, heavy in zip(found[::2], found[1::2], strict=True):
        assert max(heavy.backward_ms) > 2 * max(light.backward_ms)
        assert (max(heavy.forward_ms) == 0) == (heavy.key.collective == "all_reduce")
    pool.close()
    with MeasurementStore(tmp_path / "costs.db") as store:
        assert store.exchanges() == found
        export_parquet(store, tmp_path / "costs.parquet")
    assert read_parquet_exchanges(tmp_path / "costs.parquet") == found
    with pytest.raises(ValueError, match="has as many columns on all ranks"):
        replace(heavy.key, dims=(8, 16))


def test_samples_are_split_as_evenly_as_it_goes() -> None:
    assert samples_of_ranks(ExchangeKey((8, 8, 8), 11, 3)) == [4, 4, 3]
    assert samples_of_ranks(ExchangeKey((8, 8), 1, 2)) == [1, 0]


def test_tables_in_host_memory_are_not_measured() -> None:
    table = EmbeddingTable("a", 1_000, 16, 2.0)
    task = ShardingTask((table,), Device.uniform(1, 2**20), 64)
    plan = replace(
        ShardingPlan.table_wise(task, [0]), options={"a": ShardingOption(cached_rows=100)}
    )
    with pytest.raises(MeasurementError, match="table a is in host memory, and shards are meas"):
        measure_plan(plan, task, cast("BenchmarkPool", None))  # before the pool is asked
