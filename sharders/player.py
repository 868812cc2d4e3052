"""Playing the game with a policy: many plans of one task at once."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import torch

from autoshard.cost_model import EstimatedCosts
from autoshard.envs import Deal, Deck, Layout, ShardingGame
from autoshard.envs.deck import Demands
from autoshard.sharders.groups import Group, in_groups
from autoshard.sharders.policy_network import PolicyNetwork, Style
from autoshard.sharders.shield import Shield
from autoshard.workload import ShardingTask, TableSlice
from autoshard.workload.objective import Floats
from autoshard.workload.terms import Terms

# Beside what was learned, in the order in which they gain most: of 42, on validation tasks of
# twelve families, one style alone is 2.5 % worse than the best of all, two are 0.8 %, four 0.2 %.
_OTHERS = (
    Style(0, 0, 1.5), Style(0, 0, 0.25), Style(1, 0, 1.5), Style(0, 0, 0.75), Style(1, 1, 0.25),
)  # fmt: skip
_FEWEST = 2  # styles, however many devices there are
_ROWS = 96  # devices of all games: to price so many takes hardly longer than those of one
_APART = 0.04  # beyond the middle group: those that take longer are evened out with fast ones
_PLAN_MS = attrgetter("plan_ms")


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
    """A finished game: slices and their devices, what a step of that plan is estimated to take
    (infinite at a dead end), and whether it was drawn.
    """

    placed: tuple[tuple[TableSlice, int], ...]
    plan_ms: float
    drawn: bool

    @staticmethod
    def together(games: Sequence[_Ended], drawn: bool) -> "Played":
        """Of games of all groups of a task."""
        waits = np.max([game.waits_ms for game in games], axis=0)
        placed = tuple(piece for game in games for piece in game.placed)
        ended_well = max(map(_PLAN_MS, games)) < math.inf
        return Played(placed, float(waits.sum()) if ended_well else math.inf, drawn)


class Player:
    """Plays with a network.

    Args:
        network: scores devices.
        oracle: prices them.
    """

    def __init__(self, network: PolicyNetwork, oracle: EstimatedCosts) -> None:
        self._network = network
        self._oracle = oracle

    def styles(self, devices: int) -> list[Style]:
        """In which a task of so many devices is played: first as learned; then those of others that
        find better plans most often, as many as cost little beside one.
        """
        shape = self._network.shape
        if shape.sharpness == 0 or devices == 1:  # there is nothing but what was learned
            return [Style()]
        found = [Style(), *_OTHERS]
        if not self._network.has_deviated:
            found = [style._replace(learned=0) for style in found]
        if not shape.halves:
            found = [style._replace(elsewhere=1) for style in found]
        return list(dict.fromkeys(found))[: max(_FEWEST, _ROWS // devices)]

    @torch.inference_mode()
    def play(
        self,
        task: ShardingTask,
        styles: Sequence[Style] = (Style(),),
        drawn: int = 0,
        split: bool = True,
        rng: torch.Generator | None = None,
        shielded: bool = False,
    ) -> list[Played]:
        """Plans of a task; games that end at a dead end are left out.

        A game is played in each of the styles as the policy thinks best, and so many are drawn from
        it with `rng`. `split` games may halve tables, if the policy does. Of a task that is played
        in groups only the best of all styles is handed out.
        `shielded` games are of whole tables and end well wherever first fit decreasing packs them;
        they take longer, and know of no rules.
        """
        bundles = Terms(task).bundles()
        split = split and self._network.shape.halves and not shielded and len(task.devices) > 1
        deck = Deck(self._oracle, bundles, split)
        demands = Demands.of(task, bundles)
        deal = Deal(np.arange(len(bundles)), task.room_bytes, demands, task.objective)
        whole = Group(np.arange(len(task.devices)), deal)
        groups = [whole] if shielded else in_groups(deck, whole)
        ended = self._ended(deck, groups, styles, split, drawn, rng, shielded)
        sure = [Played.together(games, drawn=False) for games in ended[: len(styles)]]
        if len(groups) > 1:
            best = [min(games, key=_PLAN_MS) for games in zip(*ended[: len(styles)], strict=True)]
            evened = self._evened_out(deck, best, styles, split)
            # What is best for each group need not be for all together, whose waits add up.
            mixed = [Played.together(games, drawn=False) for games in (best, evened)]
            sure = [min((*sure, *mixed), key=_PLAN_MS)]
        others = [Played.together(games, drawn=True) for games in ended[len(styles) :]]
        return [played for played in (*sure, *others) if played.plan_ms < math.inf]

    def _evened_out(
        self, deck: Deck, ended: Sequence[_Ended], styles: Sequence[Style], split: bool
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
            found = self._ended(deck, groups, styles, split)
            for (fast, slow), of_group in zip(pairs, zip(*found, strict=True), strict=True):
                both = min(of_group, key=_PLAN_MS)
                ranked += [both] if both.plan_ms <= slow.plan_ms else [fast, slow]
            ranked.sort(key=_PLAN_MS)
            bar = math.inf  # once more takes twice as long, and wins next to nothing

    def _ended(
        self,
        deck: Deck,
        groups: Sequence[Group],
        styles: Sequence[Style],
        split: bool,
        drawn: int = 0,
        rng: torch.Generator | None = None,
        shielded: bool = False,
    ) -> list[list[_Ended]]:
        """Games of each group in all styles, then those that are drawn: [ways][groups]."""
        ways = [*styles, *[Style()] * drawn]
        deals = [group.deal for group in groups]
        tables = max(len(deal.pieces) for deal in deals)
        devices = max(len(group.devices) for group in groups)
        games = len(ways) * len(groups)
        game = ShardingGame(deck, games, tables, devices, tables if split else 0)
        game.deal(range(games), deals * len(ways))
        layout, told = Layout(devices), torch.tensor(ways).repeat_interleave(len(groups), 0)
        shields = [Shield(game, seat) for seat in range(games)] if shielded else []
        by_lot = slice(len(styles) * len(groups), None)
        while not bool(game.over.all()):
            logits, _ = self._network(layout.parts(game), told)
            chosen = logits.argmax(1)
            if rng is not None:
                noise = torch.empty_like(logits).exponential_(generator=rng)
                chosen[by_lot] = (logits - noise.log()).argmax(1)[by_lot]  # Gumbel's way to draw
            for seat, shield in enumerate(shields):
                if shield.holds:
                    preferred = logits[seat, :devices].argsort(descending=True).tolist()
                    chosen[seat] = shield.choose(preferred)
            game.place(chosen)
        return [
            [
                _Ended.of(game, way * len(groups) + number, each)
                for number, each in enumerate(groups)
            ]
            for way in range(len(ways))
        ]
