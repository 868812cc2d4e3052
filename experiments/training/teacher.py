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

from autoshard.cost_model import EstimatedCosts
from autoshard.cost_model.outlook import Placed
from autoshard.cost_model.training import one_thread
from autoshard.envs import Deal, Deck, Layout, ShardingGame
from autoshard.experiments.training.setting import Setting
from autoshard.sharders import LocalSearch
from autoshard.sharders.player import Player, Way
from autoshard.sharders.policy_network import PolicyNetwork, PolicyShape
from autoshard.workload import PlanError, ShardingTask
from autoshard.workload.packing import pack

_KICKS = 2  # of the search: its first optimum is what matters
_DRAWN = 7  # plans of the policy beside its best guess
_SEARCHED = 2  # of these: what the search may start from


@dataclass(frozen=True)
class Lessons:
    """Choices: what a player saw [choices, size], and which actions were right [choices,
    devices + 1]; devices that are alike share a label.
    """

    seen: Tensor
    right: Tensor


class Teacher:
    """Makes lessons; several may, each in a process of its own.

    Args:
        setting: tables, and who deals.
        shape: of the policy.
    """

    def __init__(self, setting: Setting, shape: PolicyShape) -> None:
        self._oracle = EstimatedCosts(setting.model, setting.batch_size)
        whole = [table.whole() for table in setting.tables]
        self._deck = Deck(self._oracle, whole, split=True)
        self._generator = setting.generator
        self._network = PolicyNetwork(shape).eval()

    @one_thread()
    def lessons(self, weights: Mapping[str, Any], count: int, seed: int) -> Lessons:
        """Of so many tasks, by the policy with these weights."""
        self._network.load_state_dict(weights)
        rng = np.random.default_rng(seed)
        deals = self._generator.many(self._deck, rng, count)
        seeds = rng.integers(2**31, size=count).tolist()
        tasks = [self._deck.task(deal) for deal in deals]
        plans = [self._planned(task, seed) for task, seed in zip(tasks, seeds, strict=True)]
        some = [(deal, plan) for deal, plan in zip(deals, plans, strict=True) if plan is not None]
        return replayed(self._deck, some, Layout(self._generator.most_devices))

    def _planned(self, task: ShardingTask, seed: int) -> Placed | None:
        """What the search makes of the policy's best; None where there is no plan to improve."""
        player, rng = Player(self._network, self._oracle), torch.Generator().manual_seed(seed)
        played = player.play(task, [Way(), *[Way(drawn=True)] * _DRAWN], rng=rng)
        starts: list[Placed] = [game.placed for game in sorted(played, key=lambda g: g.plan_ms)]
        if not starts:
            try:
                starts = [pack(task, split=True)]
            except PlanError:
                return None
        search = LocalSearch(self._oracle, kicks=_KICKS, seed=seed)
        return search.improve(task, starts[:_SEARCHED])[0]


def replayed(deck: Deck, planned: Sequence[tuple[Deal, Placed]], layout: Layout) -> Lessons:
    """What a player sees and should do on the way to plans, as far as the game leads there."""
    deals = [deal for deal, _ in planned]
    most = max((len(deal.pieces) for deal in deals), default=0)
    game = ShardingGame(deck, len(deals), most, layout.max_devices, most)
    game.deal(range(len(deals)), deals)
    left: list[dict[tuple[str, int], list[int]]] = []
    for _, plan in planned:
        homes: dict[tuple[str, int], list[int]] = defaultdict(list)
        for piece, device in plan:
            homes[piece.table.name, piece.width].append(device)
        left.append(homes)
    seen = [torch.zeros(0, layout.size)]
    right = [torch.zeros(0, layout.max_devices + 1, dtype=torch.bool)]
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
            may = torch.cat([game.allowed[seat], game.halvable[seat : seat + 1]])
            good &= may
            if not bool(good.any()):  # what the search could do and a player cannot
                actions[seat] = int(may.int().argmax())
            elif int(may.sum()) > 1:
                seen.append(observed[seat, None])
                right.append(good[None])
        game.place(actions.clamp_min(0), actions >= 0)
    return Lessons(torch.cat(seen), torch.cat(right))


def _alike(game: ShardingGame, seat: int, device: int) -> Tensor:
    """The devices on which the current piece changes the same: of empty ones those as large."""
    same = torch.zeros(game.max_devices, dtype=torch.bool)
    same[device] = True
    empty = game.free[seat] == game.capacity[seat]
    if bool(empty[device]):
        same |= empty & game.exists[seat] & (game.capacity[seat] == game.capacity[seat, device])
    return same
