"""The policy as a network: scores each device for the table that is being placed.

One scorer serves all devices, so it works for any number of tables and of devices, and naming
devices otherwise changes nothing. It starts as the greedy that puts each table where device and
table together cost least (NeuroShard's inner loop), and learns by how much to deviate from it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from autoshard.envs.observation import DESCRIBED, DEVICE, PROGRESS, REST, TABLE

_FORBIDDEN = -1e9  # the logit of a device that may not be chosen
_JOINED = DESCRIBED + 2  # in a device's part: its cost with the table
_SAFE = DESCRIBED + 7  # and whether room is left for the largest tables to come


@dataclass(frozen=True)
class PolicyShape:
    """Sizes of the network, and what it looks at.

    Args:
        hidden: numbers that a device, and the state of the game, are known by.
        encoded: numbers that a set of tables is known by.
        sharpness: how strictly the policy starts out as the greedy: the log odds against a device
            that would cost the task's pace more.
    """

    hidden: int = 64
    encoded: int = 32
    sharpness: float = 1000.0


class PolicyNetwork(nn.Module):
    """From the parts of observations (`envs.observation.Layout`) to logits and values."""

    def __init__(self, shape: PolicyShape) -> None:
        super().__init__()
        self.shape = shape
        hidden, encoded = shape.hidden, shape.encoded
        self.encoder = nn.Linear(DESCRIBED, encoded)
        self.device = nn.Linear(encoded + DEVICE - DESCRIBED, hidden)
        rest = TABLE + REST - 2 * DESCRIBED + PROGRESS
        self.state = nn.Linear(2 * encoded + rest, hidden)
        self.context = nn.Linear(2 * hidden, hidden)
        self.mixer = nn.Linear(hidden, hidden)
        self.score = nn.Linear(hidden, 1)
        self.value = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        self.log_sharpness = nn.Parameter(torch.tensor(shape.sharpness).log())
        with torch.no_grad():
            for last in (self.score, self.value[-1]):
                assert isinstance(last, nn.Linear)
                last.weight.mul_(0.01)
                last.bias.zero_()

    def forward(self, parts: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Logits [games, devices] and what is known of each game [games, hidden]."""
        table, rest, devices = parts["table"], parts["rest"], parts["devices"]
        exists, allowed = parts["exists"] > 0, parts["allowed"] > 0
        safe = allowed & (devices[..., _SAFE] > 0)
        # Where there is a choice that leaves room for the largest tables to come, others are none.
        allowed = torch.where(safe.any(1, keepdim=True), safe, allowed)
        sets = [self._encode(table), self._encode(rest)]
        numbers = [table[:, DESCRIBED:], rest[:, DESCRIBED:], parts["progress"]]
        state = self.state(torch.cat([*sets, *numbers], dim=1))
        own = torch.cat([self._encode(devices), devices[..., DESCRIBED:]], dim=2)
        each = functional.relu(self.device(own) + state[:, None])
        present = exists[..., None]
        mean = (each * present).sum(1) / exists.sum(1, keepdim=True).clamp_min(1)
        most = each.masked_fill(~present, 0.0).amax(1)
        known = functional.relu(self.context(torch.cat([mean, most], dim=1)) + state)
        score = self.score(functional.relu(self.mixer(each) + known[:, None])).squeeze(-1)
        joined = devices[..., _JOINED]
        best = joined.masked_fill(~allowed, torch.inf).amin(1, keepdim=True)
        greedy = -self.log_sharpness.exp() * (joined - best.clamp_max(1e6))
        return (greedy + score).masked_fill(~allowed, _FORBIDDEN), known

    def values(self, known: Tensor) -> Tensor:
        """What the rest of each game is worth: [games]."""
        answer: Tensor = self.value(known).squeeze(-1)
        return answer

    def _encode(self, tables: Tensor) -> Tensor:
        """Of a table, or of the sum over a set of them: the part that is named in both."""
        return functional.relu(self.encoder(tables[..., :DESCRIBED].clamp_min(0).log1p()))
