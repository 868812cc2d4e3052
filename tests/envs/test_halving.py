"""Pieces that are halved: whose columns they are, where they come back, and when they may be."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from plays import AMPLE, AtRandom, Sketch, deal, few, fewest, game_of, ragged, seeds, sketches

from autoshard.cost_model import CostModel, EstimatedCosts
from autoshard.envs import Deal, Deck, Layout, RandomDeals, ShardingGame, ShardingVectorEnv
from autoshard.envs.deck import WHOLE
from autoshard.workload import (
    EmbeddingTable,
    Rule,
    ShardingPlan,
)
from autoshard.workload.admission import RuleMasks
from autoshard.workload.tables import halves

HALVE = 0.3  # of the moves, where it is allowed


def players(seed: int, games: int) -> AtRandom:
    return AtRandom(range(seed, seed + games), HALVE)


def halve(game: ShardingGame) -> None:
    game.place(torch.full((game.seats,), game.halve_action))


def coming(game: ShardingGame, seat: int) -> list[int]:
    """Pieces that are not placed, in their order."""
    return game.order[seat, int(game.placed[seat]) : int(game.count[seat])].tolist()


@few
@given(dealt=ragged, seed=seeds)
def test_columns_are_placed_once_whatever_is_halved(
    split_deck: Deck, dealt: list[Sketch], seed: int
) -> None:
    deals = [sketch.on(split_deck) for sketch in dealt]
    game, choose = game_of(split_deck, *deals, halvings=9), players(seed, len(deals))
    while not game.over.all():
        game.place(choose(game))
    for seat, mine in enumerate(deals):
        task = split_deck.task(mine)
        placed, widths = game.placed_slices(seat), Counter[str]()
        for piece, _ in placed:
            widths[piece.table.name] += piece.width
        assert len(placed) == game.placed[seat]
        # Slices are counted by table, in the deal's order; other tables have none to count.
        assert int(game.slices[seat].sum()) - game.max_tables == game.count[seat] - len(mine.pieces)
        if game.stuck[seat]:
            for number in coming(game, seat):
                for piece in split_deck.bundles[number].slices:
                    widths[piece.table.name] += piece.width
        else:
            plan = ShardingPlan.of_slices(task, placed)
            plan.check(task)
            assert list(plan.shards(task)) == game.shards(seat)
        assert widths == {table.name: table.dim for table in task.tables}


@few
@given(dealt=ragged, seed=seeds)
def test_what_is_told_of_the_rest_is_what_a_recount_finds(
    split_deck: Deck, dealt: list[Sketch], seed: int
) -> None:
    deck, deals = split_deck, [sketch.on(split_deck) for sketch in dealt]
    game, choose = game_of(deck, *deals, halvings=6), players(seed, len(deals))
    while True:
        for seat, mine in enumerate(deals):
            left = coming(game, seat)
            placed = [deck.sizes[n] for n in game.order[seat, : int(game.placed[seat])]]
            pieces = game.order[seat, : int(game.count[seat])]
            alone = deck.alone_ms[left].tolist()
            assert alone == sorted(alone, reverse=True)
            assert int(game.rest_bytes[seat]) == int(deck.sizes[left].sum())
            free = mine.memory_bytes.sum() - sum(int(size) for size in placed)
            assert int(game.free[seat, : len(mine.memory_bytes)].sum()) == free
            torch.testing.assert_close(
                game.rest[seat], deck.described[left].sum(0), rtol=1e-4, atol=1e-3
            )
            assert float(game.rest_ms[seat]) == pytest.approx(sum(alone), rel=1e-4, abs=1e-4)
            added = float(deck.alone_ms[pieces].sum() - deck.alone_ms[mine.pieces].sum())
            assert float(game.added_ms[seat]) == pytest.approx(added, rel=1e-3, abs=1e-4)
        if game.over.all():
            break
        game.place(choose(game))


@few
@given(dealt=ragged, seed=seeds)
def test_no_device_is_safe_that_leaves_the_largest_half_without_room(
    split_deck: Deck, dealt: list[Sketch], seed: int
) -> None:
    deck, deals = split_deck, [sketch.on(split_deck) for sketch in dealt]
    game, choose = game_of(deck, *deals, halvings=6), players(seed, len(deals))
    while not game.over.all():
        for seat in (~game.over).nonzero()[:, 0].tolist():
            sizes = deck.sizes[coming(game, seat)].tolist()
            foreseen = sorted(sizes[1:], reverse=True)[:4]
            for device in game.allowed[seat].nonzero()[:, 0].tolist():
                free = game.free[seat, : len(deals[seat].memory_bytes)].tolist()
                free[device] -= sizes[0]
                found = True
                for size in foreseen:  # each where it fits most tightly
                    room = min((room for room in free if room >= size), default=None)
                    if room is None:
                        found = False
                        break
                    free[free.index(room)] -= size
                assert bool(game.safe[seat, device]) == found
        game.place(choose(game))


def test_halves_come_back_where_their_cost_says(split_deck: Deck) -> None:
    deck = split_deck
    wide = [n for n in range(100) if deck.pieces[n].width >= 16][:4]
    game = game_of(deck, deal(wide, AMPLE, AMPLE), halvings=4)
    first = int(game.current[0])
    one, two = deck.halves[first].tolist()
    before = coming(game, 0)
    halve(game)
    after = coming(game, 0)
    assert Counter(after) == Counter([*before[1:], one, two])
    costs = deck.alone_ms[after].tolist()
    assert costs == sorted(costs, reverse=True)
    assert game.placed.tolist() == [0]
    assert game.left_share().tolist() == [1.0]
    assert int(game.current[0]) == after[0]
    assert [piece.width for piece in halves(deck.pieces[first])] == deck.widths[[one, two]].tolist()


def test_a_deck_knows_all_halves_and_their_halves(
    model: CostModel, split_deck: Deck, many_tables: tuple[EmbeddingTable, ...]
) -> None:
    dealt = len(many_tables)
    assert len(split_deck.pieces) == dealt < len(split_deck.bundles)
    for number, (one, two) in enumerate(split_deck.halves.tolist()):
        (piece,) = split_deck.bundles[number].slices
        if piece.width < 8:
            assert one == two == WHOLE
        else:
            found = [split_deck.bundles[half].slices[0] for half in (one, two)]
            assert {half.table for half in found} == {piece.table}
            assert [half.width for half in found] == [half.width for half in halves(piece)]
            assert one >= dealt
            assert two >= dealt
    whole = Deck.of_tables(model, many_tables, 1024)
    assert (whole.halves == WHOLE).all()
    assert len(whole.bundles) == dealt
    for told in ("amounts", "sizes", "columns", "alone_ms"):
        torch.testing.assert_close(getattr(split_deck, told)[:dealt], getattr(whole, told))


def test_a_piece_that_costs_little_is_halved_only_where_it_lies_badly_whole(
    split_deck: Deck,
) -> None:
    deck = split_deck
    order = [n for n in deck.alone_ms[:100].argsort().tolist() if deck.pieces[n].width >= 8]
    cheap, numbers = order[0], order[-60:]
    game = game_of(deck, deal([*numbers, cheap], AMPLE, AMPLE), halvings=9)
    assert deck.alone_ms[cheap] < 0.02 * game.pace_ms[0]
    while int(game.current[0]) != cheap:
        game.place(torch.tensor([0]))
    assert not game.halvable[0]
    tight = int(deck.bytes[cheap]) - 1
    alone = game_of(deck, deal([cheap], tight, tight), halvings=9)
    assert not alone.stuck[0]
    assert alone.halvable[0]


def ruled(deck: Deck, numbers: list[int], devices: int, *rules: Rule) -> ShardingGame:
    """A game of these tables by rules, on devices with room."""
    dealt = deal(numbers, *[AMPLE] * devices)
    task = replace(deck.task(dealt), rules=rules)
    masks = RuleMasks(task)
    bundles = masks.units
    own = Deck(EstimatedCosts(deck.model, deck.batch_size), bundles, split=True)
    pieces = np.arange(len(bundles))
    return game_of(own, Deal(pieces, dealt.memory_bytes, masks), halvings=9)


def test_rules_say_what_may_be_halved(split_deck: Deck) -> None:
    deck = split_deck
    wide = next(n for n in range(100) if deck.pieces[n].width >= 32)
    other = next(n for n in range(100) if n != wide)
    name, width = deck.pieces[wide].table.name, deck.pieces[wide].width
    of = (name,)
    assert ruled(deck, [wide], 2).halvable[0]
    assert not ruled(deck, [wide], 1).halvable[0]  # all halves would lie there
    assert not ruled(deck, [wide], 2, Rule("whole", of)).halvable[0]
    together = Rule("together", (name, deck.pieces[other].table.name))
    assert not ruled(deck, [wide, other], 2, together).halvable[0]
    least = width // 8 * 4
    assert ruled(deck, [wide], 2, Rule("least_width", of, (least,))).halvable[0]
    assert not ruled(deck, [wide], 2, Rule("least_width", of, (least + 4,))).halvable[0]
    for most in (1, 2, 3):
        game = ruled(deck, [wide], 4, Rule("most_slices", of, (most,)))
        for _ in range(most - 1):
            assert game.halvable[0]
            halve(game)
        assert not game.halvable[0]
        assert int(game.count[0]) == most


@pytest.mark.filterwarnings("ignore::autoshard.cost_model.OutsideTraining")
def test_a_narrow_table_may_not_be_halved(model: CostModel) -> None:
    tables = [EmbeddingTable(f"t{dim}", 1000, dim, 5.0) for dim in (4, 8)]
    deck = Deck.of_tables(model, tables, 1024, split=True)
    game = game_of(deck, deal([0], AMPLE, AMPLE), deal([1], AMPLE, AMPLE), halvings=3)
    assert game.halvable.tolist() == [False, True]
    game.place(torch.tensor([0, game.halve_action]))
    assert game.halvable.tolist() == [False, False]
    assert deck.widths[game.current[1]] == 4


def test_a_table_is_halved_no_oftener_than_there_are_devices(split_deck: Deck) -> None:
    wide = next(n for n in range(100) if split_deck.pieces[n].width >= 32)
    game = game_of(split_deck, deal([wide], *[AMPLE] * 3), halvings=9)
    for slices in (1, 2):
        assert game.slices[0].tolist() == [slices]
        assert game.halvable[0]
        halve(game)
    assert not game.halvable[0]


@pytest.mark.parametrize("halvings", [0, 1, 3])
def test_a_game_makes_no_more_halvings_than_it_may_however_few_its_tables_are(
    split_deck: Deck, halvings: int
) -> None:
    wide = [n for n in range(100) if split_deck.pieces[n].width >= 32][:5]
    game = ShardingGame(split_deck, 2, 5, 4, halvings)
    game.deal([0, 1], [deal(wide[:2], *[AMPLE] * 4), deal(wide, *[AMPLE] * 4)])
    for _ in range(halvings):
        assert game.halvable.all()
        halve(game)
    assert not game.halvable.any()
    assert game.count.tolist() == [2 + halvings, 5 + halvings]


def test_games_of_whole_tables_are_never_halved_whatever_their_deck_knows(split_deck: Deck) -> None:
    env = ShardingVectorEnv(split_deck, 8, RandomDeals((2, 9), (2, 4)), halvings=0)
    env.reset(seed=0)
    for _ in range(20):
        assert not env.game.halvable.any()
        env.step(env.game.joined_ms.masked_fill(~env.game.allowed, torch.inf).argmin(1).numpy())


def test_a_forbidden_halving_ends_the_game_and_changes_nothing(
    deck: Deck, split_deck: Deck
) -> None:
    for some in (deck, split_deck):  # one has no halves, the other but one device
        game = game_of(some, deal([3, 8], *[AMPLE] * (2 if some is deck else 1)), halvings=2)
        before = game.order.clone()
        halve(game)
        assert game.stuck.tolist() == game.over.tolist() == [True]
        assert (game.placed.tolist(), game.count.tolist()) == ([0], [2])
        assert torch.equal(game.order, before)


@few
@given(dealt=ragged, seed=seeds)
def test_those_who_halve_do_not_influence_those_beside(
    split_deck: Deck, dealt: list[Sketch], seed: int
) -> None:
    deals = [sketch.on(split_deck) for sketch in dealt]
    together = game_of(split_deck, *deals, halvings=4)
    alone = [game_of(split_deck, mine, halvings=4) for mine in deals]
    choose = AtRandom(range(seed, seed + len(deals)), HALVE)
    choosers = [AtRandom([seed + seat], HALVE) for seat in range(len(deals))]
    while True:
        wide = Layout(together.max_devices).split(Layout(together.max_devices).observe(together))
        for seat, game in enumerate(alone):
            assert together.over[seat] == game.over[0]
            assert together.halvable[seat] == game.halvable[0]
            narrow = Layout(game.max_devices)
            for name, part in narrow.split(narrow.observe(game)).items():
                mine = wide[name][seat]
                if name in ("devices", "exists", "allowed"):
                    mine = mine[: game.max_devices]
                torch.testing.assert_close(mine, part[0], rtol=1e-4, atol=1e-4)
        if together.over.all():
            break
        together.place(choose(together))
        for game, chooser in zip(alone, choosers, strict=True):
            game.place(chooser(game))
    for seat, game in enumerate(alone):
        assert together.placed_slices(seat) == game.placed_slices(0)


@fewest
@given(sketch=sketches((2, 6), (2, 3), tightest=2), seed=seeds)
def test_a_game_that_learns_after_halvings_goes_on_by_the_new_model(
    model: CostModel,
    other_model: CostModel,
    many_tables: tuple[EmbeddingTable, ...],
    sketch: Sketch,
    seed: int,
) -> None:
    """Each half that is made from then on finds its place by what the new model says of all."""
    deck = Deck.of_tables(model, many_tables[:100], 1024, split=True)
    fresh = Deck.of_tables(other_model, many_tables[:100], 1024, split=True)
    mine = sketch.on(deck)
    game, choose = game_of(deck, mine, halvings=6), players(seed, 1)
    for _ in range(3):
        game.place(choose(game))
    game.learn(EstimatedCosts(other_model, 1024))
    torch.testing.assert_close(deck.alone_ms, fresh.alone_ms)
    while True:
        left, pieces = coming(game, 0), game.order[0, : int(game.count[0])]
        assert float(game.rest_ms[0]) == pytest.approx(
            float(fresh.alone_ms[left].sum()), rel=1e-4, abs=1e-4
        )
        added = float(fresh.alone_ms[pieces].sum() - fresh.alone_ms[mine.pieces].sum())
        assert float(game.added_ms[0]) == pytest.approx(added, rel=1e-3, abs=1e-4)
        if game.over.all():
            break
        action = choose(game)
        game.place(action)
        if int(action[0]) == game.halve_action:
            costs = fresh.alone_ms[coming(game, 0)].tolist()
            assert costs == sorted(costs, reverse=True)
    assert not game.stuck[0]


def test_what_is_halved_after_learning_orders_all_that_come_by_the_new_model(
    model: CostModel, other_model: CostModel, many_tables: tuple[EmbeddingTable, ...]
) -> None:
    deck, fresh = (
        Deck.of_tables(believed, many_tables[:100], 1024, split=True)
        for believed in (model, other_model)
    )
    ours, theirs = deck.alone_ms[:100], fresh.alone_ms[:100]
    costliest = int(ours.argmax())
    disputed = (ours[:, None] > 1.02 * ours) & (theirs[:, None] < 0.98 * theirs)
    disputed[costliest] = disputed[:, costliest] = False
    pair = disputed.nonzero()[0].tolist()
    game = game_of(deck, deal([costliest, *pair], AMPLE, AMPLE), halvings=1)
    assert coming(game, 0) == [costliest, *pair]
    game.learn(EstimatedCosts(other_model, 1024))
    halve(game)
    costs = fresh.alone_ms[coming(game, 0)].tolist()
    assert costs == sorted(costs, reverse=True)


def test_a_table_larger_than_any_device_is_placed_in_halves(split_deck: Deck) -> None:
    deck = split_deck
    wide = next(n for n in range(100) if deck.pieces[n].width >= 16)
    one, two = deck.halves[wide].tolist()
    room = int(deck.bytes[[one, two]].max())
    assert room < deck.bytes[wide]
    whole, split = (game_of(deck, deal([wide], room, room), halvings=n) for n in (0, 1))
    assert whole.stuck[0]
    assert not split.over[0]
    assert not split.allowed.any()
    halve(split)
    for device in (0, 1):
        split.place(torch.tensor([device]))
    assert (split.over.tolist(), split.stuck.tolist()) == ([True], [False])
    widths = [piece.width for piece, _ in split.placed_slices(0)]
    assert sum(widths) == deck.pieces[wide].width
    assert split.assignment(0).tolist() == [-1]  # it is nowhere whole
