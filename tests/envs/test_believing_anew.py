"""A game that changes its cost model half way."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from plays import AMPLE, AtRandom, Sketch, deal, few, game_of, greedily, seeds, sketches

from autoshard.cost_model import CostModel, EstimatedCosts
from autoshard.envs import Deck, Layout, RandomDeals, ShardingGame, ShardingVectorEnv
from autoshard.workload import EmbeddingTable

DeckOf = Callable[[CostModel], Deck]
TOLD = (
    *("sums", "content", "cost_ms", "deviation", "rest", "rest_ms", "rest_bytes", "free"),
    *("all_ms", "even", "pace_ms", "bound_ms", "allowed", "homes", "stuck"),
)


@pytest.fixture(scope="module")
def deck_of(many_tables: tuple[EmbeddingTable, ...]) -> DeckOf:
    return lambda model: Deck.of_tables(model, many_tables[:100], 1024)


@pytest.fixture(scope="module")
def disputed(model: CostModel, other_model: CostModel, deck_of: DeckOf) -> list[int]:
    """Two tables of which the models do not agree which is the costlier."""
    ours, theirs = deck_of(model).alone_ms, deck_of(other_model).alone_ms
    mine, yours = ours / ours[:, None], theirs[:, None] / theirs
    clear = torch.minimum(mine, yours)
    pair = np.unravel_index(int(clear.argmax()), clear.shape)
    assert clear[pair] > 1.02
    return [int(number) for number in pair]


def oracle_of(model: CostModel) -> EstimatedCosts:
    return EstimatedCosts(model, 1024)


def same(first: ShardingGame, second: ShardingGame, layout: Layout) -> None:
    for name in TOLD:
        mine, yours = getattr(first, name), getattr(second, name)
        assert torch.allclose(mine.double(), yours.double(), rtol=1e-4, atol=1e-4), name
    seen = layout.observe(first), layout.observe(second)
    torch.testing.assert_close(*seen, rtol=1e-3, atol=1e-3, equal_nan=True)


@few
@given(
    dealt=st.lists(sketches((1, 4)), min_size=1, max_size=2), seed=seeds, steps=st.integers(0, 4)
)
def test_a_game_goes_on_as_if_it_had_always_believed_so(
    model: CostModel,
    other_model: CostModel,
    deck_of: DeckOf,
    dealt: list[Sketch],
    seed: int,
    steps: int,
) -> None:
    deck = deck_of(model)
    deals = [sketch.on(deck) for sketch in dealt]
    game, fresh = game_of(deck, *deals), game_of(deck_of(other_model), *deals)
    assume(torch.equal(game.order, fresh.order))
    layout, choose = Layout(game.max_devices), AtRandom(range(seed, seed + len(deals)))
    for _ in range(steps):
        devices = choose(game)
        game.place(devices)
        fresh.place(devices)
    game.learn(oracle_of(other_model))
    same(game, fresh, layout)
    while not game.over.all():
        devices = choose(game)
        game.place(devices)
        fresh.place(devices)
        same(game, fresh, layout)


@few
@given(sketch=sketches((2, 9), tightest=2), seed=seeds, steps=st.integers(0, 9))
def test_whatever_the_order_was_the_end_is_priced_by_the_new_model(
    model: CostModel,
    other_model: CostModel,
    deck_of: DeckOf,
    sketch: Sketch,
    seed: int,
    steps: int,
) -> None:
    deck = deck_of(model)
    game, choose = game_of(deck, sketch.on(deck)), AtRandom([seed])
    for _ in range(steps):
        game.place(choose(game))
    game.learn(oracle_of(other_model))
    while not game.over.all():
        game.place(choose(game))
    held = [shard for shard in game.shards(0) if shard is not None]
    expected = [cost.total_ms for cost in oracle_of(other_model).costs(held)]
    costs = game.cost_ms[0, game.cost_ms[0] > 0].tolist()
    assert costs == pytest.approx(expected, rel=1e-4)
    fresh = game_of(deck_of(other_model), sketch.on(deck))
    torch.testing.assert_close(game.all_ms, fresh.all_ms)
    torch.testing.assert_close(game.pace_ms, fresh.pace_ms)


def test_the_bound_is_the_new_models(
    model: CostModel, other_model: CostModel, deck_of: DeckOf, disputed: list[int]
) -> None:
    played = deal(disputed, *[AMPLE] * 3)
    game, fresh = game_of(deck_of(model), played), game_of(deck_of(other_model), played)
    assert game.order.tolist() != fresh.order.tolist()
    game.learn(oracle_of(other_model))
    torch.testing.assert_close(game.bound_ms, fresh.bound_ms)


def test_the_next_deal_is_ordered_by_the_new_model(
    model: CostModel, other_model: CostModel, deck_of: DeckOf, disputed: list[int]
) -> None:
    played = deal(disputed, AMPLE)
    game, fresh = game_of(deck_of(model), played), game_of(deck_of(other_model), played)
    game.learn(oracle_of(other_model))
    game.deal([0], [played])
    assert game.order.tolist() == fresh.order.tolist()


def test_a_model_may_be_believed_before_anything_is_dealt(
    model: CostModel, other_model: CostModel, deck_of: DeckOf
) -> None:
    learner, fresh = (
        ShardingVectorEnv(deck_of(believed), 2, RandomDeals((2, 5), (2, 3)))
        for believed in (model, other_model)
    )
    learner.learn(other_model)
    np.testing.assert_array_equal(learner.reset(seed=1)[0], fresh.reset(seed=1)[0])


@pytest.mark.parametrize("members", [1, 2])
def test_a_model_of_fewer_networks_can_be_believed_too(
    model: CostModel, deck_of: DeckOf, members: int
) -> None:
    ensemble = model.compute.ensemble
    fewer = {name: weight[:members] for name, weight in ensemble.weights.items()}
    compute = model.compute.with_ensemble(ensemble.with_weights(fewer))
    smaller = CostModel(compute, model.provenance)
    played = deal([3, 8, 11], AMPLE, AMPLE)
    game = game_of(deck_of(model), played)
    game.place(torch.tensor([1]))
    game.learn(oracle_of(smaller))
    while not game.over.all():
        game.place(greedily(game))
    costs = oracle_of(smaller).costs([shard for shard in game.shards(0) if shard])
    found = game.cost_ms[game.cost_ms > 0].tolist()
    assert found == pytest.approx([cost.total_ms for cost in costs], rel=1e-4)


def test_an_episode_is_worth_what_its_end_is_whenever_it_learned(
    model: CostModel, other_model: CostModel, deck_of: DeckOf
) -> None:
    generator = RandomDeals((4, 9), (2, 3))
    env = ShardingVectorEnv(deck_of(model), 5, generator)
    env.reset(seed=4)
    paid, ended = np.zeros(5), np.zeros(5, np.bool_)
    worth = np.zeros(5)
    for step in range(9):
        if step == 2:
            env.learn(other_model)
        _, rewards, ends, _, infos = env.step(greedily(env.game).numpy())
        paid += np.where(ended, 0, rewards)
        if ends.any():
            worth = np.where(ends & ~ended, -infos["plan_ms"] / infos["bound_ms"], worth)
        ended |= ends
    assert ended.all()
    np.testing.assert_allclose(paid, worth, rtol=1e-4)
