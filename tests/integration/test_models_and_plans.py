"""TorchRec, both ways: tables of a model come in, plans go out and come back.

What trains by them is held against the unsharded model in tests/experiments.
"""

import itertools
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed import types
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.optim import SGD, Adagrad, Adam, RowWiseAdagrad

from autoshard.integration import (
    from_torchrec,
    tables_of,
    to_torchrec,
    with_even_columns,
)
from autoshard.workload import (
    Device,
    OperatorOptions,
    Placement,
    PlanError,
    ShardingPlan,
    ShardingTask,
    UserError,
)
from autoshard.workload.ways.option import DATA_PARALLEL, ShardingOption

META = torch.device("meta")
REUSE = 17
NONE: list[list[int]] = [[], []]  # two samples without a lookup


def bag(name: str, dim: int = 16, rows: int = 100, **changes: Any) -> EmbeddingBagConfig:
    given = {"feature_names": [name], **changes}
    return EmbeddingBagConfig(name=name, embedding_dim=dim, num_embeddings=rows, **given)


def bags(*tables: EmbeddingBagConfig, weighted: bool = False) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(tables=list(tables), is_weighted=weighted, device=META)


def towers(optimizer: Any = RowWiseAdagrad) -> nn.Module:
    """Two collections, both with a table of clicks."""
    user = bags(bag("clicks"), bag("likes", 24, 50, feature_names=["liked", "shared"]))
    item = bags(bag("clicks", 8, feature_names=["seen"]), weighted=True)
    model = nn.ModuleDict({"user": nn.ModuleDict({"bags": user}), "item": item})
    if optimizer is not None:
        _apply_optimizer_in_backward(optimizer, model.parameters(), {"lr": 0.1})
    return model


def alone(*tables: EmbeddingBagConfig) -> EmbeddingBagCollection:
    """A model that is a collection."""
    collection = bags(*tables)
    _apply_optimizer_in_backward(SGD, collection.parameters(), {"lr": 0.1})
    return collection


def features(samples: int = 2, **rows: list[list[int]]) -> KeyedJaggedTensor:
    """By feature the rows that each sample looks up; other features of towers look up row 0."""
    looked_up = dict.fromkeys(("clicks", "liked", "shared", "seen"), [[0]] * samples) | rows
    lengths = [len(each) for of in looked_up.values() for each in of]
    values = [row for of in looked_up.values() for each in of for row in each]
    return KeyedJaggedTensor(
        list(looked_up), torch.tensor(values, dtype=torch.int64), lengths=torch.tensor(lengths)
    )


# In.


def test_tables_are_named_by_where_their_collection_stands() -> None:
    found = tables_of(towers(), [features()])
    assert [t.name for t in found.tables] == ["user.bags.clicks", "user.bags.likes", "item.clicks"]
    assert [(t.rows, t.dim) for t in found.tables] == [(100, 16), (50, 24), (100, 8)]
    assert [t.features for t in found.tables] == [1, 2, 1]
    assert [t.weighted for t in found.tables] == [False, False, True]
    assert [t.name for t in tables_of(alone(bag("only")), [features(only=[[1], [2]])]).tables] == [
        "only"
    ]


def test_lookups_are_counted_over_all_ranks_of_a_step_and_all_features_of_a_table() -> None:
    step = [
        features(liked=[[1, 1], []], shared=[[2], [3]], seen=NONE),
        SimpleNamespace(sparse_features=features(liked=[[1], [1]], shared=[[2], []], seen=NONE)),
    ]
    clicks, likes, seen = tables_of(towers(), [*step, *step], world_size=2).tables
    assert (clicks.pooling_factor, likes.pooling_factor) == (1, 7 / 4)
    # Row 1 is used four times, row 2 twice, row 3 once: a third each in bins (0,1], (1,2], (2,4].
    assert likes.reuse == pytest.approx((1 / 3, 1 / 3, 1 / 3) + (0,) * (REUSE - 3))
    assert likes.reuse_batch_size == clicks.reuse_batch_size == 4
    assert (seen.pooling_factor, seen.reuse) == (0, None)
    reference_level = dict.fromkeys(("clicks", "liked", "shared", "seen"), NONE)
    assert (
        tables_of(towers(), [features(**reference_level), step[0]], 2).tables[1].pooling_factor == 1
    )
    one_rank = tables_of(towers(), [step[0]]).tables[1]
    assert (one_rank.pooling_factor, one_rank.reuse_batch_size) == (2, 2)


def test_no_more_batches_are_read_than_a_few() -> None:
    read = itertools.count()

    def endless() -> Iterator[KeyedJaggedTensor]:
        while True:
            next(read)
            yield features(clicks=[[1], [2]])

    tables_of(towers(), endless(), world_size=3)
    assert next(read) <= 12


def test_without_batches_the_planner_s_pooling_factors_are_taken() -> None:
    known = {
        "clicks": ParameterConstraints(pooling_factors=[3.0]),
        "likes": ParameterConstraints(pooling_factors=[2.0, 5.0]),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # all is known: there is nothing to be said
        found = tables_of(towers(), constraints=known)
    assert [table.pooling_factor for table in found.tables] == [3, 7, 3]
    assert found.tables[1].reuse is None


def test_what_is_not_known_of_lookups_is_said() -> None:
    with pytest.warns(UserWarning, match="3 of 3 tables.*one lookup per sample and feature"):
        found = tables_of(towers())
    assert [table.pooling_factor for table in found.tables] == [1, 2, 1]
    with pytest.warns(UserWarning, match="of 1 of 3 tables"):
        tables_of(towers(), constraints={"clicks": ParameterConstraints(pooling_factors=[3.0])})


@pytest.mark.parametrize(
    ("optimizer", "named"),
    [
        (RowWiseAdagrad, "rowwise_adagrad"),
        (Adagrad, "adagrad"),
        (torch.optim.Adagrad, "adagrad"),
        (SGD, "sgd"),
        (torch.optim.SGD, "sgd"),
    ],
)
def test_the_optimizer_is_that_which_the_tables_were_prepared_with(
    optimizer: Any, named: str
) -> None:
    assert tables_of(towers(optimizer), [features()]).operator == OperatorOptions("fp32", named)  # type: ignore[arg-type]


def test_tables_that_are_not_prepared_go_by_the_fused_params_of_their_sharder() -> None:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

    def operator(**fused_params: Any) -> OperatorOptions:
        return tables_of(towers(None), [features()], fused_params=fused_params).operator

    assert operator(optimizer=EmbOptimType.EXACT_ADAGRAD).optimizer == "adagrad"
    assert operator(learning_rate=0.1).optimizer == "sgd"  # as fbgemm takes it


def test_weights_in_halves_are_taken_over() -> None:
    halves = bag("a", data_type=DataType.FP16)
    assert tables_of(alone(halves), [features(a=[[1], [2]])]).operator.weights == "fp16"


def tell(model: nn.Module, **options: Any) -> str:
    """The one line that a model is refused with."""
    with pytest.raises(UserError) as refusal:
        tables_of(model, **{"batches": [features()], **options})
    line = str(refusal.value)
    assert "\n" not in line
    return line


def test_what_cannot_be_planned_for_is_refused_in_a_line_that_names_it() -> None:
    rows = EmbeddingConfig(name="a", embedding_dim=8, num_embeddings=9, feature_names=["f"])
    unpooled = nn.ModuleDict({"history": EmbeddingCollection([rows], device=META)})
    fused = FusedEmbeddingBagCollection([bag("a")], torch.optim.SGD, {"lr": 0.1}, device=META)
    assert "Linear has no EmbeddingBagCollection" in tell(nn.Linear(2, 2))
    assert "module history is a EmbeddingCollection: its lookups are not pooled" in tell(unpooled)
    assert "module given is a FusedEmbeddingBagCollection" in tell(fused)
    assert "table a: dim: must be a multiple of 4, got 6" in tell(
        alone(bag("a", 6)), batches=[features(a=[[1], [2]])]
    )
    assert "table a pools by MEAN" in tell(alone(bag("a", pooling=PoolingType.MEAN)))
    assert "table a stores INT8" in tell(alone(bag("a", data_type=DataType.INT8)))
    both = alone(bag("a"), bag("b", data_type=DataType.FP16))
    assert "tables a and b differ, fp32 with sgd and fp16 with sgd" in tell(both)


def test_without_a_named_optimizer_row_wise_adagrad_is_assumed() -> None:
    with pytest.warns(UserWarning, match="no optimizer is named for 3 of 3 tables: row-wise"):
        found = tables_of(towers(None), [features()])
    assert found.operator.optimizer == "rowwise_adagrad"


def test_an_optimizer_whose_costs_are_not_known_is_refused() -> None:
    twice = towers(SGD)
    _apply_optimizer_in_backward(Adagrad, twice.parameters(), {"lr": 0.1})
    assert "user.bags.clicks is trained by adam" in tell(towers(Adam))
    assert "user.bags.clicks has 2 optimizers" in tell(twice)


def test_batches_that_do_not_fit_the_model_are_refused() -> None:
    few = KeyedJaggedTensor(["clicks"], torch.tensor([1]), lengths=torch.tensor([1]))
    too_many = ParameterConstraints(pooling_factors=[1.0, 2.0])
    assert "user.bags.likes: its feature liked is not in the batches, which have clicks" in tell(
        towers(), batches=[few]
    )
    assert "item.clicks: the batches look up row 100 of seen, and it has 100 rows" in tell(
        towers(), batches=[features(seen=[[99], [100]])]
    )
    assert "a step of 2 ranks takes 2 batches" in tell(towers(), world_size=2)
    assert "an item is a dict: give KeyedJaggedTensors" in tell(towers(), batches=[{}])
    assert "2 pooling factors are given for 1 features" in tell(
        towers(), batches=None, constraints={"clicks": too_many}
    )


# Out, and back.

WHOLE = (
    Placement("user.bags.clicks", 0, 16, 1),
    Placement("user.bags.likes", 0, 24, 0),
    Placement("item.clicks", 0, 8, 1),
)


def task_of(model: nn.Module, ranks: int = 4) -> ShardingTask:
    found = tables_of(model, [features()])
    return ShardingTask(found.tables, Device.uniform(ranks, 2**30), 8, found.operator)


def split(*likes: tuple[int, int, int], num_devices: int = 4) -> ShardingPlan:
    """Whole tables, but for the likes: start, width, device."""
    pieces = (Placement("user.bags.likes", *each) for each in likes)
    return ShardingPlan((WHOLE[0], *pieces, WHOLE[2]), num_devices)


def specs(
    plan: types.ShardingPlan, path: str, table: str
) -> list[tuple[list[int], list[int], str]]:
    shards = plan.plan[path][table].sharding_spec.shards
    return [(s.shard_offsets, s.shard_sizes, str(s.placement)) for s in shards]


def test_whole_tables_are_table_wise() -> None:
    out = to_torchrec(ShardingPlan(WHOLE, 2), towers(), device_type="cpu")
    assert set(out.plan) == {"user.bags", "item"}
    likes = out.plan["user.bags"]["likes"]
    assert (likes.sharding_type, likes.compute_kernel, likes.ranks) == ("table_wise", "fused", [0])
    assert specs(out, "user.bags", "likes") == [([0, 0], [50, 24], "rank:0/cpu")]
    assert out.plan["item"]["clicks"].ranks == [1]


def test_slices_may_be_of_any_width_on_ranks_in_any_order() -> None:
    out = to_torchrec(split((12, 4, 0), (0, 12, 3), (16, 8, 2)), towers(), device_type="cuda")
    assert out.plan["user.bags"]["likes"].ranks == [3, 0, 2]
    assert specs(out, "user.bags", "likes") == [
        ([0, 0], [50, 12], "rank:3/cuda:3"),
        ([0, 12], [50, 4], "rank:0/cuda:0"),
        ([0, 16], [50, 8], "rank:2/cuda:2"),
    ]


def test_devices_are_counted_on_each_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    out = to_torchrec(split((0, 12, 3), (12, 12, 2)), towers(), device_type="cuda")
    assert [each[2] for each in specs(out, "user.bags", "likes")] == [
        "rank:3/cuda:1",
        "rank:2/cuda:0",
    ]


def test_beside_a_split_table_whole_ones_are_column_wise_too() -> None:
    """So they share one operator and one all-to-all; a collection without is left as it is."""
    out = to_torchrec(split((0, 12, 0), (12, 12, 1)), towers(), device_type="cpu")
    kinds = {t: s.sharding_type for t, s in out.plan["user.bags"].items()}
    assert kinds == {"clicks": "column_wise", "likes": "column_wise"}
    assert out.plan["item"]["clicks"].sharding_type == "table_wise"


def test_slices_of_a_table_on_one_rank_become_one() -> None:
    out = to_torchrec(split((0, 8, 0), (8, 4, 2), (12, 12, 0)), towers(), device_type="cpu")
    assert out.plan["user.bags"]["likes"].ranks == [0, 2]
    assert [each[:2] for each in specs(out, "user.bags", "likes")] == [
        ([0, 0], [50, 20]),
        ([0, 20], [50, 4]),
    ]
    one = to_torchrec(split((0, 8, 1), (8, 16, 1)), towers(), device_type="cpu")
    assert one.plan["user.bags"]["likes"].sharding_type == "table_wise"


@st.composite
def plans(draw: st.DrawFn) -> ShardingPlan:
    placements = []
    for whole in WHOLE:
        steps = whole.width // 4
        cuts = sorted({0, steps, *draw(st.lists(st.integers(0, steps), max_size=3))})
        for start, end in itertools.pairwise(cuts):
            rank = draw(st.integers(0, 3))
            placements.append(Placement(whole.table, 4 * start, 4 * (end - start), rank))
    return ShardingPlan(tuple(draw(st.permutations(placements))), 4)


MODEL = towers()
TASK = task_of(MODEL)


def held(plan: ShardingPlan) -> Mapping[tuple[str, int], int]:
    """Columns of each table on each rank."""
    widths: dict[tuple[str, int], int] = {}
    for piece in plan.placements:
        widths[piece.table, piece.device] = widths.get((piece.table, piece.device), 0) + piece.width
    return widths


@given(plans())
def test_a_plan_goes_out_and_comes_back(plan: ShardingPlan) -> None:
    back = from_torchrec(to_torchrec(plan, MODEL), TASK)
    back.check(TASK)
    assert held(back) == held(plan)
    assert len(held(back)) == len(back.placements)  # one slice a table and rank
    if len(held(plan)) == len(plan.placements):
        assert back.placements == tuple(sorted(plan.placements))


@given(plans())
def test_columns_can_be_assigned_evenly(plan: ShardingPlan) -> None:
    even = with_even_columns(plan)
    even.check(TASK)
    for table in TASK.tables:
        before = {piece.device for piece in plan.placements if piece.table == table.name}
        pieces = [piece for piece in even.placements if piece.table == table.name]
        assert len({piece.width for piece in pieces}) == 1
        assert {piece.device for piece in pieces} <= before
        if table.dim // 4 % len(before) == 0:
            assert {piece.device for piece in pieces} == before


def test_a_table_stays_where_most_of_it_is_if_not_all_ranks_can_hold_as_much() -> None:
    # Five steps of four columns are for one rank or five.
    tables = tables_of(alone(bag("a", 20)), [features(a=[[1], [2]])]).tables
    uneven = ShardingPlan((Placement("a", 0, 8, 0), Placement("a", 8, 12, 1)), 2)
    even = with_even_columns(uneven)
    even.check_columns(tables)
    assert even.placements == (Placement("a", 0, 20, 1),)


@pytest.mark.parametrize(
    ("plan", "line"),
    [
        (ShardingPlan(WHOLE[:2], 2), "columns 0 to 8 of table item.clicks are nowhere"),
        (
            ShardingPlan((*WHOLE, Placement("clicks", 0, 8, 0)), 2),
            "table clicks of the plan is not among the 3 tables",
        ),
        (split((0, 12, 0), (8, 16, 1)), "columns 8 to 12 of table user.bags.likes are twice"),
        (split((0, 12, 0), (16, 8, 1)), "columns 12 to 16 of table user.bags.likes are nowhere"),
        (split((0, 6, 0), (6, 18, 1)), "multiples of 4, got 0, 6 of table user.bags.likes"),
        (split((0, 32, 0)), "columns 0 to 32 exceed the 24 columns of table user.bags.likes"),
        (split((0, 24, 2)), "table user.bags.likes is on rank 2, and 2 ranks train"),
        (split((0, 24, -1)), "table user.bags.likes is on device -1"),
    ],
)
def test_a_plan_that_does_not_fit_the_model_or_the_ranks_is_refused(
    plan: ShardingPlan, line: str
) -> None:
    with pytest.raises(UserError, match=re.escape(line)):
        to_torchrec(plan, MODEL, world_size=2)


def test_copies_are_data_parallel_and_come_back() -> None:
    plan = ShardingPlan((WHOLE[0], WHOLE[2]), 4, {"user.bags.likes": DATA_PARALLEL})
    out = to_torchrec(plan, MODEL)
    copied = out.plan["user.bags"]["likes"]
    assert (copied.sharding_type, copied.compute_kernel) == ("data_parallel", "dense")
    assert (copied.ranks, copied.sharding_spec) == ([0, 1, 2, 3], None)
    assert from_torchrec(out, TASK) == replace(plan, placements=tuple(sorted(plan.placements)))
    assert with_even_columns(plan).copied == plan.copied
    with pytest.raises(PlanError, match="copies for 4 devices, and 2 ranks train"):
        to_torchrec(plan, MODEL, world_size=2)
    copied.compute_kernel = "fused"
    with pytest.raises(PlanError, match=r"table user.bags.likes has copies in kernel fused"):
        from_torchrec(out, TASK)


def test_rows_are_row_wise_and_come_back() -> None:
    """As TorchRec's own generator places them."""
    plan = ShardingPlan((WHOLE[0], WHOLE[2], Placement("user.bags.likes", 0, 24, 0, 4)), 4)
    out = to_torchrec(plan, MODEL)
    rows = out.plan["user.bags"]["likes"]
    assert (rows.sharding_type, rows.compute_kernel) == ("row_wise", "fused")
    collection = MODEL["user"]["bags"]
    by_torchrec = construct_module_sharding_plan(
        collection,
        {"clicks": table_wise(0), "likes": row_wise()},
        local_size=4,
        world_size=4,
        device_type="cpu",
    )["likes"]
    assert rows.sharding_spec == by_torchrec.sharding_spec
    back = from_torchrec(out, TASK)
    assert back == replace(plan, placements=tuple(sorted(plan.placements)))
    assert with_even_columns(plan) == back
    with pytest.raises(PlanError, match="blocks of rows for 4 devices, and 2 ranks train"):
        to_torchrec(plan, MODEL, world_size=2)
    first, second = rows.sharding_spec.shards[:2]
    first.shard_sizes[0] += 3
    second.shard_offsets[0] += 3
    second.shard_sizes[0] -= 3
    with pytest.raises(
        PlanError, match=r"table user.bags.likes has blocks of rows that are uneven"
    ):
        from_torchrec(out, TASK)


def test_rows_of_a_node_are_table_row_wise_or_a_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    node = ShardingPlan((WHOLE[0], WHOLE[2], Placement("user.bags.likes", 0, 24, 2, 2)), 4)
    grid = ShardingPlan(
        (
            WHOLE[0],
            WHOLE[2],
            Placement("user.bags.likes", 0, 8, 2, 2),
            Placement("user.bags.likes", 8, 16, 0, 2),
        ),
        4,
    )
    for plan, kind, ranks in ((node, "table_row_wise", [2, 3]), (grid, "grid_shard", [2, 3, 0, 1])):
        out = to_torchrec(plan, MODEL)
        rows = out.plan["user.bags"]["likes"]
        assert (rows.sharding_type, rows.ranks) == (kind, ranks)
        assert from_torchrec(out, TASK) == replace(plan, placements=tuple(sorted(plan.placements)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(PlanError, match=r"in 2 blocks of rows: TorchRec shards rows over all 4"):
        to_torchrec(node, MODEL)


def test_what_is_sharded_in_an_unknown_way_does_not_come_back() -> None:
    out = to_torchrec(ShardingPlan(WHOLE, 4), MODEL)
    out.plan["user.bags"]["likes"].sharding_type = "by_magic"
    with pytest.raises(PlanError, match=r"table user.bags.likes is sharded by_magic: .*table_wise"):
        from_torchrec(out, TASK)


def test_what_runs_in_another_kernel_or_is_of_another_model_does_not_come_back() -> None:
    out = to_torchrec(ShardingPlan(WHOLE, 4), MODEL)
    out.plan["item"]["clicks"].compute_kernel = "key_value"
    with pytest.raises(PlanError, match=r"table item.clicks runs in kernel key_value"):
        from_torchrec(out, TASK)
    with pytest.raises(PlanError, match=r"table item.clicks is on rank 1, and the task has 1 dev"):
        from_torchrec(to_torchrec(ShardingPlan(WHOLE, 4), MODEL), task_of(MODEL, ranks=1))
    with pytest.raises(PlanError, match=r"table item.clicks of the plan is not among"):
        from_torchrec(to_torchrec(ShardingPlan(WHOLE, 4), MODEL), task_of(alone(bag("clicks"))))


def test_tables_in_host_memory_get_their_kernels_and_caches_and_come_back() -> None:
    plan = ShardingPlan(
        WHOLE,
        4,
        {
            "item.clicks": ShardingOption(cached_rows=0),
            "user.bags.likes": ShardingOption(cached_rows=25),
        },
    )
    with pytest.raises(PlanError, match=r"keeps table item.clicks in host memory .* GPUs alone"):
        to_torchrec(plan, MODEL, device_type="cpu")
    out = to_torchrec(plan, MODEL, device_type="cuda")
    likes, clicks = out.plan["user.bags"]["likes"], out.plan["item"]["clicks"]
    assert (likes.compute_kernel, clicks.compute_kernel) == ("fused_uvm_caching", "fused_uvm")
    rows = next(table.rows for table in TASK.tables if table.name == "user.bags.likes")
    assert likes.cache_params.load_factor == 25 / rows
    assert clicks.cache_params is None
    others = {p.compute_kernel for m in out.plan.values() for p in m.values()} - {"fused"}
    assert others == {"fused_uvm_caching", "fused_uvm"}
    assert from_torchrec(out, TASK) == replace(plan, placements=tuple(sorted(WHOLE)))
    likes.cache_params = None  # TorchRec's usual cache
    assert from_torchrec(out, TASK).cached_rows["user.bags.likes"] == int(0.2 * rows)
