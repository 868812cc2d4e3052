"""The rules of the game, whatever is dealt and however it is played."""

from functools import partial

import pytest
import torch
from hypothesis import given
from plays import AMPLE, AtRandom, Sketch, deal, few, game_of, ragged, seeds, sketches

from autoshard.cost_model import CostModel, EstimatedCosts
from autoshard.envs import Deck, Layout, ShardingGame
from autoshard.workload import EmbeddingTable, Shard, TableSlice

same = partial(torch.testing.assert_close, equal_nan=True)


def total_ms(model: CostModel, shard: Shard | None) -> float:
    return 0.0 if shard is None else EstimatedCosts(model, 1024).costs([shard])[0].total_ms


@few
@given(dealt=ragged, seed=seeds)
def test_every_table_is_placed_once_the_costliest_first(
    deck: Deck, model: CostModel, dealt: list[Sketch], seed: int
) -> None:
    deals = [sketch.on(deck) for sketch in dealt]
    game, choose = game_of(deck, *deals), AtRandom(range(seed, seed + len(deals)))
    placed: list[list[int]] = [[] for _ in deals]
    while not game.over.all():
        for seat in (~game.over).nonzero()[:, 0].tolist():
            placed[seat].append(int(game.current[seat]))
        game.place(choose(game))
    for seat, numbers in enumerate(placed):
        shards = [shard for shard in game.shards(seat) if shard is not None]
        held = sorted(piece.digest for shard in shards for piece in shard.slices)
        assert held == sorted(deck.pieces[number].digest for number in numbers)
        costs = [total_ms(model, Shard((deck.pieces[number],))) for number in numbers]
        assert costs == pytest.approx(sorted(costs, reverse=True), rel=1e-5)
        if game.stuck[seat]:
            assert len(numbers) == game.placed[seat] < len(dealt[seat].pieces)
        else:
            assert sorted(numbers) == sorted(dealt[seat].pieces)


@few
@given(dealt=ragged, seed=seeds)
def test_devices_cost_what_was_foretold_and_what_the_oracle_says(
    deck: Deck, model: CostModel, dealt: list[Sketch], seed: int
) -> None:
    game = game_of(deck, *(sketch.on(deck) for sketch in dealt))
    choose = AtRandom(range(seed, seed + len(dealt)))
    while not game.over.all():
        devices, playing = choose(game), (~game.over).nonzero()[:, 0]
        before = game.cost_ms.clone()
        before[playing, devices[playing]] = game.joined_ms[playing, devices[playing]]
        deviations = game.joined_deviation[playing, devices[playing]]
        game.place(devices)
        assert torch.equal(game.cost_ms, before)
        assert torch.equal(game.deviation[playing, devices[playing]], deviations)
    for seat, sketch in enumerate(dealt):
        costs = [total_ms(model, shard) for shard in game.shards(seat)]
        assert game.cost_ms[seat, : len(costs)].tolist() == pytest.approx(costs, rel=1e-4)
        assert game.cost_ms[seat, len(costs) :].sum() == 0
        whole = sum(total_ms(model, Shard((deck.pieces[n],))) for n in sketch.pieces)
        assert float(game.all_ms[seat]) == pytest.approx(whole, rel=1e-4)


@given(dealt=ragged, seed=seeds)
def test_what_is_left_goes_down_to_nothing(deck: Deck, dealt: list[Sketch], seed: int) -> None:
    game = game_of(deck, *(sketch.on(deck) for sketch in dealt))
    choose = AtRandom(range(seed, seed + len(dealt)))
    assert torch.equal(game.left_share(), torch.ones(len(dealt)))
    torch.testing.assert_close(game.rest_ms, game.all_ms)
    while not game.over.all():
        game.place(choose(game))
    for seat, sketch in enumerate(dealt):
        left = [n for n, home in zip(sketch.pieces, game.assignment(seat), strict=True) if home < 0]
        assert int(game.rest_bytes[seat]) == deck.bytes[left].sum()
        assert float(game.rest_ms[seat]) == pytest.approx(
            float(deck.alone_ms[left].sum()), abs=1e-3
        )
        assert float(game.left_share()[seat]) == pytest.approx(len(left) / len(sketch.pieces))


@few
@given(dealt=ragged, seed=seeds)
def test_nobody_is_influenced_by_those_who_sit_beside(
    deck: Deck, dealt: list[Sketch], seed: int
) -> None:
    deals = [sketch.on(deck) for sketch in dealt]
    together = game_of(deck, *deals)
    alone = [game_of(deck, deal) for deal in deals]
    wide = Layout(together.max_devices)
    choosers = [AtRandom([seed + seat]) for seat in range(len(deals))]
    choose = AtRandom(range(seed, seed + len(deals)))
    while True:
        seen = wide.split(wide.observe(together))
        for seat, game in enumerate(alone):
            assert together.over[seat] == game.over[0]
            narrow = Layout(game.max_devices)
            for name, part in narrow.split(narrow.observe(game)).items():
                mine = seen[name][seat]
                if name in ("devices", "exists", "allowed"):
                    assert not mine[game.max_devices :].nan_to_num().any()
                    mine = mine[: game.max_devices]
                same(mine, part[0], rtol=1e-4, atol=1e-5)
        if together.over.all():
            break
        together.place(choose(together))
        for game, chooser in zip(alone, choosers, strict=True):
            game.place(chooser(game))
    for seat, game in enumerate(alone):
        assert together.assignment(seat).tolist() == game.assignment(0).tolist()


@given(first=sketches(), second=sketches(), seed=seeds)
def test_nothing_of_a_seats_last_game_is_left(
    deck: Deck, first: Sketch, second: Sketch, seed: int
) -> None:
    used, fresh = (ShardingGame(deck, 1, 9, 4) for _ in range(2))
    layout = Layout(4)
    used.deal([0], [first.on(deck)])
    choose = AtRandom([seed])
    while not used.over.all():
        used.place(choose(used))
    for game in (used, fresh):
        game.deal([0], [second.on(deck)])
    choosers = AtRandom([seed]), AtRandom([seed])
    while True:
        same(layout.observe(used), layout.observe(fresh), rtol=0, atol=0)
        assert torch.equal(used.over, fresh.over)
        if used.over.all():
            break
        for game, chooser in zip((used, fresh), choosers, strict=True):
            game.place(chooser(game))
    assert used.assignment(0).tolist() == fresh.assignment(0).tolist()


@given(sketch=sketches(), seed=seeds)
def test_an_assignment_is_in_the_deals_order(deck: Deck, sketch: Sketch, seed: int) -> None:
    game, choose = game_of(deck, sketch.on(deck)), AtRandom([seed])
    homes: dict[int, int] = {}
    while not game.over.all():
        device = choose(game)
        homes[int(game.current[0])] = int(device[0])
        game.place(device)
    assert game.assignment(0).tolist() == [homes.get(number, -1) for number in sketch.pieces]


def test_only_those_who_play_place(deck: Deck) -> None:
    game = game_of(deck, deal([3, 8], AMPLE), deal([3, 8], AMPLE))
    game.place(torch.tensor([0, 0]), torch.tensor([False, True]))
    assert game.placed.tolist() == [0, 1]


def test_the_bound_is_an_even_share_or_the_costliest_table(deck: Deck) -> None:
    numbers = list(range(40))
    game = game_of(deck, deal(numbers, AMPLE, AMPLE), deal(numbers[:3], *[AMPLE] * 4))
    pace, bound = game.pace_ms.tolist(), game.bound_ms.tolist()
    assert bound[0] == pace[0] > float(deck.alone_ms[numbers].max())
    assert bound[1] == pytest.approx(float(deck.alone_ms[numbers[:3]].max()))
    assert bound[1] > pace[1]


def test_a_deck_holds_column_slices_too(
    model: CostModel, many_tables: tuple[EmbeddingTable, ...]
) -> None:
    wide, other = [table for table in many_tables if table.dim >= 16][:2]
    halves = [TableSlice(wide, 0, 8), TableSlice(wide, 8, wide.dim - 8)]
    deck = Deck(EstimatedCosts(model, 1024), [*halves, other.whole()])
    assert deck.bytes[:2].tolist() == [
        model.provenance.operator.memory([piece], 1024).total for piece in halves
    ]
    game = game_of(deck, *[deal([0, 1, 2], AMPLE, AMPLE)] * 2)
    while not game.over.all():
        game.place(torch.stack([game.current[0] != 0, game.current[1] == 2]).long())
    assert game.shards(0) == [Shard((halves[0],)), Shard((halves[1], other.whole()))]
    costs = [total_ms(model, shard) for shard in game.shards(0)]
    assert game.cost_ms[0].tolist() == pytest.approx(costs, rel=1e-4)
    # Two slices of a table that meet on a device are one there.
    assert game.shards(1) == [Shard.of_tables([wide]), Shard.of_tables([other])]
