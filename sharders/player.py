"""Playing the game with a policy: many plans of one task at once."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from autoshard.cost_model import EstimatedCosts
from autoshard.envs import Deal, Deck, Layout, ShardingGame
from autoshard.sharders.groups import DEVICES, Group, in_groups
from autoshard.sharders.policy_network import FORBIDDEN, PolicyNetwork, Style
from autoshard.workload import ShardingTask, TableSlice
from autoshard.workload.admission import RuleMasks
from autoshard.workload.step_price import Floats

# Beside what was learned, in the order in which they gain most: of 42, on validation tasks of
# twelve families, one style alone is 2.5 % worse than the best of all, two are 0.8 %, four 0.2 %.
_OTHERS = (
    Style(0, 0, 1.5), Style(0, 0, 0.25), Style(1, 0, 1.5), Style(0, 0, 0.75), Style(1, 1, 0.25),
)  # fmt: skip
# What one other choice wins beside all styles, on such tasks of 4 and of 8 devices: twelve games
# that make it 0.9 % (eighteen 1.0 %, 42 1.35 %), in three styles more than in two or in all.
_TURNED = 3
_FEWEST = 2  # games, however many devices there are
_ROWS, _WIDE_ROWS = 192, 384  # devices of all games: to price so many takes little longer
# Tasks of more devices, most of them in groups, win nothing by another choice.
_MANY, _ROWS_OF_MANY = 2 * DEVICES - 1, 96
_APART = 0.04  # beyond the middle group: those that take longer are evened out with fast ones
_ALIKE = 0.01  # logits less apart: mostly devices alike, which make no other plan
_NEVER = -1
_PLAN_MS = attrgetter("plan_ms")


class Way(NamedTuple):
    """How a game is played.

    Args:
        style: of the policy.
        turn: the step, counted from 0, at which the second best choice is taken; by default none.
        drawn: by lot in place of the best choice.
    """

    style: Style = Style()
    turn: int = _NEVER
    drawn: bool = False


@dataclass(frozen=True, eq=False)
class _Ended:
    """A group's game that has ended.

    Args:
        group: whose it was.
        placed: slices, and their devices in the task.
        waits_ms: before each, what the slowest device of the group spends.
        plan_ms: what a step of the group takes; infinite at a dead end.
    """

    group: Group
    placed: tuple[tuple[TableSlice, int], ...]
    waits_ms: Floats
    plan_ms: float

    @staticmethod
    def of(game: ShardingGame, seat: int, group: Group) -> "_Ended":
        waits = game.waits_ms[seat].amax(0).double().numpy()
        homes = group.devices.tolist()
        placed = tuple((piece, homes[home]) for piece, home in game.placed_slices(seat))
        return _Ended(group, placed, waits, math.inf if game.stuck[seat] else float(waits.sum()))


@dataclass(frozen=True)
class Played:
    """A finished game.

    Args:
        placed: slices and their devices.
        plan_ms: what a step of that plan is estimated to take; infinite at a dead end.
        way: which of those that were asked for it was played in; 0 if it was made of several.
    """

    placed: tuple[tuple[TableSlice, int], ...]
    plan_ms: float
    way: int

    @staticmethod
    def together(games: Sequence[_Ended], way: int = 0) -> "Played":
        """Of games of all groups of a task."""
        waits = np.max([game.waits_ms for game in games], axis=0)
        placed = tuple(piece for game in games for piece in game.placed)
        ended_well = max(map(_PLAN_MS, games)) < math.inf
        return Played(placed, float(waits.sum()) if ended_well else math.inf, way)


class Player:
    """Plays with a network.

    Args:
        network: scores devices.
        oracle: prices them.
    """

    def __init__(self, network: PolicyNetwork, oracle: EstimatedCosts) -> None:
        self._network = network
        self._oracle = oracle

    @property
    def styles(self) -> list[Style]:
        """What tasks are played in: first as learned; then those of others that find better plans
        most often.
        """
        shape = self._network.shape
        if shape.sharpness == 0:  # there is nothing but what was learned
            return [Style()]
        found = [Style(), *_OTHERS]
        if not self._network.has_deviated:
            found = [style._replace(learned=0) for style in found]
        if not shape.halves:
            found = [style._replace(elsewhere=1) for style in found]
        return list(dict.fromkeys(found))

    def ways(self, tables: int, devices: int, wide: bool = False) -> list[Way]:
        """To play a task of that size in one batch: in all styles, then with another choice once,
        as early as may be. As many as take little longer than one; more where `wide`. What was
        learned from nothing is played as it is, unless `wide`.
        """
        styles = self.styles
        if devices == 1 or (len(styles) == 1 and not wide):
            return [Way(styles[0])]
        rows = _ROWS_OF_MANY if devices > _MANY else _WIDE_ROWS if wide else _ROWS
        most = max(_FEWEST, rows // devices)
        turns = range(min(tables, most))
        ways = [Way(style, turn) for turn in turns for style in styles[:_TURNED]]
        return [*map(Way, styles), *ways][:most]

    @torch.inference_mode()
    def play(
        self,
        task: ShardingTask,
        ways: Sequence[Way] = (Way(),),
        split: bool = True,
        rng: torch.Generator | None = None,
    ) -> list[Played]:
        """Plans of a task, in all these ways; games that end at a dead end are left out.

        `split` games may halve tables, if the policy does. Ways that are drawn need `rng`, and one
        beside them that is not; of a task that is played in groups only the best of these others
        is handed out.
        """
        assert rng is not None or not any(way.drawn for way in ways)
        masks = RuleMasks(task)
        bundles = masks.units
        split = split and self._network.shape.halves and len(task.devices) > 1
        deck = Deck(self._oracle, bundles, split)
        rules = masks if masks.any else None
        deal = Deal(np.arange(len(bundles)), task.room_bytes, rules, task.objective)
        whole = Group(np.arange(len(task.devices)), deal)
        groups = in_groups(deck, whole)
        ended = self._ended(deck, groups, ways, split, rng)
        played = [Played.together(games, number) for number, games in enumerate(ended)]
        if len(groups) > 1:
            sure = [number for number, way in enumerate(ways) if not way.drawn]
            each = zip(*(ended[number] for number in sure), strict=True)
            best = [min(games, key=_PLAN_MS) for games in each]
            evened = self._evened_out(deck, best, [ways[number] for number in sure], split)
            # What is best for each group need not be for all together, whose waits add up.
            mixed = [Played.together(games) for games in (best, evened)]
            drawn = [played[number] for number, way in enumerate(ways) if way.drawn]
            played = [min((*(played[n] for n in sure), *mixed), key=_PLAN_MS), *drawn]
        return [game for game in played if game.plan_ms < math.inf]

    def _evened_out(
        self, deck: Deck, ended: Sequence[_Ended], ways: Sequence[Way], split: bool
    ) -> list[_Ended]:
        """The slowest groups, each played once more in one with a fast one; and those that have no
        plan, until they have one.
        """
        ranked = sorted(ended, key=_PLAN_MS)
        bar = (1 + _APART) * ranked[(len(ranked) - 1) // 2].plan_ms
        while True:
            pairs = []
            while len(ranked) > 1 and (ranked[-1].plan_ms > bar or ranked[-1].plan_ms == math.inf):
                pairs.append((ranked.pop(0), ranked.pop()))
            if not pairs:
                return ranked
            groups = [fast.group.with_(slow.group) for fast, slow in pairs]
            found = self._ended(deck, groups, ways, split)
            for (fast, slow), of_group in zip(pairs, zip(*found, strict=True), strict=True):
                both = min(of_group, key=_PLAN_MS)
                ranked += [both] if both.plan_ms <= slow.plan_ms else [fast, slow]
            ranked.sort(key=_PLAN_MS)
            bar = math.inf  # once more takes twice as long, and wins next to nothing

    def _ended(
        self,
        deck: Deck,
        groups: Sequence[Group],
        ways: Sequence[Way],
        split: bool,
        rng: torch.Generator | None = None,
    ) -> list[list[_Ended]]:
        """Games of each group in all ways: [ways][groups]."""
        deals = [group.deal for group in groups]
        tables = max(len(deal.pieces) for deal in deals)
        devices = max(len(group.devices) for group in groups)
        games = len(ways) * len(groups)
        game = ShardingGame(deck, games, tables, devices, tables if split else 0)
        game.deal(range(games), deals * len(ways))
        layout = Layout(devices)
        told, turns, by_lot = (
            torch.tensor(each).repeat_interleave(len(groups), 0) for each in zip(*ways, strict=True)
        )
        last_turn = int(turns.max())
        for step in count():
            if bool(game.over.all()):
                break
            logits, _ = self._network(layout.parts(game), told)
            chosen = logits.argmax(1)
            if step <= last_turn:
                chosen = torch.where(turns == step, second_best(logits), chosen)
            if rng is not None:
                noise = torch.empty_like(logits).exponential_(generator=rng)
                drawn = (logits - noise.log()).argmax(1)  # Gumbel's way to draw
                chosen = torch.where(by_lot, drawn, chosen)
            game.place(chosen)
        return [
            [
                _Ended.of(game, way * len(groups) + number, each)
                for number, each in enumerate(groups)
            ]
            for way in range(len(ways))
        ]


def second_best(logits: Tensor) -> Tensor:
    """The choice that makes another plan than the best, and comes next: [games]. The best where
    there is no other.
    """
    most, best = logits.max(1)
    second, other = logits.masked_fill(logits > most[:, None] - _ALIKE, FORBIDDEN).max(1)
    return torch.where(second > FORBIDDEN, other, best)
