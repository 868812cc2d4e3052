"""The policy as a network: scores each device for the piece that is being placed, and halving it.

One scorer serves all devices, so it works for any number of tables and of devices, and naming
devices otherwise changes nothing. It starts as a greedy that puts each piece where the plan becomes
slower least, by a soft maximum of the devices, and halves what would be slower there than the plan
has to be; it learns by how much to deviate from that.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from autoshard.envs.observation import (
    DESCRIBED,
    DEVICE,
    DEVICE_PARTS,
    OBJECTIVE,
    PROGRESS,
    REST,
    SPLIT_PARTS,
    TABLE,
)

FORBIDDEN = -1e9  # the logit of what may not be chosen
_FAR = 1e6  # times the pace: more than any device costs
_COST, _JOINED, _SAFE, _SOFT_AFTER = (
    DESCRIBED + DEVICE_PARTS.index(name) for name in ("cost", "joined", "safe", "soft_after")
)
_MAY, _ADDS, _ADDED = 0, 1, 4  # of the part about halving
_DULL = 1e-6  # a sharpness as good as none
# What it begins with, tried on two families of tables and three objectives: how much the device
# itself counts beside the plan, and how much of what a piece takes beyond the even share goes
# elsewhere with one half.
_ITSELF = 0.02
_ELSEWHERE = 0.4


@dataclass(frozen=True)
class PolicyShape:
    """Sizes of the network, where it starts from, and what it may do.

    Args:
        hidden: numbers that a device, and the state of the game, are known by.
        encoded: numbers that a set of tables is known by.
        sharpness: how strictly the policy starts out as the greedy: the log odds against a device
            that would cost the task's pace more. With 0 it starts from nothing.
        halves: whether the policy may halve what it places; else all tables stay whole, in
            training and ever after.
    """

    hidden: int = 64
    encoded: int = 32
    sharpness: float = 1000.0
    halves: bool = True


class PolicyVariant(NamedTuple):
    """A way to play the same policy: tasks differ in which one suits them.

    Args:
        learned: how much of what was learned counts; 0 plays as the greedy that it began as.
        itself: times how much the device itself counts beside the plan.
        elsewhere: times how much of what a piece takes too much is thought to go elsewhere with one
            half: the more, the more is halved.
    """

    learned: float = 1.0
    itself: float = 1.0
    elsewhere: float = 1.0


class PolicyNetwork(nn.Module):
    """From the parts of observations (`envs.observation.Layout`) to logits and values."""

    log_sharpness: Tensor

    def __init__(self, shape: PolicyShape) -> None:
        super().__init__()
        self.shape = shape
        hidden, encoded = shape.hidden, shape.encoded
        self.encoder = nn.Linear(DESCRIBED, encoded)
        self.device = nn.Linear(encoded + DEVICE - DESCRIBED, hidden)
        rest = TABLE + REST - 2 * DESCRIBED + SPLIT_PARTS + OBJECTIVE + PROGRESS
        self.state = nn.Linear(2 * encoded + rest, hidden)
        self.context = nn.Linear(2 * hidden, hidden)
        self.mixer = nn.Linear(hidden, hidden)
        self.score = nn.Linear(hidden, 1)
        self.halving = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        self.value = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        # Not learned: what is learned would else blur choices that the greedy makes well.
        self.register_buffer("log_sharpness", torch.tensor(max(shape.sharpness, _DULL)).log())
        self.itself = nn.Parameter(torch.tensor(_ITSELF))
        self.elsewhere = nn.Parameter(torch.tensor(_ELSEWHERE))
        with torch.no_grad():
            for last in (self.score, self.halving[-1], self.value[-1]):
                assert isinstance(last, nn.Linear)
                last.weight.mul_(0.01)
                last.bias.zero_()

    def as_greedy(self) -> "PolicyNetwork":
        """Without the small deviations that it starts to learn from."""
        for last in (self.score, self.halving[-1]):
            assert isinstance(last, nn.Linear)
            nn.init.zeros_(last.weight)
        return self

    @property
    def has_deviated(self) -> bool:
        """Whether it began as a greedy and has learned to do otherwise."""
        if self.shape.sharpness == 0:
            return False
        deviates = (self.score.weight, self.halving[-1].weight)
        return any(bool(weight.any()) for weight in deviates if isinstance(weight, Tensor))

    def forward(
        self, parts: dict[str, Tensor], variants: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Logits [games, devices + 1], the last one of halving, and what is known of each game
        [games, hidden].

        Args:
            parts: of observations.
            variants: `PolicyVariant` of each episode, [episodes, 3]; by default as learned.
        """
        table, rest, devices = parts["table"], parts["rest"], parts["devices"]
        exists, allowed = parts["exists"] > 0, parts["allowed"] > 0
        safe = allowed & (devices[..., _SAFE] > 0)
        # Where there is a choice that leaves room for the largest tables to come, others are none.
        allowed = torch.where(safe.any(1, keepdim=True), safe, allowed)
        # Sets of tables: what each device holds, the piece, and the rest.
        pair = torch.stack([table[:, :DESCRIBED], rest[:, :DESCRIBED]], dim=1)
        sets = self._encode(torch.cat([devices[..., :DESCRIBED], pair], dim=1))
        numbers = [table[:, DESCRIBED:], rest[:, DESCRIBED:]]
        numbers += [parts[name] for name in ("split", "objective", "progress")]
        state = self.state(torch.cat([sets[:, -2:].flatten(1), *numbers], dim=1))
        own = torch.cat([sets[:, :-2], devices[..., DESCRIBED:]], dim=2)
        each = functional.relu(self.device(own) + state[:, None])
        present = exists[..., None]
        mean = (each * present).sum(1) / exists.sum(1, keepdim=True).clamp_min(1)
        most = each.masked_fill(~present, 0.0).amax(1)
        known = functional.relu(self.context(torch.cat([mean, most], dim=1)) + state)
        score = self.score(functional.relu(self.mixer(each) + known[:, None])).squeeze(-1)
        itself: Tensor = self.itself
        elsewhere: Tensor = self.elsewhere
        halve = self.halving(known).squeeze(-1)
        if variants is not None:
            learned, by_itself, by_elsewhere = variants[:, :, None].unbind(1)
            itself = by_itself * (_ITSELF + learned * (itself - _ITSELF))
            elsewhere = (by_elsewhere * (_ELSEWHERE + learned * (elsewhere - _ELSEWHERE)))[:, 0]
            score, halve = score * learned, halve * learned[:, 0]
        burden = devices[..., _SOFT_AFTER] + itself * devices[..., _JOINED]
        greedy = -self.log_sharpness.exp() * self._over_least(burden, allowed)
        halve = halve + self._relief(parts, allowed, elsewhere)
        may = parts["split"][:, _MAY] > 0
        logits = (greedy + score).masked_fill(~allowed, FORBIDDEN)
        return torch.cat([logits, halve.masked_fill(~may, FORBIDDEN)[:, None]], dim=1), known

    @staticmethod
    def _over_least(costs: Tensor, allowed: Tensor) -> Tensor:
        """By how much each device costs more than the least of those that are allowed."""
        return costs - costs.masked_fill(~allowed, torch.inf).amin(1, keepdim=True).clamp_max(_FAR)

    def _relief(self, parts: dict[str, Tensor], allowed: Tensor, elsewhere: Tensor) -> Tensor:
        """What halving is worth to the greedy: of what the piece takes, at best, beyond the even
        share or the slowest device, that part which goes elsewhere, less what two halves cost more.
        """
        devices, halving = parts["devices"], parts["split"]
        best = devices[..., _JOINED].masked_fill(~allowed, torch.inf).amin(1).clamp_max(_FAR)
        level = torch.maximum(1 + halving[:, _ADDED], devices[..., _COST].amax(1))
        adds = halving[:, _ADDS] / parts["exists"].sum(1).clamp_min(1)
        return self.log_sharpness.exp() * (elsewhere * (best - level) - adds)

    def values(self, known: Tensor) -> Tensor:
        """What the rest of each game is worth: [games]."""
        answer: Tensor = self.value(known).squeeze(-1)
        return answer

    def _encode(self, tables: Tensor) -> Tensor:
        """Of a table, or of the sum over a set of them: the part that is named in both."""
        return functional.relu(self.encoder(tables.clamp_min(0).log1p()))
