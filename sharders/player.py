"""Playing the game with a policy: many plans of one task at once."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from autoshard.cost_model import EstimatedCosts
from autoshard.envs import Deal, Deck, Layout, ShardingGame
from autoshard.envs.deck import Demands, Ints
from autoshard.sharders.policy_network import PolicyNetwork
from autoshard.sharders.shield import Shield
from autoshard.workload import ShardingTask, TableSlice
from autoshard.workload.terms import Bundle


@dataclass(frozen=True)
class Played:
    """A finished game: the pieces, the device of each, and the devices' estimated costs."""

    pieces: tuple[Bundle, ...]
    homes: Ints
    costs_ms: tuple[float, ...]

    @property
    def worst_ms(self) -> float:
        """Of the slowest device."""
        return max(self.costs_ms)

    @property
    def balance(self) -> float:
        """Mean over maximum."""
        return sum(self.costs_ms) / len(self.costs_ms) / self.worst_ms

    def placed(self) -> list[tuple[TableSlice, int]]:
        """Each slice and its device."""
        homes = zip(self.pieces, self.homes.tolist(), strict=True)
        return [(piece, home) for bundle, home in homes for piece in bundle.slices]


class Player:
    """Plays with a network.

    Args:
        network: scores devices.
        oracle: prices them.
    """

    def __init__(self, network: PolicyNetwork, oracle: EstimatedCosts) -> None:
        self._network = network
        self._oracle = oracle

    @torch.inference_mode()
    def play(
        self,
        pieces: Sequence[Sequence[Bundle]],
        task: ShardingTask,
        rng: torch.Generator | None = None,
        shielded: bool = False,
    ) -> list[Played]:
        """Place each list of pieces on the task's devices; games that end at a dead end are left
        out.

        The first game is played greedily; with `rng` the others are drawn from the policy.
        `shielded` games end well wherever first fit decreasing packs the tables; they take longer,
        and know of no rules.
        """
        # By identity: comparing slices takes longer than playing.
        known = {id(piece): piece for some in pieces for piece in some}
        numbers = {key: number for number, key in enumerate(known)}
        deck = Deck(self._oracle, list(known.values()))
        rooms, devices = task.room_bytes, len(task.devices)
        demands = {id(some): Demands.of(task, some) for some in pieces}  # of many games often one
        deals = [
            Deal(np.array([numbers[id(piece)] for piece in some]), rooms, demands[id(some)])
            for some in pieces
        ]
        most = max(len(deal.pieces) for deal in deals)
        game = ShardingGame(deck, len(deals), most, devices)
        game.deal(range(len(deals)), deals)
        layout = Layout(devices)
        shields = [Shield(game, seat) for seat in range(game.seats)] if shielded else []
        while not bool(game.over.all()):
            logits, _ = self._network(layout.split(layout.observe(game)))
            chosen = logits.argmax(1)
            if rng is not None:
                noise = torch.empty_like(logits).exponential_(generator=rng)
                chosen[1:] = (logits - noise.log()).argmax(1)[1:]  # Gumbel's way to draw
            for seat, shield in enumerate(shields):
                if shield.holds:
                    preferred = logits[seat].argsort(descending=True).tolist()
                    chosen[seat] = shield.choose(preferred)
            game.place(chosen)
        return [
            Played(tuple(some), game.assignment(seat), tuple(game.cost_ms[seat].tolist()))
            for seat, some in enumerate(pieces)
            if not game.stuck[seat]
        ]
