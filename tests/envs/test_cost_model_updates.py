"""An episode that changes its cost model half way."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from episodes import AMPLE, AtRandom, Sketch, episodes_of, few, greedily, instance, seeds, sketches
from hypothesis import assume, given
from hypothesis import strategies as st

from autoshard.cost_model import CostModel, EstimatedCosts
from autoshard.envs import (
    BatchedPlacementEnv,
    Layout,
    RandomTaskSampler,
    ShardingVectorEnv,
    TableCatalog,
)
from autoshard.workload import EmbeddingTable

CatalogOf = Callable[[CostModel], TableCatalog]
COMPARED = (
    *("sums", "described", "priced", "rest", "rest_ms", "rest_bytes", "free_bytes"),
    *("all_ms", "even_share", "even_split_ms", "lower_bound_ms", "allowed", "homes", "infeasible"),
)


@pytest.fixture(scope="module")
def catalog_of(many_tables: tuple[EmbeddingTable, ...]) -> CatalogOf:
    return lambda model: TableCatalog.of_tables(model, many_tables[:100], 1024)


@pytest.fixture(scope="module")
def disputed(model: CostModel, other_model: CostModel, catalog_of: CatalogOf) -> list[int]:
    """Two tables of which the models do not agree which is the costlier."""
    ours, theirs = catalog_of(model).alone_ms, catalog_of(other_model).alone_ms
    mine, yours = ours / ours[:, None], theirs[:, None] / theirs
    clear = torch.minimum(mine, yours)
    pair = np.unravel_index(int(clear.argmax()), clear.shape)
    assert clear[pair] > 1.02
    return [int(number) for number in pair]


def oracle_of(model: CostModel) -> EstimatedCosts:
    return EstimatedCosts(model, 1024)


def same(first: BatchedPlacementEnv, second: BatchedPlacementEnv, layout: Layout) -> None:
    for name in COMPARED:
        mine, yours = getattr(first, name), getattr(second, name)
        assert torch.allclose(mine.double(), yours.double(), rtol=1e-4, atol=1e-4), name
    seen = layout.observe(first), layout.observe(second)
    torch.testing.assert_close(*seen, rtol=1e-3, atol=1e-3, equal_nan=True)


@few
@given(
    dealt=st.lists(sketches((1, 4)), min_size=1, max_size=2), seed=seeds, steps=st.integers(0, 4)
)
def test_an_episode_goes_on_as_if_it_had_always_had_that_model(
    model: CostModel,
    other_model: CostModel,
    catalog_of: CatalogOf,
    dealt: list[Sketch],
    seed: int,
    steps: int,
) -> None:
    catalog = catalog_of(model)
    instances = [sketch.on(catalog) for sketch in dealt]
    episodes, fresh = (
        episodes_of(catalog, *instances),
        episodes_of(catalog_of(other_model), *instances),
    )
    assume(torch.equal(episodes.order, fresh.order))
    layout, choose = Layout(episodes.max_devices), AtRandom(range(seed, seed + len(instances)))
    for _ in range(steps):
        devices = choose(episodes)
        episodes.place(devices)
        fresh.place(devices)
    episodes.set_oracle(oracle_of(other_model))
    same(episodes, fresh, layout)
    while not episodes.over.all():
        devices = choose(episodes)
        episodes.place(devices)
        fresh.place(devices)
        same(episodes, fresh, layout)


@few
@given(sketch=sketches((2, 9), tightest=2), seed=seeds, steps=st.integers(0, 9))
def test_whatever_the_order_was_the_end_is_priced_by_the_new_model(
    model: CostModel,
    other_model: CostModel,
    catalog_of: CatalogOf,
    sketch: Sketch,
    seed: int,
    steps: int,
) -> None:
    catalog = catalog_of(model)
    episodes, choose = episodes_of(catalog, sketch.on(catalog)), AtRandom([seed])
    for _ in range(steps):
        episodes.place(choose(episodes))
    episodes.set_oracle(oracle_of(other_model))
    while not episodes.over.all():
        episodes.place(choose(episodes))
    held = [shard for shard in episodes.shards(0) if shard is not None]
    expected = [cost.total_ms for cost in oracle_of(other_model).costs(held)]
    costs = episodes.cost_ms[0, episodes.cost_ms[0] > 0].tolist()
    assert costs == pytest.approx(expected, rel=1e-4)
    fresh = episodes_of(catalog_of(other_model), sketch.on(catalog))
    torch.testing.assert_close(episodes.all_ms, fresh.all_ms)
    torch.testing.assert_close(episodes.even_split_ms, fresh.even_split_ms)


def test_the_bound_is_the_new_models(
    model: CostModel, other_model: CostModel, catalog_of: CatalogOf, disputed: list[int]
) -> None:
    played = instance(disputed, *[AMPLE] * 3)
    episodes, fresh = (
        episodes_of(catalog_of(model), played),
        episodes_of(catalog_of(other_model), played),
    )
    assert episodes.order.tolist() != fresh.order.tolist()
    episodes.set_oracle(oracle_of(other_model))
    torch.testing.assert_close(episodes.lower_bound_ms, fresh.lower_bound_ms)


def test_the_next_task_is_ordered_by_the_new_model(
    model: CostModel, other_model: CostModel, catalog_of: CatalogOf, disputed: list[int]
) -> None:
    played = instance(disputed, AMPLE)
    episodes, fresh = (
        episodes_of(catalog_of(model), played),
        episodes_of(catalog_of(other_model), played),
    )
    episodes.set_oracle(oracle_of(other_model))
    episodes.start([0], [played])
    assert episodes.order.tolist() == fresh.order.tolist()


def test_a_model_may_be_used_before_anything_is_sampled(
    model: CostModel, other_model: CostModel, catalog_of: CatalogOf
) -> None:
    learner, fresh = (
        ShardingVectorEnv(catalog_of(believed), 2, RandomTaskSampler((2, 5), (2, 3)))
        for believed in (model, other_model)
    )
    learner.set_cost_model(other_model)
    np.testing.assert_array_equal(learner.reset(seed=1)[0], fresh.reset(seed=1)[0])


@pytest.mark.parametrize("members", [1, 2])
def test_a_model_of_fewer_networks_can_be_used_too(
    model: CostModel, catalog_of: CatalogOf, members: int
) -> None:
    ensemble = model.compute.ensemble
    fewer = {name: weight[:members] for name, weight in ensemble.weights.items()}
    compute = replace(model.compute, ensemble=ensemble.with_weights(fewer))
    smaller = CostModel(compute, model.provenance)
    played = instance([3, 8, 11], AMPLE, AMPLE)
    episodes = episodes_of(catalog_of(model), played)
    episodes.place(torch.tensor([1]))
    episodes.set_oracle(oracle_of(smaller))
    while not episodes.over.all():
        episodes.place(greedily(episodes))
    costs = oracle_of(smaller).costs([shard for shard in episodes.shards(0) if shard])
    found = episodes.cost_ms[episodes.cost_ms > 0].tolist()
    assert found == pytest.approx([cost.total_ms for cost in costs], rel=1e-4)


def test_an_episode_is_worth_what_its_end_is_whenever_it_learned(
    model: CostModel, other_model: CostModel, catalog_of: CatalogOf
) -> None:
    task_sampler = RandomTaskSampler((4, 9), (2, 3))
    env = ShardingVectorEnv(catalog_of(model), 5, task_sampler)
    env.reset(seed=4)
    paid, ended = np.zeros(5), np.zeros(5, np.bool_)
    worth = np.zeros(5)
    for step in range(9):
        if step == 2:
            env.set_cost_model(other_model)
        _, rewards, ends, _, infos = env.step(greedily(env.episodes).numpy())
        paid += np.where(ended, 0, rewards)
        if ends.any():
            worth = np.where(ends & ~ended, -infos["plan_ms"] / infos["lower_bound_ms"], worth)
        ended |= ends
    assert ended.all()
    np.testing.assert_allclose(paid, worth, rtol=1e-4)
