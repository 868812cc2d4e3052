"""Deals, and ways to play them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from autoshard.envs import Deal, Deck, ShardingGame

few, fewest = settings(max_examples=25), settings(max_examples=8)  # for what takes long

AMPLE = 2**50  # bytes: more than any tables take


@dataclass(frozen=True)
class Sketch:
    """A deal before its deck is known. Devices have `fill` times what the tables take in all."""

    pieces: tuple[int, ...]
    weights: tuple[float, ...]
    fill: float

    def on(self, deck: Deck) -> Deal:
        pieces, shares = np.array(self.pieces), np.array(self.weights)
        memory = deck.bytes[pieces].sum() * self.fill * shares / shares.sum()
        return Deal(pieces, memory.astype(np.int64) + 1)


def sketches(
    tables: tuple[int, int] = (1, 9), devices: tuple[int, int] = (1, 4), tightest: float = 0.8
) -> st.SearchStrategy[Sketch]:
    """Of the deck's first 100 tables: with `tightest` below 1 some of them cannot be solved."""
    pieces = st.lists(st.integers(0, 99), min_size=tables[0], max_size=tables[1], unique=True).map(
        tuple
    )
    weights = st.lists(st.floats(0.2, 1), min_size=devices[0], max_size=devices[1]).map(tuple)
    return st.builds(Sketch, pieces, weights, st.floats(tightest, 3))


ragged = st.lists(sketches(), min_size=1, max_size=4)
seeds = st.integers(0, 999)


def deal(pieces: Sequence[int], *memory_bytes: int) -> Deal:
    return Deal(np.array(pieces), np.array(memory_bytes))


def game_of(deck: Deck, *deals: Deal, halvings: int = 0) -> ShardingGame:
    """A game just large enough."""
    most_tables = max(len(deal.pieces) for deal in deals)
    most_devices = max(len(deal.memory_bytes) for deal in deals)
    game = ShardingGame(deck, len(deals), most_tables, most_devices, halvings)
    game.deal(range(len(deals)), deals)
    return game


class AtRandom:
    """Some allowed device for each seat, or halving where that is allowed, which a seat prefers as
    often as `halving` says; a seat chooses the same whoever sits beside it.
    """

    def __init__(self, seeds: Sequence[int], halving: float = 0.0) -> None:
        self._rngs = [np.random.default_rng(seed) for seed in seeds]
        self._halving = halving

    def __call__(self, game: ShardingGame) -> Tensor:
        chosen = []
        for seat, rng in enumerate(self._rngs):
            devices = game.allowed[seat].nonzero()[:, 0].tolist()
            halves, where = rng.random() < self._halving, rng.random()
            if game.halvable[seat] and (halves or not devices):
                chosen.append(game.halve_action)
            else:
                chosen.append(devices[int(where * len(devices))] if devices else 0)
        return torch.tensor(chosen)


def greedily(game: ShardingGame) -> Tensor:
    """Where the table makes the cheapest device."""
    return game.joined_ms.masked_fill(~game.allowed, torch.inf).argmin(1)
