"""Playing the game with a policy: many plans of one task at once."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from autoshard.cost_model import EstimatedCosts
from autoshard.envs import Deal, Deck, Layout, ShardingGame
from autoshard.envs.deck import Demands
from autoshard.sharders.policy_network import PolicyNetwork, Style
from autoshard.sharders.shield import Shield
from autoshard.workload import ShardingTask, TableSlice
from autoshard.workload.terms import Terms

# Beside what was learned, in the order in which they gain most: of 42, on validation tasks of
# twelve families, one style alone is 2.5 % worse than the best of all, two are 0.8 %, four 0.2 %.
_OTHERS = (
    Style(0, 0, 1.5), Style(0, 0, 0.25), Style(1, 0, 1.5), Style(0, 0, 0.75), Style(1, 1, 0.25),
)  # fmt: skip
_FEWEST = 2  # styles, however many devices there are
_ROWS = 96  # devices of all games: to price so many takes hardly longer than those of one


@dataclass(frozen=True)
class Played:
    """A finished game: slices and their devices, and what a step of that plan is estimated to
    take.
    """

    placed: tuple[tuple[TableSlice, int], ...]
    plan_ms: float


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
        it with `rng`. `split` games may halve tables, if the policy does.
        `shielded` games are of whole tables and end well wherever first fit decreasing packs them;
        they take longer, and know of no rules.
        """
        sure, games = len(styles), len(styles) + drawn
        bundles = Terms(task).bundles()
        split = split and self._network.shape.halves and not shielded and len(task.devices) > 1
        deck = Deck(self._oracle, bundles, split)
        tables, devices = len(bundles), len(task.devices)
        deal = Deal(np.arange(tables), task.room_bytes, Demands.of(task, bundles), task.objective)
        game = ShardingGame(deck, games, tables, devices, tables if split else 0)
        game.deal(range(games), [deal] * games)
        layout = Layout(devices)
        told = torch.tensor([*styles, *[Style()] * drawn])
        shields = [Shield(game, seat) for seat in range(game.seats)] if shielded else []
        while not bool(game.over.all()):
            logits, _ = self._network(layout.parts(game), told)
            chosen = logits.argmax(1)
            if rng is not None:
                noise = torch.empty_like(logits).exponential_(generator=rng)
                chosen[sure:] = (logits - noise.log()).argmax(1)[sure:]  # Gumbel's way to draw
            for seat, shield in enumerate(shields):
                if shield.holds:
                    preferred = logits[seat, :devices].argsort(descending=True).tolist()
                    chosen[seat] = shield.choose(preferred)
            game.place(chosen)
        plan_ms = game.plan_ms.tolist()
        return [
            Played(tuple(game.placed_slices(seat)), plan_ms[seat])
            for seat in range(games)
            if not game.stuck[seat]
        ]
