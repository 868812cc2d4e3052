import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.sharders import HEURISTICS, SHARDERS, SharderContext, make_sharder
from autoshard.workload import Device, EmbeddingTable, PlanError, Sharder, ShardingTask, UserError

TABLES = (
    EmbeddingTable("a", 100, 64, 1.0),
    EmbeddingTable("b", 10_000, 4, 50.0),
    EmbeddingTable("c", 1_000, 32, 3.0),
    EmbeddingTable("d", 10, 128, 0.5),
)


def devices_of(name: str, memory_bytes: int = 10**9) -> list[int]:
    task = ShardingTask(TABLES, Device.uniform(2, memory_bytes), 64)
    plan = make_sharder(name).shard(task)
    plan.check(task)
    return [placement.device for placement in plan.placements]


def test_placements_by_hand() -> None:
    # dim 64, 4, 32, 128: d | a, c | b
    assert devices_of("dim") == [1, 1, 1, 0]
    # size 6400, 40000, 32000, 1280: b | c, a then d
    assert devices_of("size") == [1, 0, 1, 1]
    # lookup 64, 200, 96, 64: b | c, a, then d on the lighter
    assert devices_of("lookup") == [1, 0, 1, 1]
    # size_lookup 295, 1842, 663, 153
    assert devices_of("size_lookup") == [1, 0, 1, 1]
    assert devices_of("round_robin") == [0, 1, 0, 1]


def test_size_lookup_is_dim_pooling_log_rows() -> None:
    import numpy as np

    cost = HEURISTICS["size_lookup"](TABLES[0], np.random.default_rng(0))
    assert cost == pytest.approx(64 * 1.0 * math.log(101))


@given(
    st.lists(st.tuples(st.integers(1, 10**5), st.integers(1, 32)), min_size=1, max_size=20),
    st.integers(1, 6),
    st.sampled_from(sorted(HEURISTICS)),
    st.integers(0, 3),
)
def test_plans_are_valid_and_repeat(
    shapes: list[tuple[int, int]], count: int, name: str, seed: int
) -> None:
    tables = tuple(EmbeddingTable(f"t{n}", r, 4 * d, 2.0) for n, (r, d) in enumerate(shapes))
    task = ShardingTask(tables, Device.uniform(count, 10**9), 64)
    sharder = make_sharder(name, SharderContext(seed=seed))
    assert isinstance(sharder, Sharder)
    plan = sharder.shard(task)
    plan.check(task)
    assert plan == sharder.shard(task)


def test_devices_without_memory_are_passed_over() -> None:
    loose = ShardingTask(TABLES, Device.uniform(1, 10**9), 64)
    largest = max(map(loose.table_bytes, TABLES))
    for name in HEURISTICS:
        devices_of(name, memory_bytes=int(1.5 * largest))
    with pytest.raises(PlanError, match=r"missing; the largest tables are b \("):
        devices_of("size", memory_bytes=100_000)


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(UserError, match=", ".join(SHARDERS)):
        make_sharder("best")
