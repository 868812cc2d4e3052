"""Models in which tables have hot rows: they compute what they did before."""

from collections.abc import Mapping
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType

from autoshard.integration import (
    HotCold,
    from_torchrec,
    load_state,
    tables_of,
    to_torchrec,
    with_hot_rows,
)
from autoshard.integration.plans.row_numbers import RowNumbers
from autoshard.workload import (
    Device,
    Placement,
    PlanError,
    ShardingPlan,
    ShardingTask,
    UserError,
)
from autoshard.workload.ways.option import DATA_PARALLEL, ShardingOption

ROWS = {"user": 90, "item": 60, "shop": 40}
FEATURES = {"user": ["user"], "item": ["clicked", "bought"], "shop": ["shop"]}
HOT = {"user": torch.tensor([80, 3, 11, 5]), "item": torch.arange(20)}


class Model(nn.Module):
    def __init__(
        self,
        weighted: bool = False,
        device: str = "cpu",
        pooling: PoolingType = PoolingType.SUM,
    ) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=name,
                    num_embeddings=rows,
                    embedding_dim=8,
                    feature_names=FEATURES[name],
                    pooling=pooling,
                )
                for name, rows in ROWS.items()
            ],
            is_weighted=weighted,
            device=torch.device(device),
        )

    def forward(self, lookups: KeyedJaggedTensor) -> Mapping[str, torch.Tensor]:
        pooled: Mapping[str, torch.Tensor] = self.bags(lookups).to_dict()
        return pooled


def plan_of(**hot_rows: int) -> ShardingPlan:
    placements = tuple(Placement(f"bags.{name}", 0, 8, n % 2) for n, name in enumerate(ROWS))
    return ShardingPlan(
        placements, 2, {f"bags.{name}": ShardingOption(hot_rows=n) for name, n in hot_rows.items()}
    )


def ids_of(**ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {f"bags.{name}": some for name, some in (HOT | ids).items()}


def lookups(weighted: bool, samples: int = 7) -> KeyedJaggedTensor:
    drawn = torch.Generator().manual_seed(1)
    keys, values, lengths = [], [], []
    for name, features in FEATURES.items():
        for feature in features:
            keys.append(feature)
            lengths.append(torch.randint(0, 6, (samples,), generator=drawn))
            count = int(lengths[-1].sum())
            values.append(torch.randint(0, ROWS[name], (count,), generator=drawn))
    ids = torch.cat(values)
    weights = torch.rand(len(ids), generator=drawn) if weighted else None
    return KeyedJaggedTensor(keys=keys, values=ids, lengths=torch.cat(lengths), weights=weights)


@pytest.mark.parametrize("weighted", [False, True])
def test_outputs_and_gradients_are_those_of_the_model_without(weighted: bool) -> None:
    model = Model(weighted)
    changed = with_hot_rows(deepcopy(model), plan_of(user=3, item=20), ids_of())
    batch = lookups(weighted)
    expected, found = model(batch), changed(batch)
    assert sorted(found) == sorted(expected)
    for feature, values in expected.items():
        torch.testing.assert_close(found[feature], values)
    for outputs in (expected, found):
        sum((values**2).sum() for values in outputs.values()).backward()  # type: ignore[union-attr]
    bags = changed.bags
    assert isinstance(bags, HotCold)
    for table in ("user", "item"):
        hot, cold = (bags.hot_and_cold.embedding_bags[t].weight for t in (f"{table}_hot", table))
        whole = model.bags.embedding_bags[table].weight
        torch.testing.assert_close(bags.joined(table, hot.grad, cold.grad), whole.grad)
        torch.testing.assert_close(bags.joined(table, hot, cold), whole)
        assert all(map(torch.equal, bags.split(table, whole), (hot, cold)))


@pytest.mark.parametrize("hot", [0, 3])
@pytest.mark.parametrize("weighted", [False, True])
def test_hashed_ids_leave_outputs_and_gradients_as_they_are(weighted: bool, hot: int) -> None:
    model, plan = Model(weighted), plan_of(item=0, user=hot)
    changed = with_hot_rows(deepcopy(model), plan, ids_of() if hot else {})
    batch = lookups(weighted)
    apart = changed.bags.inputs(batch)
    assert "hashed ids of bought" in apart.keys()  # noqa: SIM118
    assert changed.bags.inputs(apart) is apart
    expected = model(batch)
    for inputs in (batch, apart):
        found = changed(inputs)
        assert sorted(found) == sorted(expected)
        for feature, values in expected.items():
            torch.testing.assert_close(found[feature], values)
    for outputs in (expected, found):
        sum((values**2).sum() for values in outputs.values()).backward()
    bags, whole = changed.bags, model.bags.embedding_bags["item"].weight
    weight = bags.hot_and_cold.embedding_bags["item"].weight
    none = weight[:0]
    torch.testing.assert_close(bags.joined("item", none, weight.grad), whole.grad)
    assert not torch.equal(weight, whole)
    assert torch.equal(bags.joined("item", none, weight), whole)
    with pytest.raises(
        PlanError, match=r"rows of table bags\.item by a hash of their ids, and the"
    ):
        to_torchrec(plan_of(item=0), Model(device="meta"), 2, "cpu")


def test_a_loader_may_tell_hot_from_cold_before() -> None:
    model = with_hot_rows(Model(), plan_of(user=4), ids_of())
    batch = lookups(weighted=False)
    apart = model.bags.inputs(batch)
    assert set(apart.keys()) == {*batch.keys(), "hot rows of user"}
    # The first ones in the order of use: row 80 is number 0, and so on.
    is_hot = (batch["user"].values()[:, None] == HOT["user"]).nonzero()[:, 1]
    assert apart["hot rows of user"].values().tolist() == is_hot.tolist()
    assert apart["user"].values().max() < ROWS["user"] - 4
    assert model.bags.inputs(apart) is apart
    found, expected = model(apart), model(batch)
    assert all(torch.equal(found[feature], values) for feature, values in expected.items())


def test_cold_rows_of_ids_that_are_sorted_by_use_are_spread_over_even_blocks() -> None:
    numbers = RowNumbers(torch.arange(20), 10_020)
    hot, of_hot, cold = numbers(torch.arange(1_020))  # of the cold ones those that are used most
    assert hot.nonzero()[:, 0].tolist() == of_hot.tolist() == list(range(20))
    in_blocks = torch.bincount(cold // 2_500, minlength=4)
    assert len(set(cold.tolist())) == 1_000
    assert in_blocks.max() <= 1.02 * 250


def test_plans_place_both_parts() -> None:
    model = Model(device="meta")
    apply_optimizer_in_backward(torch.optim.SGD, model.bags.parameters(), {"lr": 0.1})
    before = tables_of(Model(device="meta"), fused_params={})
    plan = plan_of(user=2)
    with pytest.raises(PlanError, match=r"has 2 hot rows of table bags\.user, and the model 0"):
        to_torchrec(plan, model, 2, "cpu")
    changed = with_hot_rows(model, plan, ids_of())
    assert [t.name for t in before.tables] == ["bags.user", "bags.item", "bags.shop"]
    after = tables_of(changed)
    assert [t.name for t in after.tables] == [
        "bags.user",
        "bags.user_hot",
        "bags.item",
        "bags.shop",
    ]
    assert after.operator.optimizer == "sgd"
    (module,) = to_torchrec(plan, changed, 2, "cpu").plan.values()
    assert module["user_hot"].sharding_type == "data_parallel"
    assert module["user"].sharding_type == "table_wise"
    task = ShardingTask(after.tables, Device.uniform(2, 2**30), 8)
    read = from_torchrec(to_torchrec(plan, changed, 2, "cpu"), task)
    assert read.by_table() == plan.by_table()
    assert read.options == {"bags.user_hot": DATA_PARALLEL}
    with pytest.raises(PlanError, match=r"has 3 hot rows of table bags\.user, and the model 2"):
        to_torchrec(plan_of(user=3), changed, 2, "cpu")


def test_a_model_that_is_a_collection_is_replaced() -> None:
    bags = Model().bags
    plan = ShardingPlan(
        tuple(Placement(name, 0, 8, 0) for name in ROWS), 1, {"user": ShardingOption(hot_rows=1)}
    )
    changed = with_hot_rows(bags, plan, HOT)
    assert isinstance(changed, HotCold)
    assert "user_hot" in {table.name for table in tables_of(changed, fused_params={}).tables}


@pytest.mark.parametrize(
    ("hot_rows", "ids", "fault"),
    [
        ({"absent": 2}, {}, r"table bags\.absent, which has hot rows in the plan, is not in"),
        ({"shop": 2}, {}, r"has 2 hot rows of table bags\.shop, and 0 ids are given"),
        ({"user": 5}, {}, r"has 5 hot rows of table bags\.user, and 4 ids are given"),
        ({"user": 2}, {"user": torch.tensor([5, 90])}, r"hot id 90 of table bags\.user is none"),
        ({"user": 2}, {"user": torch.tensor([5, 5])}, r"bags\.user name a row twice"),
    ],
)
def test_wrong_ids_end_in_one_line(
    hot_rows: dict[str, int], ids: dict[str, torch.Tensor], fault: str
) -> None:
    with pytest.raises(UserError, match=fault):
        with_hot_rows(Model(), plan_of(**hot_rows), ids_of(**ids))


def test_other_hot_rows_of_a_checkpoint_are_refused() -> None:
    plan = plan_of(user=3)
    saved = with_hot_rows(Model(), plan, ids_of()).state_dict()
    same = with_hot_rows(Model(), plan, ids_of())
    same.load_state_dict(saved)
    load_state(same, saved)
    torch.testing.assert_close(same.state_dict(), saved)
    other = with_hot_rows(Model(), plan, ids_of(user=torch.tensor([4, 3, 2])))
    with pytest.raises(RuntimeError, match="ids_of_hot_rows: the state has other hot rows"):
        other.load_state_dict(saved)
    with pytest.raises(UserError, match="ids_of_hot_rows: the state has other hot rows"):
        load_state(other, saved)


def test_features_of_others_may_be_called_alike() -> None:
    """A batch also has features of other collections."""
    model, batch = Model(), lookups(weighted=False)
    ones = torch.ones(7, dtype=torch.int64)
    other = KeyedJaggedTensor(keys=["user_hot"], values=torch.arange(7), lengths=ones)
    more = KeyedJaggedTensor.concat([batch, other])
    expected = model(batch)
    found = with_hot_rows(deepcopy(model), plan_of(user=3), ids_of())(more)
    for feature, values in expected.items():
        torch.testing.assert_close(found[feature], values)


def collection(*tables: tuple[str, str]) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=name, num_embeddings=9, embedding_dim=8, feature_names=[feature]
            )
            for name, feature in tables
        ]
    )


@pytest.mark.parametrize(
    ("tables", "count", "fault"),
    [
        ([("item", "f"), ("item_hot", "g")], 1, "would be table item_hot, which there is already"),
        ([("item", "f"), ("shop", "f")], 1, "tables item and shop share feature f"),
        ([("item", "f")], 9, "has 9 hot rows of the 9 of table item"),
        ([("item", "f"), ("shop", "f")], 0, "tables item and shop share feature f"),
    ],
)
def test_tables_that_cannot_have_hot_rows_end_in_one_line(
    tables: list[tuple[str, str]], count: int, fault: str
) -> None:
    plan = ShardingPlan((Placement("item", 0, 8, 0),), 1, {"item": ShardingOption(hot_rows=count)})
    with pytest.raises(UserError, match=fault):
        with_hot_rows(collection(*tables), plan, {"item": torch.arange(9)})


def test_tables_that_pool_by_mean_have_no_hot_rows_but_may_have_hashed_ids() -> None:
    model, batch = Model(pooling=PoolingType.MEAN), lookups(weighted=False)
    found = with_hot_rows(deepcopy(model), plan_of(user=0))(batch)
    torch.testing.assert_close(found["user"], model(batch)["user"])
    with pytest.raises(UserError, match="table user pools by MEAN"):
        with_hot_rows(Model(pooling=PoolingType.MEAN), plan_of(user=2), ids_of())
