"""Memory: where the current table may go, and how games end."""

import numpy as np
import pytest
import torch
from hypothesis import given
from plays import AMPLE, AtRandom, Sketch, deal, few, game_of, ragged, seeds

from autoshard.cost_model import CostModel, EstimatedCosts
from autoshard.envs import Deck, ShardingGame
from autoshard.envs.foresight import room_is_left
from autoshard.workload import EmbeddingTable, UserError


def test_the_four_largest_to_come_find_room_where_they_fit_most_tightly() -> None:
    """As a plain loop has it, for seats with much room and with little side by side."""
    rng = np.random.default_rng(0)
    told = {True: 0, False: 0}
    for _ in range(60):
        seats, devices, pieces = 12, int(rng.integers(1, 6)), int(rng.integers(1, 9))
        free = rng.integers(0, 120, (seats, devices))
        free[:, 1:][rng.random((seats, devices - 1)) < 0.2] = -1  # absent
        sizes, placed = rng.integers(1, 60, (seats, pieces)), rng.integers(0, pieces, seats)
        size = sizes[np.arange(seats), placed]
        coming = [sorted(sizes[s, placed[s] + 1 :].tolist(), reverse=True) for s in range(seats)]
        largest = [max(some, default=0) for some in coming]
        found = room_is_left(
            torch.from_numpy(free),
            torch.from_numpy(size),
            torch.tensor(largest, dtype=torch.float64),
            torch.from_numpy(sizes).double(),
            torch.from_numpy(placed),
        )
        for seat in range(seats):
            for device in np.flatnonzero(free[seat] >= size[seat]).tolist():
                rooms = free[seat].tolist()
                rooms[device] -= int(size[seat])
                fits = True
                for needed in coming[seat][:4]:
                    fitting = [n for n, room in enumerate(rooms) if room >= needed]
                    if not fitting:
                        fits = False
                        break
                    rooms[min(fitting, key=lambda n: rooms[n])] -= needed
                assert bool(found[seat, device]) == fits
                told[fits] += 1
    assert min(told.values()) > 100


@given(dealt=ragged, seed=seeds)
def test_devices_are_allowed_if_they_exist_and_have_room(
    deck: Deck, dealt: list[Sketch], seed: int
) -> None:
    deals = [sketch.on(deck) for sketch in dealt]
    game, choose = game_of(deck, *deals), AtRandom(range(seed, seed + len(deals)))
    free = [list(deal.memory_bytes) for deal in deals]
    while True:
        for seat, rooms in enumerate(free):
            absent = [False] * (game.max_devices - len(rooms))
            size = deck.bytes[int(game.current[seat])]
            assert game.exists[seat].tolist() == [True] * len(rooms) + absent
            assert game.free[seat, : len(rooms)].tolist() == rooms
            if not game.over[seat] or game.stuck[seat]:
                assert game.allowed[seat].tolist() == [room >= size for room in rooms] + absent
            assert bool(game.stuck[seat]) == (
                game.placed[seat] < game.count[seat] and all(room < size for room in rooms)
            )
        if game.over.all():
            break
        devices = choose(game)
        for seat in (~game.over).nonzero()[:, 0].tolist():
            free[seat][devices[seat]] -= deck.bytes[int(game.current[seat])]
        game.place(devices)
    assert min(min(rooms) for rooms in free) >= 0


def test_a_game_ends_where_the_next_table_fits_nowhere(deck: Deck) -> None:
    costly, cheap = sorted((3, 8), key=lambda n: -float(deck.alone_ms[n]))
    roomy = int(deck.bytes[costly])
    tight = roomy + int(deck.bytes[cheap]) - 1
    game = game_of(deck, deal([cheap, costly], tight), deal([cheap, costly], tight, roomy))
    assert game.over.tolist() == [False, False]
    game.place(torch.tensor([0, 1]))
    assert (game.over.tolist(), game.stuck.tolist()) == ([True, False], [True, False])
    assert game.left_share().tolist() == [0.5, 0.5]
    assert game.assignment(0).tolist() == [-1, 0]
    game.place(torch.tensor([0, 0]))
    assert (game.over.tolist(), game.stuck.tolist()) == ([True, True], [True, False])
    assert game.assignment(0).tolist() == [-1, 0]
    assert game.assignment(1).tolist() == [0, 1]


def test_a_game_without_room_for_its_first_table_is_over_at_once(deck: Deck) -> None:
    game = game_of(deck, deal([3], int(deck.bytes[3]) - 1), deal([3], int(deck.bytes[3])))
    assert game.over.tolist() == game.stuck.tolist() == [True, False]
    assert not game.allowed[0].any()


def test_a_forbidden_action_ends_the_game_and_places_nothing(deck: Deck) -> None:
    small = int(deck.bytes[[3, 8]].min()) - 1
    deals = (deal([3, 8], AMPLE, small, AMPLE), deal([3, 8], AMPLE, AMPLE), deal([3, 8], AMPLE))
    game = game_of(deck, *deals)
    game.place(torch.tensor([1, 2, 0]))  # too small; does not exist; fine
    assert game.stuck.tolist() == game.over.tolist() == [True, True, False]
    assert game.placed.tolist() == [0, 0, 1]
    assert game.shards(0) == [None, None, None]
    game.place(torch.tensor([0, 0, 0]))
    assert game.placed.tolist() == [0, 0, 2]
    assert game.stuck.tolist() == [True, True, False]


@pytest.mark.filterwarnings("ignore::autoshard.cost_model.OutsideTraining")
def test_devices_are_safe_if_the_largest_tables_to_come_still_find_room(
    model: CostModel,
) -> None:
    """Three tables of 1, 2 and 4 units; the costliest is the smallest."""
    tables = [
        EmbeddingTable(f"t{units}", units * 10_000_000, 16, pooling)
        for units, pooling in ((1, 80.0), (2, 20.0), (4, 2.0))
    ]
    deck = Deck.of_tables(model, tables, 1024)
    unit = int(deck.bytes[0])
    for memory, allowed, safe in (
        ((9, 9), [True, True], [True, True]),
        ((4, 3), [True, True], [False, True]),  # the largest needs all of the first
        ((6, 3), [True, True], [True, True]),
        ((6, 1), [True, True], [False, True]),
        ((5, 1), [True, True], [False, False]),
        ((7, 0.5), [True, False], [True, False]),
    ):
        rooms = [int(units * unit * 1.01) for units in memory]
        game = game_of(deck, deal([2, 0, 1], *rooms))
        assert int(game.current[0]) == 0
        assert game.allowed[0].tolist() == allowed
        assert game.safe[0].tolist() == safe, memory


def test_a_device_that_all_tables_fill_to_the_last_byte_is_safe(deck: Deck) -> None:
    numbers = np.random.default_rng(0).permutation(100).reshape(20, 5)
    game = game_of(deck, *(deal(five, deck.bytes[five].sum()) for five in numbers))
    for _ in range(5):
        assert game.allowed.all()
        assert game.safe.all()
        game.place(torch.zeros(20, dtype=torch.int64))


@few
@given(dealt=ragged, seed=seeds)
def test_no_device_is_safe_that_leaves_a_table_without_room(
    deck: Deck, dealt: list[Sketch], seed: int
) -> None:
    deals = [sketch.on(deck) for sketch in dealt]
    game, choose = game_of(deck, *deals), AtRandom(range(seed, seed + len(deals)))
    while not game.over.all():
        assert not (game.safe & ~game.allowed).any()
        for seat in (~game.over).nonzero()[:, 0].tolist():
            now, end = int(game.placed[seat]), int(game.count[seat])
            sizes = deck.bytes[game.order[seat, now:end].numpy()].tolist()
            for device in game.allowed[seat].nonzero()[:, 0].tolist():
                free = game.free[seat, : len(dealt[seat].weights)].tolist()
                free[device] -= sizes[0]
                largest = max(sizes[1:], default=0)
                if largest > max(free) * 1.001:
                    assert not game.safe[seat, device]
                if sum(sizes[1:]) * 1.001 <= min(free):
                    assert game.safe[seat, device]
        game.place(choose(game))


def test_a_deal_too_large_for_the_game_is_refused(deck: Deck, model: CostModel) -> None:
    game = ShardingGame(deck, 1, 2, 2)
    for too_large in (deal([1, 2, 3], 1), deal([1], 1, 1, 1)):
        with pytest.raises(UserError, match="larger than the 2 tables and 2 devices"):
            game.deal([0], [too_large])
    with pytest.raises(UserError, match="at least one table"):
        Deck(EstimatedCosts(model, 1024), [])
