"""Playing the game with a policy: many plans of one task at once."""

from dataclasses import dataclass

import numpy as np
import torch

from autoshard.cost_model import EstimatedCosts
from autoshard.envs import Deal, Deck, Layout, ShardingGame
from autoshard.envs.deck import Demands
from autoshard.sharders.policy_network import PolicyNetwork
from autoshard.sharders.shield import Shield
from autoshard.workload import ShardingTask, TableSlice
from autoshard.workload.terms import Terms


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

    @property
    def sure(self) -> int:
        """Games that are not drawn: side by side with what it began as, a policy loses nothing
        where it has learned wrong.
        """
        return 2 if self._network.has_deviated else 1

    @torch.inference_mode()
    def play(
        self,
        task: ShardingTask,
        games: int = 1,
        split: bool = True,
        rng: torch.Generator | None = None,
        shielded: bool = False,
    ) -> list[Played]:
        """Plans of a task; games that end at a dead end are left out.

        The first game is played as the policy thinks best, and so is the second where it
        `has_deviated`, but as the greedy that it began as; with `rng` the others are drawn from the
        policy.
        `split` games may halve tables, if the policy does. `shielded` games are of whole tables and
        end well wherever first fit decreasing packs them; they take longer, and know of no rules.
        """
        bundles = Terms(task).bundles()
        split = split and self._network.shape.halves and not shielded and len(task.devices) > 1
        deck = Deck(self._oracle, bundles, split)
        tables, devices = len(bundles), len(task.devices)
        deal = Deal(np.arange(tables), task.room_bytes, Demands.of(task, bundles), task.objective)
        game = ShardingGame(deck, games, tables, devices, tables if split else 0)
        game.deal(range(games), [deal] * games)
        layout = Layout(devices)
        sure = min(games, self.sure)
        learned = torch.ones(games, 1)
        learned[1:sure] = 0
        shields = [Shield(game, seat) for seat in range(game.seats)] if shielded else []
        while not bool(game.over.all()):
            logits, _ = self._network(layout.parts(game), learned)
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
