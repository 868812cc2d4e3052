"""TorchRec's own planner as a sharder."""

from dataclasses import replace
from typing import Any

import pytest

from autoshard.cost_model import EstimatedCosts, load_model
from autoshard.cost_model.roofline import roofline_model
from autoshard.integration import (
    TorchRecSharder,
)
from autoshard.integration.models.names import topology_of
from autoshard.integration.plans import sharder
from autoshard.sharders import SharderContext, make_sharder
from autoshard.workload import (
    Device,
    EmbeddingTable,
    Link,
    Network,
    Objective,
    OperatorOptions,
    PlanError,
    ShardingTask,
    UserError,
    load_tables,
    synthetic_tables,
)
from autoshard.workload.data_sheets import DATA_SHEETS


def own_task(*memory: int, optimizer: Any = "rowwise_adagrad") -> ShardingTask:
    tables = synthetic_tables(5, seed=3, profile="small")
    weighted = EmbeddingTable("weighted.one", 5000, 12, 4.0, features=2, weighted=True)
    devices = tuple(Device(f"device{n}", size) for n, size in enumerate(memory))
    return ShardingTask((*tables, weighted), devices, 256, OperatorOptions("fp32", optimizer))


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adagrad", "sgd"])
def test_torchrec_plans_whole_tables(optimizer: str) -> None:
    task = own_task(2**30, 2**30, optimizer=optimizer)
    plan = TorchRecSharder().shard(task)
    plan.check(task)
    assert {(p.start, p.width) for p in plan.placements} == {(0, t.dim) for t in task.tables}


def test_torchrec_splits_a_table_that_is_too_large_for_a_device() -> None:
    large = EmbeddingTable("large", 100_000, 128, 30.0)
    task = ShardingTask((large,), Device.uniform(2, 30 * 2**20), 256)
    with pytest.raises(PlanError, match="TorchRec's planner finds no plan that fits"):
        TorchRecSharder().shard(task)
    plan = TorchRecSharder(["column_wise"]).shard(task)
    plan.check(task)
    assert [(p.start, p.width, p.device) for p in plan.placements] in (
        [(0, 64, 0), (64, 64, 1)],
        [(0, 64, 1), (64, 64, 0)],
    )


def test_torchrec_knows_devices_of_different_memory() -> None:
    task = own_task(2**30, 2**22)
    plan = TorchRecSharder().shard(task)
    plan.check(task)
    assert plan.device_bytes(task)[1] <= 2**22


def test_torchrec_knows_how_often_tables_are_looked_up() -> None:
    """Of four equal tables the two that are looked up most are kept apart."""
    tables = tuple(
        EmbeddingTable(name, 1000, 32, lookups)
        for name, lookups in (("a", 50.0), ("b", 50.0), ("c", 1.0), ("d", 1.0))
    )
    task = ShardingTask(tables, Device.uniform(2, 2**30), 512)
    a, b = (p.device for p in TorchRecSharder().shard(task).placements[:2])
    assert a != b


@pytest.mark.parametrize(("link", "alone"), [("1TB/s", False), ("1MB/s", True)])
def test_torchrec_knows_how_fast_the_link_is(link: str, alone: bool) -> None:
    """One table has most columns, the others most lookups: a slow link leaves it alone."""
    tables = (
        EmbeddingTable("wide", 100_000, 128, 1.0),
        EmbeddingTable("a", 100_000, 16, 64.0),
        EmbeddingTable("b", 100_000, 16, 64.0),
    )
    over = Objective("operators", Link.parse(link))
    task = ShardingTask(tables, Device.uniform(2, 2**30), 1024, objective=over)
    homes = {p.table: p.device for p in TorchRecSharder().shard(task).placements}
    assert (homes["a"] == homes["b"]) == alone
    assert not alone or homes["a"] != homes["wide"]


def test_torchrec_knows_the_gpus_of_a_data_sheet() -> None:
    """Its own constants are those of another GPU: 897 GB/s of memory, 600 of NVLink."""
    task, sheet = own_task(*[2**30] * 8), DATA_SHEETS["h100-80gb"]
    found = topology_of(task, "cuda", sheet)
    assert (found.compute_device, found.local_world_size) == ("cuda", 8)
    assert (found.hbm_mem_bw, found.intra_host_bw) == (3350e6, 450e6)  # bytes per ms
    assert found.inter_host_bw == 50e6
    over = replace(task, objective=Objective("operators", Link.parse("25GB/s")))
    assert topology_of(over, "cuda", sheet).intra_host_bw == 25e6
    network = Network(Link.parse("40GB/s"), Link.parse("5GB/s"), 4)
    nodes = replace(own_task(*[2**30] * 8), objective=Objective("step", network))
    found = topology_of(nodes, "cpu")
    assert (found.local_world_size, found.intra_host_bw, found.inter_host_bw) == (4, 40e6, 5e6)
    two_nodes = own_task(*[2**30] * 16)
    assert topology_of(two_nodes, "cuda", sheet).local_world_size == 8


def test_torchrec_gets_the_gpus_that_the_cost_model_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """For two tables its plan may be the same on CPUs, so its arguments are checked."""
    received: list[tuple[Any, ...]] = []

    def noted(task: ShardingTask, *devices: Any) -> Any:
        received.append(devices)
        return topology_of(task, *devices)

    monkeypatch.setattr(sharder, "topology_of", noted)
    task = own_task(2**30, 2**30)
    for sheet in (DATA_SHEETS["h100-80gb"], DATA_SHEETS["a100-40gb"]):
        context = SharderContext(EstimatedCosts(roofline_model(sheet), task.batch_size))
        make_sharder("torchrec", context).shard(task)
        assert received.pop() == ("cuda", sheet)
    assert not received


@pytest.mark.parametrize("weights", ["fp32", "fp16"])
def test_torchrec_knows_that_outputs_are_wide_whatever_weights_are(weights: Any) -> None:
    """Else it takes a's to c's for half as wide, and puts all three together."""
    heavy = EmbeddingTable("heavy", 10, 16, 50.0)
    tables = (heavy, *(EmbeddingTable(name, 10, 128, 1.0) for name in "abc"))
    operator = OperatorOptions(weights, "rowwise_adagrad")
    task = ShardingTask(tables, Device.uniform(2, 2**30), 4096, operator)
    plan = TorchRecSharder().shard(task)
    assert len({p.device for p in plan.placements if p.table != "heavy"}) == 2


@pytest.mark.parametrize(
    ("name", "types"),
    [
        ("torchrec", []),
        ("torchrec_columns", ["column_wise"]),
        ("torchrec_rows_columns", ["column_wise", "row_wise"]),
        ("torchrec_all", ["column_wise", "row_wise", "data_parallel"]),
    ],
)
def test_it_is_a_sharder_by_name(name: str, types: Any) -> None:
    task = own_task(2**30, 2**30)
    assert make_sharder(name).shard(task) == TorchRecSharder(types).shard(task)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (
            "torchrec_wide",
            "sharder 'torchrec_wide': after torchrec_ comes all, or some of columns, rows, nodes",
        ),
        ("torchrec_all_rows", "after torchrec_ comes all, or some of"),
        ("torchrec_rows_rows", "columns, rows, nodes, copies, each once"),
        ("dim_all", "sharder 'dim_all' is not one of round_robin,"),
    ],
)
def test_unknown_words_of_a_name_are_refused(name: str, line: str) -> None:
    with pytest.raises(UserError, match=line):
        make_sharder(name)


def test_it_shards_by_rows_and_copies_where_it_may() -> None:
    small = tuple(EmbeddingTable(f"small{n}", 50 + n, 16, 40.0) for n in range(3))
    large = EmbeddingTable("large", 4_000_000, 64, 60.0)
    task = ShardingTask((large, *small), Device.uniform(4, 2**30), 4096)
    by_rows = TorchRecSharder(["column_wise", "row_wise"])
    rows = by_rows.shard(task)
    assert rows.row_wise["large"] == 4
    assert rows.copied == ()
    criteo = ShardingTask(load_tables("criteo"), Device.uniform(8, 2**34), 4096)
    assert make_sharder("torchrec_all").shard(criteo).copied
    known = SharderContext(EstimatedCosts(load_model("cpu"), 4096))  # operators alone
    assert make_sharder("torchrec_all", known).shard(task) == rows
    uneven = (Device("large", 2**31), *Device.uniform(3, 2**30))  # blocks are even nevertheless
    assert by_rows.shard(replace(task, devices=uneven)).row_wise == rows.row_wise
