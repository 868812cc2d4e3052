"""What a plan costs by its deal's objective, held against `Objective` and the oracle."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plays import AMPLE, AtRandom, Sketch, deal, few, game_of, greedily, seeds, sketches

from autoshard.cost_model import EstimatedCosts
from autoshard.cost_model.inputs import bundle_amounts
from autoshard.envs import Deal, Deck, EstimatedRewards, Layout, ShardingGame
from autoshard.workload import EmbeddingTable, Objective
from autoshard.workload.objective import Link, ObjectiveName
from autoshard.workload.step_price import StepPrice, step_ms

LINKS = (None, Link(1e9), Link(2e8, 3e-4))
names = st.sampled_from(["step", "pipelined", "compute"])
objectives = st.builds(Objective, names, st.sampled_from(LINKS))
staked = st.lists(st.tuples(sketches(), objectives), min_size=1, max_size=4)


def deals_of(deck: Deck, dealt: list[tuple[Sketch, Objective]]) -> list[Deal]:
    return [replace(sketch.on(deck), objective=objective) for sketch, objective in dealt]


def finished(deck: Deck, deals: list[Deal], seed: int, halving: float = 0.3) -> ShardingGame:
    game = game_of(deck, *deals, halvings=6)
    choose = AtRandom(range(seed, seed + len(deals)), halving)
    while not game.over.all():
        game.place(choose(game))
    return game


def stages_of(deck: Deck, game: ShardingGame, seat: int) -> np.ndarray:
    """Of each device, by the oracle, slices that meet there apart: [devices, stages]."""
    deal, oracle = game.deals[seat], EstimatedCosts(deck.model, deck.batch_size)
    assert deal is not None
    devices = len(deal.memory_bytes)
    held: list[list] = [[] for _ in range(devices)]
    for piece, device in game.placed_slices(seat):
        held[device].append(piece)
    forward, backward = np.zeros(devices), np.zeros(devices)
    for device, pieces in enumerate(held):
        if pieces:
            price = deck.model.compute.price(bundle_amounts(oracle.amounts, pieces).sum(0)[None])
            forward[device], backward[device] = float(price.forward_ms), float(price.backward_ms)
    columns = np.array([sum(piece.output_width for piece in pieces) for pieces in held], float)
    objective = deal.objective
    price = StepPrice.of(objective, deck.batch_size, devices, columns.sum())
    return np.stack(price.stages_ms(forward, backward, columns), axis=-1)


@few
@given(dealt=staked, seed=seeds)
def test_a_finished_game_costs_what_its_objective_says(
    split_deck: Deck, dealt: list[tuple[Sketch, Objective]], seed: int
) -> None:
    """Whatever others beside it are played for."""
    game = finished(split_deck, deals_of(split_deck, dealt), seed)
    estimated = EstimatedRewards()(game, range(game.seats))
    for seat, (sketch, _) in enumerate(dealt):
        if game.stuck[seat]:
            continue
        stages, devices = stages_of(split_deck, game, seat), len(sketch.weights)
        told = float(step_ms(stages))
        assert float(game.plan_ms[seat]) == pytest.approx(told, rel=1e-4)
        assert float(estimated.plan_ms[seat]) == pytest.approx(told, rel=1e-4)
        each = stages.sum(1)
        assert game.cost_ms[seat, :devices].tolist() == pytest.approx(each.tolist(), rel=1e-4)
        assert not game.waits_ms[seat, devices:].any()


@few
@given(dealt=staked, seed=seeds)
def test_where_no_slices_meet_it_is_what_the_plan_costs(
    split_deck: Deck, dealt: list[tuple[Sketch, Objective]], seed: int
) -> None:
    deck, oracle = split_deck, EstimatedCosts(split_deck.model, split_deck.batch_size)
    game = finished(deck, deals_of(deck, dealt), seed, halving=0.1)
    for seat, (_, objective) in enumerate(dealt):
        placed = game.placed_slices(seat)
        if game.stuck[seat] or len({(p.table.name, d) for p, d in placed}) < len(placed):
            continue
        shards = game.shards(seat)
        costs = [None if shard is None else oracle.costs([shard])[0] for shard in shards]
        forward = np.array([0.0 if cost is None else cost.forward_ms for cost in costs])
        backward = np.array([0.0 if cost is None else cost.backward_ms for cost in costs])
        columns = np.array([0.0 if shard is None else shard.total_dim for shard in shards])
        price = StepPrice.of(objective, deck.batch_size, len(shards), columns.sum())
        told = sum(float(stage.max()) for stage in price.stages_ms(forward, backward, columns))
        assert float(game.plan_ms[seat]) == pytest.approx(told, rel=1e-4)


@few
@given(dealt=staked, seed=seeds)
def test_a_device_costs_what_was_foretold_of_it(
    split_deck: Deck, dealt: list[tuple[Sketch, Objective]], seed: int
) -> None:
    game = game_of(split_deck, *deals_of(split_deck, dealt), halvings=6)
    choose = AtRandom(range(seed, seed + len(dealt)), 0.3)
    while not game.over.all():
        actions = choose(game)
        placing = (~game.over & (actions < game.max_devices)).nonzero()[:, 0]
        placing = placing[game.allowed[placing, actions[placing]]]
        waits, where = game.waits_ms.clone(), (placing, actions[placing])
        waits[where] = game.joined_waits_ms[where]
        cost = game.cost_ms.clone()
        cost[where] = game.joined_ms[where]
        game.place(actions)
        assert torch.equal(game.waits_ms, waits)  # halving changes nothing of what devices cost
        assert torch.equal(game.cost_ms, cost)


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("name", ["step", "pipelined", "compute"])
def test_the_pace_is_an_even_share_and_the_bound_no_less(
    deck: Deck, split_deck: Deck, name: ObjectiveName, link: Link | None
) -> None:
    numbers, objective = list(range(12)), Objective(name, link)
    for some, halvings in ((deck, 0), (split_deck, 0), (split_deck, 12)):
        for devices in (1, 2, 4, 24):
            dealt = replace(deal(numbers, *[AMPLE] * devices), objective=objective)
            game = game_of(some, dealt, halvings=halvings)
            share = some.amounts[numbers].sum(0) / devices
            even = np.full(devices, float(some.columns[numbers].sum()) / devices)
            price = StepPrice.of(objective, some.batch_size, devices, even.sum())
            exchange = float(price.exchange_stage(even).max())
            alone = some.alone_ms[numbers]
            compute = float(some.price(share[None]).total_ms) or float(alone.max())
            assert float(game.pace_ms[0]) == pytest.approx(compute + exchange, rel=1e-4)
            # Halved as far as it goes a table is four columns wide.
            least = some.least_ms[numbers] if halvings else alone
            at_best = max(float(some.price(share[None]).total_ms), float(least.max()))
            assert float(game.bound_ms[0]) == pytest.approx(at_best + exchange, rel=1e-4)
    narrow = [split_deck.bundles[n].slices[0].width for n in _narrowest(split_deck, numbers)]
    assert narrow == [4] * len(numbers)
    found = split_deck.alone_ms[_narrowest(split_deck, numbers)]
    torch.testing.assert_close(split_deck.least_ms[numbers], found)


def _narrowest(deck: Deck, numbers: list[int]) -> list[int]:
    found = []
    for number in numbers:
        while deck.halves[number, 0] >= 0:
            number = int(deck.halves[number, 0])
        found.append(number)
    return found


@few
@given(
    numbers=st.lists(st.integers(0, 99), min_size=2, max_size=5, unique=True), objective=objectives
)
def test_no_plan_of_whole_tables_is_much_better_than_the_bound(
    deck: Deck, numbers: list[int], objective: Objective
) -> None:
    for devices in (2, 3):
        dealt = replace(deal(numbers, *[AMPLE] * devices), objective=objective)
        ways = torch.tensor(list(product(range(devices), repeat=len(numbers))))
        game = game_of(deck, *[dealt] * len(ways))
        for step in range(len(numbers)):
            game.place(ways[:, step])
        assert float(game.plan_ms.min()) >= 0.9 * float(game.bound_ms[0])


def test_a_player_is_told_what_it_plays_for(deck: Deck) -> None:
    link, room = Link(1e9, 1e-4), (AMPLE, AMPLE)
    told = {
        Objective("step"): (1, 0), Objective("step", link): (1, 1),
        Objective("pipelined", link): (0, 1), Objective("compute", link): (0, 0),
    }  # fmt: skip
    game = game_of(deck, *(replace(deal([3, 8], *room), objective=some) for some in told))
    game.place(torch.zeros(len(told), dtype=torch.int64))
    layout = Layout(2)
    stakes = layout.split(layout.observe(game))["objective"]
    assert [tuple(row) for row in stakes[:, :2].tolist()] == list(told.values())
    slowest = game.waits_ms.amax(1) / game.pace_ms[:, None]
    torch.testing.assert_close(stakes[:, 2:], slowest)
    torch.testing.assert_close(stakes[:, 2:].sum(1), game.plan_ms / game.pace_ms)


def test_one_device_exchanges_nothing(deck: Deck) -> None:
    slow = Objective("step", Link(1e6, 1.0))
    game = game_of(deck, replace(deal([3, 8], AMPLE), objective=slow), deal([3, 8], AMPLE))
    while not game.over.all():
        game.place(greedily(game))
    assert float(game.plan_ms[0]) == pytest.approx(float(game.plan_ms[1]))
    assert float(game.bound_ms[0]) == pytest.approx(float(game.bound_ms[1]))


@pytest.mark.filterwarnings("ignore::autoshard.cost_model.OutsideTraining")
def test_a_slow_link_counts_every_output_of_a_table(deck: Deck) -> None:
    """A table with three features is sent thrice."""
    tables = [
        EmbeddingTable("one", 1000, 16, 4.0),
        EmbeddingTable("three", 1000, 16, 4.0, features=3),
    ]
    oracle = EstimatedCosts(deck.model, 1024)
    own = Deck(oracle, [table.whole() for table in tables])
    objective = Objective("step", Link(1e6))
    game = game_of(own, replace(deal([0, 1], AMPLE, AMPLE), objective=objective))
    while not game.over.all():
        game.place(game.current)
    exchange = StepPrice.of(objective, 1024, 2, 64.0).exchange_stage(np.array([16.0, 48.0]))
    assert game.waits_ms[0, :, 2].tolist() == pytest.approx(exchange.tolist(), rel=1e-5)
