"""A set network: maps tables to additive amounts, and sums of amounts to the cost of a shard.

A table's *amounts* are what it adds to any shard: its cost beside other tables, its work (lookups,
bytes, rows), and learned quantities. A shard's cost is a function of their sums, so adding a table
is one addition.

A table's cost is a sum of work terms with positive prices, times a learned correction. Prices alone
are within 10 % of measurements on unseen tables; the networks learn the rest.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from autoshard.workload import FEATURE_NAMES

# Raw sizes add nothing to their logarithms.
_RAW = ("dim", "rows", "pooling_factor", "size_gb")
INPUTS = tuple(name for name in FEATURE_NAMES if name not in _RAW)
# Inputs that are 0 for most tables, and for all of some training sets.
_SPARSE_INPUTS = ("log_features", "weighted")
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
# Work has separate prices for tables of one feature, of several (fbgemm's CPU kernels then take
# another path), and, in addition to either, for weights of lookups.
KINDS = ("one", "several", "weights")
_LOG_FEATURES, _WEIGHTED = (INPUTS.index(name) for name in _SPARSE_INPUTS)
_LOG_DISTINCT_ROWS = INPUTS.index("log_distinct_rows")
# Inputs by which the speed of one machine may rise or fall beside that of another.
TILTING = ("log_dim", "log_rows", "log_lookups", "log_distinct_rows", "log_batch_size")
_TILTING = [INPUTS.index(name) for name in TILTING]
USUAL_UPDATE_NS = 80.0  # between that of processors with and without a suitable kernel
MIN_LOG_PRICE = -12.0
_REACH = 1.0  # deviations outside of the training data up to which networks extrapolate
_MIN_UNIT = 0.25  # deviation of an input in `excess`: else an empty reuse bin would decide
_FLOOR = 1e-9


@dataclass(frozen=True)
class NetworkShape:
    """Sizes of a network.

    Args:
        hidden: Width of the layers over tables.
        fusion: Width of the layers over shards.
        learned: Number of learned amounts of a table.
        effects: Whether the network has effects of machines (see `TableNetwork`).
    """

    hidden: int = 32
    fusion: int = 32
    learned: int = 8
    effects: bool = False

    @property
    def count(self) -> int:
        """Index of the amount that is 1 for every table: the last that costs depend on."""
        return DIRECTIONS + len(TERMS) + self.learned

    @property
    def uncertainty(self) -> int:
        """Index of the amount for uncertainty, on which no cost depends.

        It is the table's milliseconds times its deviations outside of the training data.
        """
        return self.count + 1

    @property
    def amounts(self) -> int:
        """Number of amounts of a table."""
        return self.uncertainty + 1 + self.effects


# Minimum deviations of inputs, so that inputs that hardly vary count little.
MIN_DEVIATIONS = torch.tensor([0.5 if name in _SPARSE_INPUTS else 0.05 for name in INPUTS])


class InputScale(NamedTuple):
    """Mean, deviation, minimum and maximum of each input over the training tables."""

    mean: Tensor
    deviation: Tensor
    low: Tensor
    high: Tensor

    @staticmethod
    def of(inputs: Tensor) -> "InputScale":
        """Returns the scale of inputs, shape [tables, inputs]."""
        deviation = inputs.std(0, correction=0).maximum(MIN_DEVIATIONS)
        return InputScale(inputs.mean(0), deviation, inputs.amin(0), inputs.amax(0))

    def excess(self, inputs: Tensor) -> Tensor:
        """Returns how far each input is outside of the training data, in deviations."""
        beyond = functional.relu(self.low - inputs) + functional.relu(inputs - self.high)
        return beyond / self.deviation.clamp_min(_MIN_UNIT)

    def work(self, inputs: Tensor) -> Tensor:
        """Returns terms of work [tables, terms], each about 1 for a typical table."""
        return ((inputs - self.mean) @ _EXPONENTS.T).exp()

    def priced_work(self, inputs: Tensor) -> Tensor:
        """Returns terms of work separately by `KINDS`, shape [tables, kinds x terms]."""
        several = inputs[..., _LOG_FEATURES] > 0
        kinds = torch.stack([~several, several, inputs[..., _WEIGHTED] > 0], dim=-1)
        return (kinds[..., None] * self.work(inputs)[..., None, :]).flatten(-2)


_EXPONENTS = torch.tensor([[powers.get(name, 0.0) for name in INPUTS] for powers in TERMS.values()])


class TableNetwork(nn.Module):
    """Maps inputs of tables [..., inputs] to their amounts [..., amounts].

    With effects of machines, `tilts` scale the forward and backward time of a table by the
    exponential of a linear function of some inputs. And each distinct row of a table of one or of
    several features takes exp(`log_update_ns`) more in the backward pass: kernels of optimizers
    suit some processors and not others.
    """

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
        _initialise_near_zero(self.curved)
        self.effects = shape.effects
        if shape.effects:
            self.tilts = nn.Parameter(torch.zeros(DIRECTIONS, 1 + len(TILTING)))
            self.log_update_ns = nn.Parameter(torch.full((2,), math.log(USUAL_UPDATE_NS)))

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns amounts: forward and backward ms, work, learned, count, uncertainty, update.

        The ms of the update are there with effects of machines alone; backward ms contain them.
        """
        scale = self.scale
        low, high = scale.low - _REACH * scale.deviation, scale.high + _REACH * scale.deviation
        outputs = self.curved((inputs.clamp(low, high) - scale.mean) / scale.deviation)
        work = scale.work(inputs)
        priced_ms = functional.linear(scale.priced_work(inputs), self.log_prices.exp())
        table_ms = priced_ms * outputs[..., :DIRECTIONS].exp()
        update: list[Tensor] = []
        if self.effects:
            near = (inputs.clamp(scale.low, scale.high) - scale.mean) / scale.deviation
            level, slopes = self.tilts[:, 0], self.tilts[:, 1:]
            table_ms = table_ms * (functional.linear(near[..., _TILTING], slopes) + level).exp()
            update = [self._update_ms(inputs)]
            table_ms = table_ms + functional.pad(update[0], (1, 0))
        learned = functional.softplus(outputs[..., DIRECTIONS:])
        count = torch.ones_like(work[..., :1])
        excess = scale.excess(inputs).amax(-1, keepdim=True)
        uncertainty = table_ms.sum(-1, keepdim=True) * excess
        return torch.cat([table_ms, work, learned, count, uncertainty, *update], dim=-1)

    def _update_ms(self, inputs: Tensor) -> Tensor:
        """Returns the milliseconds of updates that effects add, shape [..., 1]."""
        several = (inputs[..., _LOG_FEATURES, None] > 0).to(inputs.dtype)
        one_ns, several_ns = self.log_update_ns.exp()
        row_ms: Tensor = (one_ns + several * (several_ns - one_ns)) * 1e-6
        return torch.expm1(inputs[..., _LOG_DISTINCT_ROWS, None]) * row_ms


class FusionNetwork(nn.Module):
    """Maps sums of amounts [..., amounts] to log forward and backward milliseconds [..., 2].

    The cost is the operator's start plus the sum over tables, times a learned factor.
    """

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.log_start = nn.Parameter(torch.full((DIRECTIONS,), -2.0))
        self.factor = nn.Sequential(
            nn.Linear(shape.count + 1, shape.fusion),
            nn.ReLU(),
            nn.Linear(shape.fusion, DIRECTIONS),
        )
        _initialise_near_zero(self.factor)

    def forward(self, sums: Tensor) -> Tensor:
        """Returns log milliseconds."""
        return fused(sums, dict(self.named_parameters()))


def fused(sums: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """Returns log milliseconds [..., shards, 2] of sums [..., shards, amounts].

    Weights may be stacked, with members as first dimension of both. For a few shards this is three
    times as fast as vmap over the networks.
    """
    return fused_ms(sums, weights).log().mT


def fused_ms(sums: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """Returns milliseconds [..., 2, shards]; arguments are those of `fused`.

    Shards come last because operations on long rows take half the time. Updates that effects of
    machines add are work of the processor alone, on which the factor of fusion does not act.
    """
    num_inputs = weights["factor.0.weight"].shape[-1]
    start_ms = weights["log_start"].exp().unsqueeze(-1)
    unfused_ms = (sums[..., :DIRECTIONS].mT + start_ms).clamp_min(_FLOOR)
    # The logarithm of all amounts, also unused ones, runs over one stretch of memory.
    logs = sums.clamp_min(_FLOOR).log()[..., :num_inputs].mT
    factor = _linear(_linear(logs, weights, "factor.0").relu_(), weights, "factor.2").exp()
    if sums.shape[-1] == num_inputs + 1:  # the last amount is the uncertainty
        return unfused_ms * factor
    update_ms = functional.pad(sums[..., -1:].mT, (0, 0, 1, 0))
    return unfused_ms * factor + update_ms * (1 - factor)


def _linear(inputs: Tensor, weights: Mapping[str, Tensor], layer: str) -> Tensor:
    """Applies a layer to inputs [..., n, shards]."""
    weight, bias = weights[f"{layer}.weight"], weights[f"{layer}.bias"].unsqueeze(-1)
    return torch.baddbmm(bias, weight, inputs) if inputs.dim() == 3 else weight @ inputs + bias


class ShardNetwork(nn.Module):
    """One member of the ensemble."""

    def __init__(self, shape: NetworkShape, scale: InputScale) -> None:
        super().__init__()
        self.table = TableNetwork(shape, scale)
        self.fusion = FusionNetwork(shape)


def _initialise_near_zero(layers: nn.Sequential) -> None:
    last = layers[-1]
    assert isinstance(last, nn.Linear)
    with torch.no_grad():
        last.weight.mul_(0.1)
        last.bias.zero_()
