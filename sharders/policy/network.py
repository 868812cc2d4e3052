"""Policy network: scores each device for the current unit, and each option of the unit.

One scorer serves all devices, so the network works for any number of tables and devices and is
equivariant to their order; another one serves all kinds of options. It is initialised as a greedy
policy, which places each unit where the step time rises least by a soft maximum over devices,
splits units that exceed the even share, and takes options that save more than they add. Training
learns deviations from that policy.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

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
    TABLE,
)
from autoshard.envs.offers import OPTION_PARTS
from autoshard.envs.options import OPTION_KINDS, SPLIT

FORBIDDEN = -1e9  # logit of an action that is not allowed
_FAR = 1e6  # times even_split_ms: more than any device costs
_COST, _JOINED, _SAFE, _SOFT_AFTER = (
    DESCRIBED + DEVICE_PARTS.index(name) for name in ("cost", "joined", "safe", "soft_after")
)
_MAY, _WORK, _HIGHEST, _COMMON, _AGAIN = map(
    OPTION_PARTS.index, ("may", "work", "highest", "common", "common_again")
)
_ADDED = PROGRESS - 1  # in the part `progress`: additional cost by splits
_SPLIT = OPTION_KINDS.index(SPLIT)
_MIN_SHARPNESS = 1e-6
# Initial values, tuned on two families of tables and three objectives: weight of the device's own
# cost beside the plan's, and share of the excess over the even share that an option moves away.
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
        kinds: Kinds of options that the policy may take (`envs.options.OPTION_KINDS`); without
            `split`, all tables stay whole.
    """

    hidden: int = 64
    encoded: int = 32
    sharpness: float = 1000.0
    kinds: tuple[str, ...] = OPTION_KINDS

    @property
    def splits(self) -> bool:
        """Whether the policy may split units."""
        return SPLIT in self.kinds

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> "PolicyShape":
        """Returns the shape of which a JSON document has the fields."""
        return PolicyShape(**{**document, "kinds": tuple(document["kinds"])})


class PolicyVariant(NamedTuple):
    """Factors that change a policy at inference; tasks differ in which variant suits them.

    Args:
        learned: Factor of learned deviations; 0 is the initial greedy policy.
        itself: Factor of the weight of the device's own cost.
        elsewhere: Factor of the excess that an option moves away: a larger one splits more units.
        starts: Factor of what only the first option of its kind adds: with 0, tables take options
            that pay if others do so, too.
    """

    learned: float = 1.0
    itself: float = 1.0
    elsewhere: float = 1.0
    starts: float = 1.0


class PolicyNetwork(nn.Module):
    """Actor and critic on the parts of observations (see `envs.observation.Layout`)."""

    log_sharpness: Tensor
    kinds: Tensor

    def __init__(self, shape: PolicyShape) -> None:
        super().__init__()
        self.shape = shape
        hidden, encoded = shape.hidden, shape.encoded
        self.encoder = nn.Linear(DESCRIBED, encoded)
        self.device = nn.Linear(encoded + DEVICE - DESCRIBED, hidden)
        options = len(OPTION_KINDS) * len(OPTION_PARTS)
        rest = TABLE + REST - 2 * DESCRIBED + options + OBJECTIVE + PROGRESS
        self.state = nn.Linear(2 * encoded + rest, hidden)
        self.context = nn.Linear(2 * hidden, hidden)
        self.mixer = nn.Linear(hidden, hidden)
        self.score = nn.Linear(hidden, 1)
        self.option = nn.Linear(len(OPTION_KINDS) + len(OPTION_PARTS), hidden)
        self.option_mixer = nn.Linear(hidden, hidden)
        self.option_score = nn.Linear(hidden, 1)
        self.value = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        # Not learned: training would blur the greedy policy.
        self.register_buffer(
            "log_sharpness", torch.tensor(max(shape.sharpness, _MIN_SHARPNESS)).log()
        )
        self.itself = nn.Parameter(torch.tensor(_ITSELF))
        self.elsewhere = nn.Parameter(torch.tensor(_ELSEWHERE))
        self.register_buffer("kinds", torch.eye(len(OPTION_KINDS)), persistent=False)
        with torch.no_grad():
            for last in (self.score, self.option_score, self.value[-1]):
                assert isinstance(last, nn.Linear)
                last.weight.mul_(0.01)
                last.bias.zero_()

    def as_greedy(self) -> "PolicyNetwork":
        """Removes the small random deviations of the initial weights; returns the network."""
        for last in (self.score, self.option_score):
            nn.init.zeros_(last.weight)
        return self

    @property
    def has_deviated(self) -> bool:
        """Whether the policy differs from the greedy policy that it was initialised as."""
        if self.shape.sharpness == 0:
            return False
        return any(bool(last.weight.any()) for last in (self.score, self.option_score))

    def forward(
        self, parts: dict[str, Tensor], variants: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns logits [envs, devices + kinds], the last for options, and state embeddings.

        Embeddings have shape [envs, hidden].

        Args:
            parts: Parts of observations, each [envs, ...].
            variants: `PolicyVariant` of each episode, [envs, 4]; by default the learned policy.
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
        options = parts["options"]
        numbers += [options.flatten(1), parts["objective"], parts["progress"]]
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
        starts: Tensor | float = 1.0
        deviation: Tensor | float = 1.0
        if variants is not None:
            learned, by_itself, by_elsewhere, starts = variants[:, :, None].unbind(1)
            itself = by_itself * (_ITSELF + learned * (itself - _ITSELF))
            elsewhere = by_elsewhere * (_ELSEWHERE + learned * (elsewhere - _ELSEWHERE))
            score, deviation = score * learned, learned
        greedy_cost = devices[..., _SOFT_AFTER] + itself * devices[..., _JOINED]
        greedy = -self.log_sharpness.exp() * self._over_lowest(greedy_cost, allowed)
        logits = (greedy + score).masked_fill(~allowed, FORBIDDEN)
        may = options[..., _MAY] > 0
        chosen = torch.full(may.shape, FORBIDDEN, dtype=logits.dtype, device=logits.device)
        if bool(may.any()):
            offered = deviation * self._option_scores(options, state_embedding)
            offered = offered + self._option_logits(parts, allowed, elsewhere, starts)
            chosen = torch.where(may, offered, chosen)
        return torch.cat([logits, chosen], dim=1), state_embedding

    def _option_scores(self, options: Tensor, state_embedding: Tensor) -> Tensor:
        """Returns what is learned of options beyond the greedy policy: [envs, kinds]."""
        described = torch.cat([options, self.kinds.expand(len(options), -1, -1)], dim=2)
        offered = self.option(described) + self.option_mixer(state_embedding)[:, None]
        scores: Tensor = self.option_score(functional.relu(offered)).squeeze(-1)
        return scores

    @staticmethod
    def _over_lowest(costs: Tensor, allowed: Tensor) -> Tensor:
        """Returns the excess of each cost over the lowest of allowed devices."""
        return costs - costs.masked_fill(~allowed, torch.inf).amin(1, keepdim=True).clamp_max(_FAR)

    def _option_logits(
        self,
        parts: dict[str, Tensor],
        allowed: Tensor,
        elsewhere: Tensor,
        starts: Tensor | float,
    ) -> Tensor:
        """Returns the logits of options in the greedy policy: [envs, kinds].

        The gain of an option is a share of what it saves of the excess over the even share or the
        slowest device; its loss is what it adds to all devices.
        """
        devices, options = parts["devices"], parts["options"]
        best = devices[..., _JOINED].masked_fill(~allowed, torch.inf).amin(1, keepdim=True)
        added = parts["progress"][:, _ADDED, None]
        level = torch.maximum(1 + added, devices[..., _COST].amax(1, keepdim=True))
        # Where no device is allowed, some option must be taken: that which adds least.
        best = torch.where(allowed.any(1, keepdim=True), best, level)
        saved = (best - torch.maximum(level, options[..., _HIGHEST])).clamp_min(0)
        saved[:, _SPLIT] = (best - level)[:, 0]
        adds = options[..., _WORK] / parts["exists"].sum(1, keepdim=True).clamp_min(1)
        again = options[..., _AGAIN]
        adds = adds + again + starts * (options[..., _COMMON] - again)
        return self.log_sharpness.exp() * (elsewhere * saved - adds)

    def values(self, embeddings: Tensor) -> Tensor:
        """Returns the value of each state by its embedding [envs, hidden]: [envs]."""
        values: Tensor = self.value(embeddings).squeeze(-1)
        return values

    def _encode(self, tables: Tensor) -> Tensor:
        """Embeds named amounts of a table, or of a set of tables."""
        return functional.relu(self.encoder(tables.clamp_min(0).log1p()))
