"""What a player sees, and what makes no difference to it."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plays import AMPLE, AtRandom, Sketch, deal, game_of, seeds, sketches
from torch import Tensor

from autoshard.cost_model import CostModel, EstimatedCosts
from autoshard.envs import Deal, Deck, Layout, ShardingGame
from autoshard.envs.observation import DESCRIBED, DEVICE, DEVICE_PARTS
from autoshard.workload import EmbeddingTable

PER_DEVICE = ("devices", "exists", "allowed")


@pytest.fixture(scope="module")
def decks_of_bytes(model: CostModel, many_tables: tuple[EmbeddingTable, ...]) -> tuple[Deck, Deck]:
    """The same tables, and the same with twice the bytes."""
    lean, full = (Deck.of_tables(model, many_tables, 1024) for _ in range(2))
    full.bytes, full.sizes = 2 * full.bytes, 2 * full.sizes
    full.learn(EstimatedCosts(model, 1024))
    return lean, full


def seen_of(game: ShardingGame) -> dict[str, Tensor]:
    layout = Layout(game.max_devices)
    return layout.split(layout.observe(game))


def same(first: Tensor, second: Tensor) -> None:
    torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-4, equal_nan=True)


@given(max_devices=st.integers(1, 9), batch=st.lists(st.integers(1, 3), max_size=2))
def test_the_parts_are_the_whole_vector(max_devices: int, batch: list[int]) -> None:
    layout = Layout(max_devices)
    rng = np.random.default_rng(max_devices)
    vectors = rng.random((*batch, layout.size)).astype(np.float32)
    arrays, tensors = layout.split(vectors), layout.split(torch.from_numpy(vectors))
    for parts in (arrays, tensors):
        assert {name: part.shape[len(batch) :] for name, part in parts.items()} == layout.shapes
        whole = [np.asarray(part).reshape(*batch, -1) for part in parts.values()]
        np.testing.assert_array_equal(np.concatenate(whole, axis=-1), vectors)
    assert all(isinstance(part, Tensor) for part in tensors.values())
    assert arrays["devices"].shape[-2] == max_devices


def test_parts_are_views() -> None:
    layout = Layout(3)
    vector = np.zeros(layout.size, np.float32)
    layout.split(vector)["allowed"][:] = 1
    assert vector.sum() == 3


def test_what_is_seen_is_new_memory(deck: Deck) -> None:
    game = game_of(deck, deal([3, 8], AMPLE, AMPLE))
    layout = Layout(2)
    first = layout.observe(game)
    copy = first.clone()
    game.place(torch.tensor([0]))
    assert torch.equal(first, copy)
    assert not torch.equal(layout.observe(game), copy)


@given(sketch=sketches(), seed=seeds)
def test_masks_and_progress_are_those_of_the_game(deck: Deck, sketch: Sketch, seed: int) -> None:
    game, choose = game_of(deck, sketch.on(deck)), AtRandom([seed])
    while True:
        seen = seen_of(game)
        assert torch.equal(seen["exists"].bool(), game.exists)
        assert torch.equal(seen["allowed"].bool(), game.allowed)
        assert float(seen["progress"][0, 0]) == pytest.approx(
            int(game.placed[0]) / len(sketch.pieces)
        )
        if game.over.all():
            break
        game.place(choose(game))


@pytest.mark.parametrize(("tables", "devices"), [(1, 2), (1, 4), (2, 4), (3, 2)])
def test_however_few_the_tables_are_what_is_seen_is_finite(
    deck: Deck, tables: int, devices: int
) -> None:
    game = game_of(deck, deal(range(tables), *[AMPLE] * devices))
    layout = Layout(devices)
    assert (game.pace_ms > 0).all()
    while True:
        assert layout.observe(game).isfinite().all()
        if game.over.all():
            break
        game.place(torch.zeros(1, dtype=torch.int64))


@given(sketch=sketches(devices=(2, 4)), seed=seeds, data=st.data())
def test_devices_in_another_order_are_seen_in_that_order(
    deck: Deck, sketch: Sketch, seed: int, data: st.DataObject
) -> None:
    dealt = sketch.on(deck)
    order = data.draw(st.permutations(range(len(sketch.weights))))
    mixed = Deal(dealt.pieces, dealt.memory_bytes[order])
    game, other, choose = game_of(deck, dealt), game_of(deck, mixed), AtRandom([seed])
    while True:
        mine, yours = seen_of(game), seen_of(other)
        for name, part in mine.items():
            same(part[:, order] if name in PER_DEVICE else part, yours[name])
        assert torch.equal(game.over, other.over)
        if game.over.all():
            break
        device = choose(game)
        game.place(device)
        other.place(torch.tensor([order.index(int(device[0]))]))


@given(sketch=sketches(), seed=seeds)
def test_the_order_of_the_deal_is_not_seen(deck: Deck, sketch: Sketch, seed: int) -> None:
    dealt = sketch.on(deck)
    game = game_of(deck, dealt)
    other = game_of(deck, Deal(dealt.pieces[::-1].copy(), dealt.memory_bytes))
    choosers = AtRandom([seed]), AtRandom([seed])
    while not game.over.all():
        mine, yours = seen_of(game), seen_of(other)
        for name, part in mine.items():
            same(part, yours[name])
        for player, chooser in zip((game, other), choosers, strict=True):
            player.place(chooser(player))


@given(sketch=sketches(), seed=seeds)
def test_only_shares_of_the_memory_are_seen(
    decks_of_bytes: tuple[Deck, Deck], sketch: Sketch, seed: int
) -> None:
    """Tables with twice the bytes on devices with twice the memory look the same."""
    decks = decks_of_bytes
    assert (decks[1].bytes == 2 * decks[0].bytes).all()
    small = sketch.on(decks[0])
    game = game_of(decks[0], small)
    other = game_of(decks[1], Deal(small.pieces, 2 * small.memory_bytes))
    choose = AtRandom([seed])
    while True:
        for name, part in seen_of(game).items():
            same(part, seen_of(other)[name])
        if game.over.all():
            break
        device = choose(game)
        game.place(device)
        other.place(device)


def test_a_task_twice_as_large_looks_alike(
    model: CostModel, many_tables: tuple[EmbeddingTable, ...]
) -> None:
    """Each table twice, on twice the devices: what is placed and the devices look the same."""
    twins = [table for table in many_tables[:20] for _ in range(2)]
    deck = Deck.of_tables(model, twins, 1024)
    memory = int(deck.bytes[::2].sum())
    small = game_of(deck, deal(range(0, 40, 2), *[memory] * 2))
    large = game_of(deck, deal(range(40), *[memory] * 4))
    assert (seen_of(small)["progress"] < seen_of(large)["progress"])[0].tolist() == [0, 1, 1]
    norm = DESCRIBED + DEVICE_PARTS.index("soft_after")
    assert norm == DEVICE - 1
    for device in (0, 1, 1, 0, 1):
        once, twice = seen_of(small), seen_of(large)
        for name in ("table", "rest"):
            same(once[name], twice[name])
        for half in (slice(0, 2), slice(2, 4)):
            # The norm is of all devices: of more of them it is another.
            same(once["devices"][..., :norm], twice["devices"][:, half, :norm])
        small.place(torch.tensor([device]))
        large.place(torch.tensor([device]))
        large.place(torch.tensor([device + 2]))
