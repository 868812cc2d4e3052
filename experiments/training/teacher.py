"""Lessons: what a player should have done, by plans that were searched for.

A teacher draws tasks as training does, takes the policy's own best plan of each, improves it by a
local search, and plays it again on the game: what the plan does with each piece is what was right.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autoshard.cost_model import CostModel, EstimatedCosts
from autoshard.cost_model.outlook import Placed
from autoshard.cost_model.training import one_thread
from autoshard.envs import Deal, Deck, Generator, Layout, ShardingGame
from autoshard.sharders import LocalSearch
from autoshard.sharders.player import Player
from autoshard.sharders.policy_network import PolicyNetwork, PolicyShape
from autoshard.workload import Device, EmbeddingTable, PlanError, ShardingTask
from autoshard.workload.packing import pack

_KICKS = 2  # of the search: its first optimum is what matters
_DRAWN = 7  # plans of the policy beside its best guess


@dataclass(frozen=True)
class Lessons:
    """Choices that were right: observations [choices, size] and, of each, the actions that were
    [choices, devices + 1]; devices that are alike share a place.

    `gain`: what the plans that were found take over the policy's own, in the mean.
    """

    observations: Tensor
    right: Tensor
    gain: float


def task_of(deck: Deck, deal: Deal) -> ShardingTask:
    """A deal of whole tables as a task."""
    tables = tuple(deck.bundles[number].slices[0].table for number in deal.pieces)
    devices = tuple(Device(f"device{n}", int(m)) for n, m in enumerate(deal.memory_bytes))
    return ShardingTask(tables, devices, deck.batch_size, deck.operator, objective=deal.objective)


class Teacher:
    """Makes lessons; several may, each in a process of its own.

    Args:
        model: what plans cost.
        tables: that tasks are dealt from.
        batch_size: samples.
        generator: deals.
        shape: of the policy.
        max_devices: of the observations.
    """

    def __init__(
        self,
        model: CostModel,
        tables: Sequence[EmbeddingTable],
        batch_size: int,
        generator: Generator,
        shape: PolicyShape,
    ) -> None:
        self._oracle = EstimatedCosts(model, batch_size)
        self._deck = Deck(self._oracle, [table.whole() for table in tables], split=True)
        self._generator = generator
        self._network = PolicyNetwork(shape).eval()

    @one_thread()
    def lessons(self, weights: Mapping[str, Any], count: int, seed: int) -> Lessons:
        """Of so many tasks, by the policy with these weights."""
        self._network.load_state_dict(weights)
        rng = np.random.default_rng(seed)
        deals = [self._generator(self._deck, rng) for _ in range(count)]
        plans, ratios = [], []
        for deal in deals:
            task = task_of(self._deck, deal)
            own, best = self._planned(task, int(rng.integers(2**31)))
            plans.append(best)
            ratios.append(own)
        told = replayed(self._deck, deals, plans, Layout(self._generator.most_devices))
        return Lessons(*told, float(np.mean([r for r in ratios if r is not None] or [1.0])))

    def _planned(self, task: ShardingTask, seed: int) -> tuple[float | None, Placed]:
        """What the best plan takes over the policy's own, and that plan."""
        player, rng = Player(self._network, self._oracle), torch.Generator().manual_seed(seed)
        played = player.play(task, 1 + _DRAWN, rng=rng)
        starts: list[Placed] = [game.placed for game in sorted(played, key=lambda g: g.plan_ms)[:2]]
        if not starts:
            try:
                starts = [pack(task, split=True)]
            except PlanError:
                return None, []
        return None, LocalSearch(self._oracle, kicks=_KICKS, seed=seed).improve(task, starts)[0]


def replayed(
    deck: Deck, deals: Sequence[Deal], plans: Sequence[Placed], layout: Layout
) -> tuple[Tensor, Tensor]:
    """What a player sees and should do on the way to these plans; plans that halving does not lead
    to, and empty ones, teach as far as they go.

    Returns observations [choices, size] and right actions [choices, devices + 1].
    """
    most = max(len(deal.pieces) for deal in deals)
    game = ShardingGame(deck, len(deals), most, layout.max_devices, most)
    game.deal(range(len(deals)), deals)
    left: list[dict[tuple[str, int], list[int]]] = []
    for plan in plans:
        homes: dict[tuple[str, int], list[int]] = defaultdict(list)
        for piece, device in plan:
            homes[piece.table.name, piece.width].append(device)
        left.append(homes)
    seen, right = [], []
    while not bool(game.over.all()):
        observed = layout.observe(game)
        actions = torch.full((len(deals),), -1)
        for seat in (~game.over).nonzero()[:, 0].tolist():
            piece = deck.bundles[int(game.current[seat])].slices[0]
            devices = left[seat].get((piece.table.name, piece.width), [])
            good = torch.zeros(layout.max_devices + 1, dtype=torch.bool)
            if devices:
                for device in devices:
                    good[:-1] |= _alike(game, seat, device)
                actions[seat] = devices.pop(0)
            else:
                actions[seat] = game.halve_action
                good[-1] = True
            good &= torch.cat([game.allowed[seat], game.halvable[seat : seat + 1]])
            choices = int(game.allowed[seat].sum()) + int(game.halvable[seat])
            if choices > 1 and bool(good.any()):
                seen.append(observed[seat])
                right.append(good)
        game.place(actions.clamp_min(0), actions >= 0)
    return torch.stack(seen), torch.stack(right)


def _alike(game: ShardingGame, seat: int, device: int) -> Tensor:
    """The devices on which the current piece changes the same: of empty ones those as large."""
    same = torch.zeros(game.max_devices, dtype=torch.bool)
    same[device] = True
    empty = game.free[seat] == game.capacity[seat]
    if bool(empty[device]):
        same |= empty & game.exists[seat] & (game.capacity[seat] == game.capacity[seat, device])
    return same
