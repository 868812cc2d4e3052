"""Our plans inside TorchRec's planner, and TorchRec's own plans."""

import logging
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
)
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.optim import RowWiseAdagrad

from autoshard.cost_model import EstimatedCosts, load_model
from autoshard.cost_model.roofline import roofline_model
from autoshard.integration import (
    TorchRecSharder,
    from_torchrec,
    planner,
    to_torchrec,
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
    Placement,
    PlanError,
    ShardingPlan,
    ShardingTask,
    UserError,
    load_tables,
    synthetic_tables,
)
from autoshard.workload.data_sheets import DATA_SHEETS
from autoshard.workload.ways.option import DATA_PARALLEL

SHARDERS: Any = [EmbeddingBagCollectionSharder()]
PLAN = ShardingPlan(
    (
        Placement("bags.a", 0, 16, 1),
        Placement("bags.b", 0, 20, 1),
        Placement("bags.b", 20, 4, 0),
        Placement("bags.c", 0, 8, 0),
    ),
    2,
)
KNOWN = {
    "a": ParameterConstraints(pooling_factors=[2.0]),
    "b": ParameterConstraints(pooling_factors=[1.0, 3.0]),
    "c": ParameterConstraints(pooling_factors=[5.0]),
}


def model(prepared: bool = True) -> nn.Module:
    features = {"a": ["a"], "b": ["b", "d"], "c": ["c"]}
    tables = [
        EmbeddingBagConfig(
            name=name, num_embeddings=100_000, embedding_dim=dim, feature_names=features[name]
        )
        for name, dim in (("a", 16), ("b", 24), ("c", 8))
    ]
    made = nn.ModuleDict({"bags": EmbeddingBagCollection(tables, device=torch.device("meta"))})
    if prepared:
        _apply_optimizer_in_backward(RowWiseAdagrad, made.parameters(), {"lr": 0.1})
    return made


def topology(mega_bytes: int = 1024, ranks: int = 2, device: str = "cpu") -> Topology:
    bytes_each = mega_bytes * 2**20
    return Topology(ranks, device, hbm_cap=bytes_each, ddr_cap=bytes_each, created_by_factory=True)


def unreserved() -> FixedPercentageStorageReservation:
    return FixedPercentageStorageReservation(0.0)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_torchrec_s_planner_gives_our_plan(device: str) -> None:
    made = planner(PLAN, topology(device=device), 64).plan(model(), get_default_sharders())
    assert made.plan == to_torchrec(PLAN, model(), device_type=device).plan


def test_torchrec_s_planner_gives_our_copies() -> None:
    plan = ShardingPlan(
        tuple(p for p in PLAN.placements if p.table != "bags.a"), 2, {"bags.a": DATA_PARALLEL}
    )
    made = planner(plan, topology(), 64).plan(model(), get_default_sharders())
    assert from_torchrec(made, task_of()) == replace(
        plan, placements=tuple(sorted(plan.placements))
    )
    small = planner(plan, topology(14), 64, storage_reservation=unreserved())
    with pytest.raises(PlannerError, match=r"rank [01] has .* left"):
        small.plan(model(), SHARDERS)


def test_its_report_is_of_our_plan(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="torchrec.distributed.planner.stats"):
        planner(PLAN, topology(), 64).plan(model(), SHARDERS)
    assert re.search(r"bags\.b +CW +fused .* 24 \(20\) +100000 +0-1 ", caplog.text)


def test_its_count_of_storage_decides() -> None:
    """Rank 1 holds 36 columns of 100,000 numbers: 13.7 MiB, and a state for each row of a slice."""
    ours = planner(PLAN, topology(14), 64, storage_reservation=unreserved())
    with pytest.raises(PlannerError, match=r"rank 1 has .* left, and columns .* of table bags\."):
        ours.plan(model(), SHARDERS)
    ours = planner(PLAN, topology(16), 64, storage_reservation=unreserved())
    assert from_torchrec(ours.plan(model(), SHARDERS), task_of()).placements == PLAN.placements


def task_of() -> ShardingTask:
    """The task that a sharder gets for the model above."""
    tables = (
        EmbeddingTable("bags.a", 100_000, 16, 2.0),
        EmbeddingTable("bags.b", 100_000, 24, 4.0, features=2),
        EmbeddingTable("bags.c", 100_000, 8, 5.0),
    )
    devices = tuple(Device(f"rank{n}", 2**30) for n in range(2))
    return ShardingTask(tables, devices, 128, OperatorOptions("fp32", "rowwise_adagrad"))


class Asked:
    """A sharder that records its tasks."""

    def __init__(self) -> None:
        self.tasks: list[ShardingTask] = []

    def shard(self, task: ShardingTask) -> ShardingPlan:
        self.tasks.append(task)
        return make_sharder("size_lookup", SharderContext()).shard(task)


def test_a_sharder_plans_within_what_is_not_reserved() -> None:
    tables = {each.name: {each} for each in task_of().tables}
    asked = Asked()
    ours = planner(asked, topology(), 64, KNOWN, storage_reservation=unreserved())
    made = from_torchrec(ours.plan(model(), SHARDERS), task_of())
    (task,) = asked.tasks
    assert {each.name: {each} for each in task.tables} == tables
    assert (task.batch_size, task.operator) == (128, task_of().operator)
    assert [device.memory_bytes for device in task.devices] == [2**30, 2**30]
    assert made.placements == tuple(sorted(asked.shard(task).placements))
    half = FixedPercentageStorageReservation(0.5)
    planner(asked, topology(device="cuda"), 64, KNOWN, storage_reservation=half).plan(
        model(), SHARDERS
    )
    assert asked.tasks[-1].usable_bytes.tolist() == [2**29, 2**29]


def test_the_optimizer_may_be_the_sharder_s() -> None:
    asked = Asked()
    adagrad = EmbeddingBagCollectionSharder({"optimizer": EmbOptimType.EXACT_ADAGRAD})
    planner(asked, topology(), 64, KNOWN).plan(model(prepared=False), [adagrad])
    assert asked.tasks[0].operator.optimizer == "adagrad"


def test_what_our_plan_does_not_fit_is_said_in_a_line() -> None:
    with pytest.raises(PlanError, match=r"columns 0 to 16 of table bags.a are nowhere"):
        planner(ShardingPlan(PLAN.placements[1:], 2), topology(), 64).plan(model(), SHARDERS)
    with pytest.raises(PlanError, match=r"is on rank 1, and 1 ranks train"):
        planner(PLAN, topology(ranks=1), 64).plan(model(), SHARDERS)
    rows = EmbeddingConfig(name="h", num_embeddings=9, embedding_dim=8, feature_names=["h"])
    both = nn.ModuleDict(
        {**model(), "history": EmbeddingCollection([rows], device=torch.device("meta"))}
    )
    with pytest.raises(UserError, match="module history is a EmbeddingCollection"):
        planner(PLAN, topology(), 64).plan(both, get_default_sharders())


# Its own plans.


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
            "sharder 'torchrec_wide': after torchrec_ comes all, or some of columns, rows, copies",
        ),
        ("torchrec_all_rows", "after torchrec_ comes all, or some of"),
        ("torchrec_rows_rows", "columns, rows, copies, each once"),
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
