"""`AutoShardPlanner` in the place of TorchRec's planner."""

import inspect
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from forked_ranks import run_forked
from torch import distributed, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import (
    EmbeddingShardingPlanner,
    ParameterConstraints,
    Topology,
)
from torchrec.distributed.planner.planners import EmbeddingPlannerBase
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import CustomTopologyData, PlannerError
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import BoundsCheckMode, CacheAlgorithm, CacheParams
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.optimizers import in_backward_optimizer_filter

from autoshard.cost_model import hardware
from autoshard.cost_model.hardware import load_quietly
from autoshard.integration import AutoShardPlanner, from_torchrec, load_state, to_torchrec
from autoshard.sharders import SharderContext, make_sharder
from autoshard.workload import (
    Device,
    EmbeddingTable,
    Network,
    Objective,
    OperatorOptions,
    Placement,
    PlanError,
    ShardingPlan,
    ShardingTask,
    UserError,
)
from autoshard.workload.ways.option import DATA_PARALLEL

MODEL = load_quietly("cpu")
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


def ours(
    sharder: Any,
    topology: Topology,
    batch_size: int = 64,
    constraints: dict[str, ParameterConstraints] | None = None,
    **options: Any,
) -> AutoShardPlanner:
    """The planner with the probe of no machine."""
    known = {"cost_model": MODEL} if "hardware" not in options else {}
    return AutoShardPlanner(
        topology, batch_size, constraints=constraints, sharder=sharder, **known, **options
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_given_plan_is_taken(device: str) -> None:
    made = ours(PLAN, topology(device=device), 64).plan(model(), get_default_sharders())
    assert made.plan == to_torchrec(PLAN, model(), device_type=device).plan


def test_copies_of_a_given_plan_are_data_parallel() -> None:
    plan = ShardingPlan(
        tuple(p for p in PLAN.placements if p.table != "bags.a"), 2, {"bags.a": DATA_PARALLEL}
    )
    made = ours(plan, topology(), 64).plan(model(), get_default_sharders())
    assert from_torchrec(made, task_of()) == replace(
        plan, placements=tuple(sorted(plan.placements))
    )
    small = ours(plan, topology(14), 64, storage_reservation=unreserved())
    with pytest.raises(PlannerError, match=r"rank [01] has .* left"):
        small.plan(model(), SHARDERS)


def test_its_report_is_of_our_plan(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="torchrec.distributed.planner.stats"):
        ours(PLAN, topology(), 64).plan(model(), SHARDERS)
    assert re.search(r"bags\.b +CW +fused .* 24 \(20\) +100000 +0-1 ", caplog.text)


def test_its_count_of_storage_decides() -> None:
    """Rank 1 holds 36 columns of 100,000 numbers: 13.7 MiB, and a state for each row of a slice."""
    small = ours(PLAN, topology(14), 64, storage_reservation=unreserved())
    with pytest.raises(
        PlannerError, match=r"^rank 1 has .* left, and columns .* of table bags\."
    ) as e:
        small.plan(model(), SHARDERS)
    assert "\n" not in str(e.value)
    enough = ours(PLAN, topology(16), 64, storage_reservation=unreserved())
    assert from_torchrec(enough.plan(model(), SHARDERS), task_of()).placements == PLAN.placements


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
    planner = ours(asked, topology(), 64, KNOWN, storage_reservation=unreserved())
    made = from_torchrec(planner.plan(model(), SHARDERS), task_of())
    (task,) = asked.tasks
    assert {each.name: {each} for each in task.tables} == tables
    assert (task.batch_size, task.operator) == (128, task_of().operator)
    assert [device.memory_bytes for device in task.devices] == [2**30, 2**30]
    assert made.placements == tuple(sorted(asked.shard(task).placements))
    half = FixedPercentageStorageReservation(0.5)
    ours(asked, topology(device="cuda"), 64, KNOWN, storage_reservation=half).plan(
        model(), SHARDERS
    )
    assert asked.tasks[-1].usable_bytes.tolist() == [2**29, 2**29]


def test_the_optimizer_may_be_the_sharder_s() -> None:
    asked = Asked()
    adagrad = EmbeddingBagCollectionSharder({"optimizer": EmbOptimType.EXACT_ADAGRAD})
    ours(asked, topology(), 64, KNOWN).plan(model(prepared=False), [adagrad])
    assert asked.tasks[0].operator.optimizer == "adagrad"


def test_what_our_plan_does_not_fit_is_said_in_a_line() -> None:
    with pytest.raises(PlanError, match=r"columns 0 to 16 of table bags.a are nowhere"):
        ours(ShardingPlan(PLAN.placements[1:], 2), topology(), 64).plan(model(), SHARDERS)
    with pytest.raises(PlanError, match=r"is on rank 1, and 1 ranks train"):
        ours(PLAN, topology(ranks=1), 64).plan(model(), SHARDERS)


# In TorchRec's place.


def test_it_is_a_planner_of_torchrec_with_the_same_arguments_and_more() -> None:
    theirs, added = (
        list(inspect.signature(each.__init__).parameters.values())
        for each in (EmbeddingShardingPlanner, AutoShardPlanner)
    )
    assert [(p.name, p.default) for p in added[: len(theirs)]] == [
        (p.name, p.default) for p in theirs
    ]
    assert all(p.kind is p.KEYWORD_ONLY for p in added[len(theirs) :])
    assert isinstance(ours("dim", topology()), EmbeddingPlannerBase)


class Mixed(nn.Module):
    """A model of which parts have no price: unpooled, pooled by mean, of half precision."""

    def __init__(self, device: str = "meta") -> None:
        super().__init__()
        torch.manual_seed(3)
        on = torch.device(device)

        def bag(name: str, rows: int, dim: int, **options: Any) -> EmbeddingBagConfig:
            return EmbeddingBagConfig(
                name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[name], **options
            )

        self.bags = EmbeddingBagCollection(
            [bag("a", 400, 16), bag("b", 900, 24), bag("mean", 50, 8, pooling=PoolingType.MEAN)],
            device=on,
        )
        self.other = EmbeddingBagCollection([bag("c", 300, 8), bag("d", 100, 8)], device=on)
        self.halves = EmbeddingBagCollection([bag("h", 64, 8, data_type=DataType.FP16)], device=on)
        seen = EmbeddingConfig(name="seen", num_embeddings=80, embedding_dim=8, feature_names=["s"])
        self.history = EmbeddingCollection([seen], device=on)
        self.top = nn.Linear(16 + 24 + 8 + 8 + 8 + 8 + 8, 1)

    def forward(self, lookups: KeyedJaggedTensor) -> torch.Tensor:
        """Returns a score of each sample."""
        bags, other, halves = self.bags(lookups), self.other(lookups), self.halves(lookups)
        pooled = [bags[n] for n in ("a", "b", "mean")] + [other["c"], other["d"], halves["h"]]
        jagged = self.history(lookups)["s"]
        last = torch.stack([each.sum(0) for each in jagged.to_dense()])
        scores: torch.Tensor = self.top(torch.cat([*pooled, last], dim=1).float())
        return scores.squeeze(1)


def lookups(samples: range, step: int) -> KeyedJaggedTensor:
    drawn = torch.Generator().manual_seed(step)
    rows = {"a": 400, "b": 900, "mean": 50, "c": 300, "d": 100, "h": 64, "s": 80}
    ids = [torch.randint(n, (8, 2), generator=drawn)[list(samples)] for n in rows.values()]
    lengths = torch.full((len(rows) * len(samples),), 2)
    return KeyedJaggedTensor(list(rows), torch.cat([i.flatten() for i in ids]), lengths=lengths)


def trained(learned: nn.Module, optimizer: torch.optim.Optimizer, samples: range) -> list[float]:
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        loss = (learned(lookups(samples, step)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def mixed_losses(rules: dict[str, Any] | None) -> tuple[list[float], list[str], Any]:
    """Losses of a rank of two, notes of the planner, and the plan as text."""
    whole = Mixed("cpu")
    weights = {name: weight.clone() for name, weight in whole.state_dict().items()}
    for collection in (whole.bags, whole.other, whole.halves, whole.history):
        _apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": 0.1})
    planner = AutoShardPlanner(topology(), 4, cost_model=MODEL, rules=rules)
    plan = planner.collective_plan(whole, get_default_sharders())
    sharded = DistributedModelParallel(whole, device=torch.device("cpu"), plan=plan)
    load_state(sharded, weights)
    dense = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    rank = distributed.get_rank()
    sgd = torch.optim.SGD(dense.values(), lr=0.1)
    return trained(sharded, sgd, range(4 * rank, 4 * rank + 4)), planner.notes, str(plan)


@pytest.mark.parametrize("type_of_history", ["table_wise", "row_wise"])
def test_a_model_trains_of_which_parts_have_no_price(type_of_history: str) -> None:
    rules = {"tables": {"history.*": {"ways": [type_of_history]}}}
    (first, notes, plan), (second, none, same) = run_forked(2, mixed_losses, rules)
    whole = Mixed("cpu")
    alone = trained(whole, torch.optim.SGD(whole.parameters(), lr=0.1), range(8))
    both = [(one + two) / 2 for one, two in zip(first, second, strict=True)]
    assert both == pytest.approx(alone, rel=2e-3)  # one table is in half precision
    assert plan == same  # on all ranks, though one of them made it
    assert (type_of_history == "row_wise") == ("row_wise" in plan.partition("history")[2])
    assert not none
    (note,) = [each for each in notes if "TorchRec's planner" in each]
    assert "halves.h: its operator is fp16 with sgd, that of most others fp32 with sgd" in note
    (approximate,) = [each for each in notes if "approximate" in each]
    assert "history.seen: its lookups are not pooled" in approximate
    assert "bags.mean: it pools by mean" in approximate
    assert any("costs are known of fp32 with rowwise_adagrad" in each for each in notes)


def test_columns_of_unpooled_tables_are_planned_by_torchrec() -> None:  # all of one width there
    known = {"seen": ParameterConstraints(sharding_types=["column_wise"])}
    planner = AutoShardPlanner(topology(), 4, cost_model=MODEL, constraints=known)
    assert types_of(planner.plan(Mixed(), get_default_sharders()), "seen", "history") == (
        "column_wise"
    )
    assert any("history.seen: it may be column_wise in fused" in each for each in planner.notes)


def test_tables_of_mean_pooling_are_not_by_rows() -> None:
    """TorchRec then divides the sums of other tables in the collection by lookups, silently."""
    heavy = ParameterConstraints(
        pooling_factors=[900.0], sharding_types=["row_wise", "column_wise", "table_wise"]
    )
    planner = AutoShardPlanner(topology(device="cuda"), 512, constraints={"mean": heavy})
    assert types_of(planner.plan(Mixed(), get_default_sharders()), "mean") != "row_wise"
    by_rows = {"mean": ParameterConstraints(sharding_types=["row_wise"])}
    planner = AutoShardPlanner(topology(device="cuda"), 512, constraints=by_rows)
    with pytest.raises(PlannerError, match=r"^table bags\.mean pools by mean and may be by rows"):
        planner.plan(Mixed(), get_default_sharders())
    every = dict.fromkeys(("a", "b", "mean"), by_rows["mean"])  # then it is right
    planner = AutoShardPlanner(topology(device="cuda"), 512, constraints=every)
    assert types_of(planner.plan(Mixed(), get_default_sharders()), "mean") == "row_wise"
    in_grid = {"mean": ParameterConstraints(sharding_types=["grid_shard"])}
    planner = AutoShardPlanner(topology(device="cuda"), 512, constraints=in_grid)
    with pytest.raises(PlannerError, match="in a grid alone"):
        planner.plan(Mixed(), get_default_sharders())


def types_of(made: Any, table: str = "a", path: str = "bags") -> str:
    return str(made.plan[path][table].sharding_type)


@pytest.mark.parametrize(
    "allowed",
    [
        ["table_wise"], ["column_wise"], ["row_wise"], ["table_row_wise"], ["data_parallel"],
        ["grid_shard"], ["table_column_wise"], ["table_wise", "row_wise"],
        ["table_wise", "table_row_wise"], ["row_wise", "table_row_wise"],
        ["column_wise", "data_parallel"],
    ],
)  # fmt: skip
def test_sharding_types_of_constraints_are_kept(allowed: list[str]) -> None:
    eight = Topology(
        8, "cuda", hbm_cap=2**24, ddr_cap=2**30, local_world_size=4, created_by_factory=True
    )
    limits = {name: ParameterConstraints(sharding_types=allowed) for name in "abc"}
    planner = ours(
        "autoshard", eight, 64, limits, storage_reservation=unreserved(), hardware="h100-80gb"
    )
    if allowed == ["data_parallel"]:  # a GPU has no memory for them
        with pytest.raises(PlannerError):
            planner.plan(model(), SHARDERS)
        return
    made = planner.plan(model(), SHARDERS)
    assert {types_of(made, name) for name in "abc"} <= set(allowed)
    by_us = planner.sharding_plan is not None
    assert by_us == bool({"table_wise", "column_wise", "row_wise"} & set(allowed))


def test_other_fields_of_constraints_count() -> None:
    limits = {
        "a": ParameterConstraints(pooling_factors=[7.0], is_weighted=True),
        "b": ParameterConstraints(
            pooling_factors=[2.0, 3.0], num_poolings=[1.0, 2.0], batch_sizes=[64, 32]
        ),
        "c": ParameterConstraints(
            compute_kernels=["fused"], min_partition=6, stochastic_rounding=True,
            output_dtype=DataType.FP16,
        ),
    }  # fmt: skip
    planner = ours("autoshard", topology(), 64, limits)
    made = planner.plan(model(), SHARDERS)
    assert planner.task is not None
    a, b, c = planner.task.tables
    assert (a.pooling_factor, a.weighted, a.features) == (7.0, True, 1)
    assert (b.pooling_factor, b.features) == (2.0 + 3.0 * 2 / 2, 2)
    assert c.pooling_factor == 1.0
    rules = {r.kind: r.numbers for r in planner.task.rules if "bags.c" in r.tables}
    assert rules == {"not_copied": (), "min_width": (8,)}  # copies are in another kernel
    assert made.plan["bags"]["c"].stochastic_rounding is True
    assert made.plan["bags"]["c"].output_dtype is DataType.FP16
    cached = {"a": ParameterConstraints(compute_kernels=["fused_uvm"])}
    planner = ours("autoshard", topology(device="cuda"), 64, cached, hardware="h100-80gb")
    made = planner.plan(model(), SHARDERS)
    assert made.plan["bags"]["a"].compute_kernel == "fused_uvm"
    assert "bags.a: it may be" in " ".join(planner.notes)
    assert "fused_uvm alone" in " ".join(planner.notes)


def test_a_step_of_training_is_planned_with_copies_of_small_tables() -> None:
    small = nn.ModuleDict(
        {
            "bags": EmbeddingBagCollection(
                [
                    EmbeddingBagConfig(
                        name=f"t{n}", num_embeddings=rows, embedding_dim=16, feature_names=[f"f{n}"]
                    )
                    for n, rows in enumerate([8] * 12 + [50_000] * 4)
                ],
                device=torch.device("meta"),
            )
        }
    )
    planner = ours("autoshard", topology(4096, 4), 1024)
    made = planner.plan(small, SHARDERS)
    assert planner.task is not None
    assert planner.task.objective.name == "step"
    assert types_of(made, "t0") == "data_parallel"
    assert planner.sharding_plan is not None
    assert "bags.t0" in planner.sharding_plan.copied
    assert any("the optimizer of the dense layers must train them" in n for n in planner.notes)
    assert any("no optimizer is named for 16 of 16 tables" in note for note in planner.notes)
    assert planner.task.operator == OperatorOptions()


def test_the_network_is_that_of_the_topology() -> None:
    def objective(**options: Any) -> Objective:
        on = Topology(8, created_by_factory=True, hbm_cap=2**32, ddr_cap=2**32, **options)
        known = {} if on.compute_device == "cpu" else {"hardware": "h100-80gb"}
        planner = ours("dim", on, 64, **known)
        planner.plan(model(), SHARDERS)
        assert planner.task is not None
        return planner.task.objective

    cpu = objective(compute_device="cpu")
    assert (cpu.name, cpu.link) == ("step", MODEL.links.get(8))
    sheet = objective(compute_device="cuda", local_world_size=8)
    assert sheet.link is not None
    assert sheet.link.all_to_all(8).bytes_s == 0.75 * 450e9
    given = objective(
        compute_device="cuda", local_world_size=4, intra_host_bw=3e8, inter_host_bw=2e7
    )
    assert isinstance(given.link, Network)
    assert (given.link.inside.bytes_s, given.link.between.bytes_s) == (3e11, 2e10)
    assert given.link.devices_per_node == 4
    assert objective(compute_device="cpu", local_world_size=4, intra_host_bw=1e6).link is not None


def test_memory_is_that_of_each_rank() -> None:
    caps = CustomTopologyData({"ddr_cap": [2**24, 2**30]}, 2)
    uneven = Topology(2, "cpu", custom_topology_data=caps, created_by_factory=True)
    planner = ours("autoshard", uneven, 64, KNOWN, storage_reservation=unreserved())
    planner.plan(model(), SHARDERS)
    assert planner.task is not None
    assert [device.memory_bytes for device in planner.task.devices] == [2**24, 2**30]


def test_where_torchrec_counts_more_than_there_is_a_plan_is_made_with_less() -> None:
    """Its optimizer state of a table is that of the fused params; here it assumes more."""
    mega_bytes = 12
    planner = ours("size", topology(mega_bytes), 64, KNOWN, storage_reservation=unreserved())
    made = planner.plan(model(), SHARDERS)
    held = [0, 0]
    for option in planner._best_plan or []:
        for shard in option.shards:
            held[shard.rank] += shard.storage.ddr
    assert max(held) <= mega_bytes * 2**20
    assert made.plan["bags"]


def test_tables_without_a_price_go_first_where_memory_is_short() -> None:
    """After the others no rank has room for the unpooled table, which is not split on CPUs."""
    rows = EmbeddingConfig(name="h", num_embeddings=100_000, embedding_dim=24, feature_names=["h"])
    both = nn.ModuleDict(
        {**model(), "history": EmbeddingCollection([rows], device=torch.device("meta"))}
    )
    whole = {"h": ParameterConstraints(sharding_types=["table_wise"])}
    planner = ours("dim", topology(17), 64, KNOWN | whole, storage_reservation=unreserved())
    made = planner.plan(both, get_default_sharders())
    assert types_of(made, "h", "history") == "table_wise"
    assert set(made.plan) == {"bags", "history"}


def test_what_the_dense_kernel_does_not_know_keeps_tables_from_being_copied() -> None:
    small = {
        name: ParameterConstraints(bounds_check_mode=BoundsCheckMode.WARNING) for name in "abc"
    }
    planner = ours("autoshard", topology(), 8, small)
    planner.plan(model(), SHARDERS)
    assert planner.sharding_plan is not None
    assert not planner.sharding_plan.has_copies


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_table_that_may_be_copied_alone_is_copied(device: str) -> None:
    copied = {"a": ParameterConstraints(sharding_types=["data_parallel"])}
    known = {"hardware": "h100-80gb"} if device == "cuda" else {}
    planner = ours("autoshard", topology(device=device), 64, copied, **known)
    made = planner.plan(model(), SHARDERS)
    assert types_of(made, "a") == "data_parallel"
    assert not any("copies have no price" in note for note in planner.notes)


def test_a_table_that_may_be_copied_alone_is_copied_where_operators_count() -> None:
    copied = {"a": ParameterConstraints(sharding_types=["data_parallel"])}
    planner = ours("autoshard", topology(), 64, copied, objective="operators")
    made = planner.plan(model(), SHARDERS)
    assert types_of(made, "a") == "data_parallel"
    assert any("copies have no price" in note for note in planner.notes)


def test_kernels_of_constraints_are_kept_on_cpus() -> None:
    dense = {name: ParameterConstraints(compute_kernels=["dense"]) for name in "abc"}
    made = ours("autoshard", topology(), 64, dense).plan(model(), SHARDERS)
    assert {sharding.compute_kernel for sharding in made.plan["bags"].values()} == {"dense"}


def test_caches_of_constraints_are_kept() -> None:
    cache = CacheParams(load_factor=0.05, algorithm=CacheAlgorithm.LRU)
    limits = {name: ParameterConstraints(cache_params=cache) for name in "abc"}
    small = topology(6, device="cuda")
    planner = ours("autoshard", small, 64, limits, hardware="h100-80gb")
    made = planner.plan(model(), SHARDERS)
    for sharding in made.plan["bags"].values():
        assert sharding.cache_params.load_factor == 0.05
        assert sharding.cache_params.algorithm is CacheAlgorithm.LRU


def test_uneven_blocks_of_rows_are_not_taken_for_tables_without_a_price() -> None:
    """TorchRec looks ids up in blocks of ceil(rows / ranks): others give wrong sums silently."""
    rows = EmbeddingConfig(name="h", num_embeddings=400, embedding_dim=8, feature_names=["h"])
    history = nn.ModuleDict({"history": EmbeddingCollection([rows], device=torch.device("meta"))})
    caps = CustomTopologyData({"ddr_cap": [2**28, 2**30]}, 2)
    uneven = Topology(2, "cpu", custom_topology_data=caps, created_by_factory=True)
    made = ours("autoshard", uneven).plan(history, get_default_sharders())
    for shard in made.plan["history"]["h"].sharding_spec.shards:
        assert shard.shard_sizes[0] in (200, 400)
    by_rows = {"h": ParameterConstraints(sharding_types=["row_wise"])}
    with pytest.raises(
        PlannerError, match=r"table history\.h may be in uneven blocks of rows alone"
    ):
        ours("autoshard", uneven, 64, by_rows).plan(history, get_default_sharders())


def test_a_given_plan_keeps_constraints() -> None:
    whole = {"b": ParameterConstraints(sharding_types=["table_wise"])}
    with pytest.raises(PlanError, match="the plan breaks the constraint"):
        ours(PLAN, topology(), 64, whole).plan(model(), SHARDERS)


def test_planning_leaves_the_random_state_as_it_is() -> None:
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    ours("autoshard", topology(), 64, KNOWN).plan(model(), SHARDERS)
    assert torch.equal(torch.rand(1), expected)


def test_batches_of_an_iterator_serve_several_plans() -> None:
    def batches() -> Iterator[KeyedJaggedTensor]:
        for _ in range(8):
            lengths = torch.ones(4 * 64, dtype=torch.int64)
            yield KeyedJaggedTensor(["a", "b", "d", "c"], torch.arange(4 * 64), lengths=lengths)

    planner = ours("autoshard", topology(), 64, batches=batches())
    first = planner.plan(model(), SHARDERS)
    assert planner.plan(model(), SHARDERS) == first


def test_a_cache_folder_that_cannot_be_written_costs_no_plan(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    planner = AutoShardPlanner(topology(), 64, constraints=KNOWN)
    monkeypatch.setattr(hardware, "_on", lambda model, *_: model)  # no probe
    assert planner.plan(model(), SHARDERS).plan["bags"]
    assert any("cannot be written: a probe is kept in" in note for note in planner.notes)


# What cannot be.


def line_of(call: Callable[[], Any], kind: type[Exception] = UserError) -> str:
    with pytest.raises(kind) as refusal:
        call()
    line = str(refusal.value)
    assert "\n" not in line
    return line


def test_what_is_wrong_is_said_in_a_line() -> None:
    assert "no topology is given, and there is no process group" in line_of(AutoShardPlanner)
    assert "the process group is not initialised" in line_of(
        lambda: ours("dim", topology()).collective_plan(model())
    )
    none = Topology(2, "cuda", hbm_cap=0, created_by_factory=True)
    assert "no rank of the topology has hbm left" in line_of(
        lambda: ours("dim", none, hardware="h100-80gb", storage_reservation=unreserved()).plan(
            model(), SHARDERS
        )
    )
    nothing = {"a": ParameterConstraints(sharding_types=["row_wise"])}
    assert "for a: allow other types or kernels" in line_of(
        lambda: ours("dim", topology(), 64, nothing).plan(model(), SHARDERS), PlannerError
    )
    assert "table bags.a of the plan is not among the 1 tables" in line_of(
        lambda: ours(PLAN, topology()).plan(
            EmbeddingBagCollection(
                [
                    EmbeddingBagConfig(
                        name="c", num_embeddings=9, embedding_dim=8, feature_names=["c"]
                    )
                ],
                device=torch.device("meta"),
            ),
            SHARDERS,
        )
    )
    for options, message in (
        ({"objective": "speed"}, "objective: must be one of step, pipelined"),
        ({"seconds": -1.0}, "seconds: must be more than 0"),
        ({"seconds": "1"}, "seconds: must be more than 0"),
        ({"seed": None}, "seed: must be a whole number from 0 up"),
        ({"hardware": 5}, "hardware: must be a name or a file"),
        ({"hardware": "h1000"}, "hardware h1000 is no file, and none of the GPUs"),
        ({"rules": {"tables": {"x": {"whole": True}}}}, "'x' is no table of this task"),
    ):
        assert message in line_of(
            lambda options=options: ours("autoshard", topology(), 64, KNOWN, **options).plan(
                model(), SHARDERS
            )
        )
    assert "sharder 'best' is not one of" in line_of(lambda: ours("best", topology()))
    assert "sharder: must be the name of one" in line_of(lambda: ours({}, topology()))


def different_models() -> list[str]:
    """Errors on each rank where models differ, and where the plan fails."""
    rank, errors = distributed.get_rank(), list[str]()
    planner = ours("dim", topology(ranks=3))
    errors.append(line_of(lambda: planner.collective_plan(model())))
    planner = ours("dim", topology())
    other = EmbeddingBagConfig(
        name="a", num_embeddings=7 + rank, embedding_dim=8, feature_names=["a"]
    )
    made = EmbeddingBagCollection([other], device=torch.device("meta"))
    errors.append(line_of(lambda: planner.collective_plan(made)))
    wrong = ours(PLAN, topology())
    errors.append(line_of(lambda: wrong.collective_plan(nn.ModuleDict({"x": model()})), PlanError))
    sharded = DistributedModelParallel(
        EmbeddingBagCollection([replace(other, num_embeddings=7)], device=torch.device("cpu")),
        device=torch.device("cpu"),
    )
    errors.append(line_of(lambda: ours("dim", topology()).plan(sharded)))
    return errors


def test_all_ranks_raise_the_same_error_and_none_waits() -> None:
    first, second = run_forked(2, different_models)
    assert first == second
    ranks, shapes, plan, twice = first
    assert ranks.startswith("the topology has 3 ranks, and the process group 2")
    assert "rank 1 has another model than rank 0: embedding_bags.a.weight is [8, 8]" in shapes
    assert "table bags.a of the plan is not among the 3 tables" in plan
    assert "which is sharded: give the model before sharding" in twice


def test_a_report_that_cannot_be_written_costs_no_plan(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    nowhere = tmp_path / "file" / "plan.html"
    planner = ours("autoshard", topology(), 64, KNOWN, report=nowhere)
    assert planner.plan(model(), SHARDERS).plan["bags"]
    assert "the report was not written, the plan is kept" in caplog.text
    planner = ours("autoshard", topology(), 64, KNOWN, report=tmp_path / "plan.html")
    planner.plan(model(), SHARDERS)
    assert "<html" in (tmp_path / "plan.html").read_text()
