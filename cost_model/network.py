"""The set network: tables to amounts that add up, and sums of amounts to the cost of a shard.

A table's *amounts* are what it brings to whichever shard it joins: its cost beside others, the
work it causes (lookups, bytes, rows), and quantities that are learned. Amounts add up over a
shard, so a shard's cost is a function of sums: adding a table is one addition.

A table's cost is its work, priced: a sum of terms with positive prices, times a learned
correction. The prices alone come within a tenth of what is measured, on tables never seen; what
networks learn is the rest.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from autoshard.workload import FEATURE_NAMES

# The published raw sizes say nothing that their logarithms do not.
_RAW = ("dim", "rows", "pooling_factor", "size_gb")
INPUTS = tuple(name for name in FEATURE_NAMES if name not in _RAW)
# Inputs that early models know nothing of; all tables that these learned from had 0.
LATER_INPUTS = ("log_features", "weighted")
DIRECTIONS = 2  # forward and backward

# Work of a table, as products of powers of its extensive inputs.
TERMS: dict[str, dict[str, float]] = {
    "samples": {"log_batch_size": 1},
    "output": {"log_batch_size": 1, "log_dim": 1},
    "lookups": {"log_lookups": 1},
    "looked_up_bytes": {"log_looked_up_bytes": 1},
    "distinct_rows": {"log_distinct_rows": 1},
    "touched_bytes": {"log_touched_bytes": 1},
    "size": {"log_size_bytes": 1},
    "sorting": {"log_lookups": 1.1},  # n log n, near enough over what batches hold
    "scattering": {"log_distinct_rows": 0.5, "log_rows": 0.5},
}
# Work is priced apart where one feature looks rows up in a table, where several do (fbgemm's CPU
# kernels then go another way), and, beside either, for weights of lookups.
KINDS = ("one", "several", "weights")
_LOG_FEATURES, _WEIGHTED = (INPUTS.index(name) for name in LATER_INPUTS)
MIN_LOG_PRICE = -12.0
_REACH = 1.0  # deviations beyond what was learned from up to which a curve is followed
_MIN_UNIT = 0.25  # a reuse bin that was always empty is no reason to doubt a table
_FLOOR = 1e-9


@dataclass(frozen=True)
class NetworkShape:
    """Sizes of a network.

    Args:
        hidden: width of the layers that see a table.
        fusion: width of the layers that see a shard.
        learned: amounts of a table that have no name.
    """

    hidden: int = 32
    fusion: int = 32
    learned: int = 8

    @property
    def count(self) -> int:
        """Which of the amounts is 1 for every table: the last that costs follow from."""
        return DIRECTIONS + len(TERMS) + self.learned

    @property
    def uncertainty(self) -> int:
        """Which of the amounts tells how doubtful the table is; no cost follows from it.

        It comes last: the table's milliseconds, times deviations that it is outside of what was
        learned from.
        """
        return self.count + 1


# Deviations of inputs are at least these. One that hardly varies counts little; how few of the
# tables are unusual is no unit for how unusual they are.
MIN_DEVIATIONS = torch.tensor([0.5 if name in LATER_INPUTS else 0.05 for name in INPUTS])


class InputScale(NamedTuple):
    """Of each input over the tables learned from: mean, deviation, lowest and highest."""

    mean: Tensor
    deviation: Tensor
    low: Tensor
    high: Tensor

    @staticmethod
    def of(inputs: Tensor) -> "InputScale":
        """The scale of inputs [tables, inputs]."""
        deviation = inputs.std(0, correction=0).maximum(MIN_DEVIATIONS)
        return InputScale(inputs.mean(0), deviation, inputs.amin(0), inputs.amax(0))

    def excess(self, inputs: Tensor) -> Tensor:
        """How far each input lies outside what was learned from, in deviations."""
        beyond = functional.relu(self.low - inputs) + functional.relu(inputs - self.high)
        return beyond / self.deviation.clamp_min(_MIN_UNIT)

    def work(self, inputs: Tensor) -> Tensor:
        """Terms of work [tables, terms], each about 1 for a typical table."""
        return ((inputs - self.mean) @ _EXPONENTS.T).exp()

    def priced_work(self, inputs: Tensor) -> Tensor:
        """The same apart by kind, which is what has prices: [tables, kinds x terms]."""
        several = inputs[..., _LOG_FEATURES] > 0
        kinds = torch.stack([~several, several, inputs[..., _WEIGHTED] > 0], dim=-1)
        return (kinds[..., None] * self.work(inputs)[..., None, :]).flatten(-2)


_EXPONENTS = torch.tensor([[powers.get(name, 0.0) for name in INPUTS] for powers in TERMS.values()])


class TableNetwork(nn.Module):
    """From the inputs of tables [..., inputs] to their amounts [..., amounts]."""

    def __init__(self, shape: NetworkShape, scale: InputScale) -> None:
        super().__init__()
        self.scale = scale
        self.log_prices = nn.Parameter(torch.full((DIRECTIONS, len(KINDS) * len(TERMS)), -3.0))
        self.curved = nn.Sequential(
            nn.Linear(len(INPUTS), shape.hidden),
            nn.SiLU(),
            nn.Linear(shape.hidden, shape.hidden),
            nn.SiLU(),
            nn.Linear(shape.hidden, DIRECTIONS + shape.learned),
        )
        _quieten(self.curved)

    def forward(self, inputs: Tensor) -> Tensor:
        """Amounts in the order: forward and backward ms, terms of work, learned, count, doubt."""
        scale = self.scale
        low, high = scale.low - _REACH * scale.deviation, scale.high + _REACH * scale.deviation
        curved = self.curved((inputs.clamp(low, high) - scale.mean) / scale.deviation)
        work = scale.work(inputs)
        priced = functional.linear(scale.priced_work(inputs), self.log_prices.exp())
        beside = priced * curved[..., :DIRECTIONS].exp()
        learned = functional.softplus(curved[..., DIRECTIONS:])
        count = torch.ones_like(work[..., :1])
        doubt = beside.sum(-1, keepdim=True) * scale.excess(inputs).amax(-1, keepdim=True)
        return torch.cat([beside, work, learned, count, doubt], dim=-1)


class FusionNetwork(nn.Module):
    """From sums of amounts [..., amounts] to log forward and backward milliseconds [..., 2].

    What starting the operator costs and the sum of what tables cost, times a learned factor.
    """

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.log_start = nn.Parameter(torch.full((DIRECTIONS,), -2.0))
        self.factor = nn.Sequential(
            nn.Linear(shape.count + 1, shape.fusion),
            nn.ReLU(),
            nn.Linear(shape.fusion, DIRECTIONS),
        )
        _quieten(self.factor)

    def forward(self, sums: Tensor) -> Tensor:
        """Log milliseconds."""
        return fused(sums, dict(self.named_parameters()))


def fused(sums: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """The same [..., shards, 2] for sums [..., shards, amounts] by one network's weights or many's.

    Weights may be stacked, with the members in front as in the sums: pricing goes this way, which
    is three times as fast for a few shards as mapping over the networks.
    """
    beside, factor = _fused(sums, weights)
    return (beside.log() + factor).mT


def fused_ms(sums: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """The same in milliseconds, for those who need no logarithm: it is left out on the way. Shards
    come last, [..., 2, shards]: what is reckoned with long rows takes half the time.
    """
    beside, factor = _fused(sums, weights)
    return beside * factor.exp_()


def _fused(sums: Tensor, weights: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Milliseconds beside others, with the start, and the logarithm of what fusion makes of them:
    each [..., 2, shards].
    """
    used = weights["factor.0.weight"].shape[-1]
    start = weights["log_start"].exp().unsqueeze(-1)
    beside = (sums[..., :DIRECTIONS].mT + start).clamp_min(_FLOOR)
    logs = sums.clamp_min(_FLOOR).log()[..., :used].mT  # of all: in one stretch of memory
    return beside, _linear(_linear(logs, weights, "factor.0").relu_(), weights, "factor.2")


def _linear(inputs: Tensor, weights: Mapping[str, Tensor], layer: str) -> Tensor:
    """A layer of inputs [..., n, shards]."""
    weight, bias = weights[f"{layer}.weight"], weights[f"{layer}.bias"].unsqueeze(-1)
    return torch.baddbmm(bias, weight, inputs) if inputs.dim() == 3 else weight @ inputs + bias


class ShardNetwork(nn.Module):
    """One member of the ensemble."""

    def __init__(self, shape: NetworkShape, scale: InputScale) -> None:
        super().__init__()
        self.table = TableNetwork(shape, scale)
        self.fusion = FusionNetwork(shape)


def _quieten(layers: nn.Sequential) -> None:
    """Corrections start near nothing."""
    last = layers[-1]
    assert isinstance(last, nn.Linear)
    with torch.no_grad():
        last.weight.mul_(0.1)
        last.bias.zero_()
