"""Policy network: scores each device for the current unit, and the split of the unit.

One scorer serves all devices, so the network works for any number of tables and devices and is
equivariant to their order. It is initialised as a greedy policy, which places each unit where the
step time rises least by a soft maximum over devices, and splits units that exceed the even share.
Training learns deviations from that policy.
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

FORBIDDEN = -1e9  # logit of an action that is not allowed
_FAR = 1e6  # times even_split_ms: more than any device costs
_COST, _JOINED, _SAFE, _SOFT_AFTER = (
    DESCRIBED + DEVICE_PARTS.index(name) for name in ("cost", "joined", "safe", "soft_after")
)
_MAY, _ADDS, _ADDED = 0, 1, 4  # features of the part `split`
_MIN_SHARPNESS = 1e-6
# Initial values, tuned on two families of tables and three objectives: weight of the device's own
# cost beside the plan's, and share of the excess over the even share that a split moves away.
_ITSELF = 0.02
_ELSEWHERE = 0.4


@dataclass(frozen=True)
class PolicyShape:
    """Sizes and options of the network.

    Args:
        hidden: Width of the embeddings of devices and of the state.
        encoded: Width of the embedding of a set of tables.
        sharpness: Inverse temperature of the initial greedy policy: log odds against a device that
            costs `even_split_ms` more. With 0 the initial policy is random.
        halves: Whether the policy may split units; else all tables stay whole.
    """

    hidden: int = 64
    encoded: int = 32
    sharpness: float = 1000.0
    halves: bool = True


class PolicyVariant(NamedTuple):
    """Factors that change a policy at inference; tasks differ in which variant suits them.

    Args:
        learned: Factor of learned deviations; 0 is the initial greedy policy.
        itself: Factor of the weight of the device's own cost.
        elsewhere: Factor of the excess that a split moves away: a larger one splits more units.
    """

    learned: float = 1.0
    itself: float = 1.0
    elsewhere: float = 1.0


class PolicyNetwork(nn.Module):
    """Actor and critic on the parts of observations (see `envs.observation.Layout`)."""

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
        # Not learned: training would blur the greedy policy.
        self.register_buffer(
            "log_sharpness", torch.tensor(max(shape.sharpness, _MIN_SHARPNESS)).log()
        )
        self.itself = nn.Parameter(torch.tensor(_ITSELF))
        self.elsewhere = nn.Parameter(torch.tensor(_ELSEWHERE))
        with torch.no_grad():
            for last in (self.score, self.halving[-1], self.value[-1]):
                assert isinstance(last, nn.Linear)
                last.weight.mul_(0.01)
                last.bias.zero_()

    def as_greedy(self) -> "PolicyNetwork":
        """Removes the small random deviations of the initial weights; returns the network."""
        for last in (self.score, self.halving[-1]):
            assert isinstance(last, nn.Linear)
            nn.init.zeros_(last.weight)
        return self

    @property
    def has_deviated(self) -> bool:
        """Whether the policy differs from the greedy policy that it was initialised as."""
        if self.shape.sharpness == 0:
            return False
        deviates = (self.score.weight, self.halving[-1].weight)
        return any(bool(weight.any()) for weight in deviates if isinstance(weight, Tensor))

    def forward(
        self, parts: dict[str, Tensor], variants: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns logits [envs, devices + 1], the last for a split, and state embeddings.

        Embeddings have shape [envs, hidden].

        Args:
            parts: Parts of observations, each [envs, ...].
            variants: `PolicyVariant` of each episode, [envs, 3]; by default the learned policy.
        """
        table, rest, devices = parts["table"], parts["rest"], parts["devices"]
        exists, allowed = parts["exists"] > 0, parts["allowed"] > 0
        safe = allowed & (devices[..., _SAFE] > 0)
        # Where a device is safe for the largest remaining units, only such devices are allowed.
        allowed = torch.where(safe.any(1, keepdim=True), safe, allowed)
        # Sets of tables: of each device, the current unit, and the rest.
        pair = torch.stack([table[:, :DESCRIBED], rest[:, :DESCRIBED]], dim=1)
        sets = self._encode(torch.cat([devices[..., :DESCRIBED], pair], dim=1))
        numbers = [table[:, DESCRIBED:], rest[:, DESCRIBED:]]
        numbers += [parts[name] for name in ("split", "objective", "progress")]
        state = self.state(torch.cat([sets[:, -2:].flatten(1), *numbers], dim=1))
        own = torch.cat([sets[:, :-2], devices[..., DESCRIBED:]], dim=2)
        embedded = functional.relu(self.device(own) + state[:, None])
        present = exists[..., None]
        mean = (embedded * present).sum(1) / exists.sum(1, keepdim=True).clamp_min(1)
        largest = embedded.masked_fill(~present, 0.0).amax(1)
        state_embedding = functional.relu(self.context(torch.cat([mean, largest], dim=1)) + state)
        mixed = functional.relu(self.mixer(embedded) + state_embedding[:, None])
        score = self.score(mixed).squeeze(-1)
        itself: Tensor = self.itself
        elsewhere: Tensor = self.elsewhere
        split = self.halving(state_embedding).squeeze(-1)
        if variants is not None:
            learned, by_itself, by_elsewhere = variants[:, :, None].unbind(1)
            itself = by_itself * (_ITSELF + learned * (itself - _ITSELF))
            elsewhere = (by_elsewhere * (_ELSEWHERE + learned * (elsewhere - _ELSEWHERE)))[:, 0]
            score, split = score * learned, split * learned[:, 0]
        greedy_cost = devices[..., _SOFT_AFTER] + itself * devices[..., _JOINED]
        greedy = -self.log_sharpness.exp() * self._over_lowest(greedy_cost, allowed)
        split = split + self._split_logit(parts, allowed, elsewhere)
        may_split = parts["split"][:, _MAY] > 0
        logits = (greedy + score).masked_fill(~allowed, FORBIDDEN)
        split = split.masked_fill(~may_split, FORBIDDEN)
        return torch.cat([logits, split[:, None]], dim=1), state_embedding

    @staticmethod
    def _over_lowest(costs: Tensor, allowed: Tensor) -> Tensor:
        """Returns the excess of each cost over the lowest of allowed devices."""
        return costs - costs.masked_fill(~allowed, torch.inf).amin(1, keepdim=True).clamp_max(_FAR)

    def _split_logit(self, parts: dict[str, Tensor], allowed: Tensor, elsewhere: Tensor) -> Tensor:
        """Returns the logit of a split in the greedy policy: [envs].

        Its gain is the share that moves away of the excess over the even share or the slowest
        device; its loss is the additional cost of two halves.
        """
        devices, split = parts["devices"], parts["split"]
        best = devices[..., _JOINED].masked_fill(~allowed, torch.inf).amin(1).clamp_max(_FAR)
        level = torch.maximum(1 + split[:, _ADDED], devices[..., _COST].amax(1))
        adds = split[:, _ADDS] / parts["exists"].sum(1).clamp_min(1)
        return self.log_sharpness.exp() * (elsewhere * (best - level) - adds)

    def values(self, embeddings: Tensor) -> Tensor:
        """Returns the value of each state by its embedding [envs, hidden]: [envs]."""
        values: Tensor = self.value(embeddings).squeeze(-1)
        return values

    def _encode(self, tables: Tensor) -> Tensor:
        """Embeds named amounts of a table, or of a set of tables."""
        return functional.relu(self.encoder(tables.clamp_min(0).log1p()))
