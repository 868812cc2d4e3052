"""`ComputeCostModel`: forward and backward milliseconds of shards."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from autoshard.cost_model.networks.ensemble import Ensemble, State
from autoshard.cost_model.networks.inputs import PieceRows, piece_inputs
from autoshard.cost_model.networks.network import (
    DIRECTIONS,
    TERMS,
    InputScale,
    NetworkShape,
    ShardNetwork,
    fused_ms,
)
from autoshard.workload import Piece, Shard
from autoshard.workload.arrays import Floats

OUT_OF_DISTRIBUTION = 1.0  # deviations outside of the training data from which users are warned
_BLOCK = 2048  # shards priced together: more do not fit a core's own cache
_FLOOR = 1e-9
HALF_A_TABLE = 0.5  # sums over no tables are not exactly 0


@dataclass(frozen=True)
class Uncertainty:
    """Parameters that turn the disagreement of networks into intervals, fitted on held-out shards.

    The relative deviation of a cost is sqrt((disagreement * scale)^2 + noise^2).
    Out-of-distribution tables count as disagreement. `width_90` and `width_95` are half widths of
    intervals, in deviations.
    """

    scale: float = 1.0
    noise: float = 0.05
    width_90: float = 1.645
    width_95: float = 1.96


@dataclass(frozen=True)
class ResidualPrior:
    """Prior of the log corrections of tables, as standard deviations; fitted on held-out tables.

    Args:
        own: Independent part of each table.
        shared: Part that similar tables share.
        extrapolation: Shared part for each deviation that a table is out of distribution.
        rest: Residual of a shard's cost when the corrections of all its tables are known.
        rest_ms: Further residual of any shard, in ms: it matters for small ones. The start of an
            operator is less certain than the work in it.
    """

    own: float = 0.05
    shared: float = 0.05
    extrapolation: float = 0.3
    rest: float = 0.03
    rest_ms: float = 0.0

    @staticmethod
    def median(priors: "Sequence[ResidualPrior]") -> "ResidualPrior":
        """Returns the medians of several priors."""
        names = [each.name for each in fields(ResidualPrior)]
        return ResidualPrior(*(float(np.median([getattr(p, n) for p in priors])) for n in names))

    def rest_of(self, costs_ms: Floats) -> Floats:
        """Returns the relative residual deviations of shards with these costs."""
        return np.hypot(self.rest, np.minimum(self.rest_ms / np.maximum(costs_ms, _FLOOR), 1.0))


@dataclass(frozen=True)
class Prices:
    """Predicted costs, in any shape. `deviation` is that of the total, relative."""

    forward_ms: Tensor
    backward_ms: Tensor
    deviation: Tensor

    @property
    def total_ms(self) -> Tensor:
        """Forward and backward together."""
        return self.forward_ms + self.backward_ms


@dataclass(frozen=True, eq=False)
class ComputeCostModel:
    """An ensemble of set networks with calibrated uncertainty.

    Amounts of pieces and their sums over shards have shape [..., members, amounts].

    Attributes:
        shape: Sizes of the networks.
        scale: Normalisation of inputs, and their range in the training data.
        ensemble: The networks.
        uncertainty: Parameters of intervals.
        prior: Prior of table corrections.
    """

    shape: NetworkShape
    scale: InputScale
    ensemble: Ensemble
    uncertainty: Uncertainty
    prior: ResidualPrior = field(default_factory=ResidualPrior)

    @cached_property
    def _fusion(self) -> State:
        return self.ensemble.weights_of("fusion")

    def with_ensemble(self, ensemble: Ensemble) -> "ComputeCostModel":
        """Returns the model with other weights."""
        return replace(self, ensemble=ensemble)

    def with_input_range(self, inputs: Tensor) -> "ComputeCostModel":
        """Returns the model with its in-distribution range extended to these inputs."""
        low = torch.minimum(self.scale.low, inputs.amin(0))
        high = torch.maximum(self.scale.high, inputs.amax(0))
        scale = self.scale._replace(low=low, high=high)
        ensemble = Ensemble(ShardNetwork(self.shape, scale), self.ensemble.weights)
        return replace(self, scale=scale, ensemble=ensemble)

    @torch.no_grad()
    def amounts(self, pieces: Sequence[Piece], batch_size: int) -> Tensor:
        """Returns what each piece adds to the sums of a shard, shape [pieces, members, amounts]."""
        return self.amounts_of(piece_inputs(pieces, batch_size))

    @torch.no_grad()
    def amounts_of(self, inputs: Tensor) -> Tensor:
        """Returns the amounts of pieces with these inputs, shape [pieces, members, amounts]."""
        return self.ensemble("table", inputs).transpose(0, 1).contiguous()

    def described(self, amounts: Tensor) -> Tensor:
        """Returns the amounts that mean the same in every model, shape [..., named amounts].

        These are forward and backward ms beside other tables, terms of work, and 1 for each table,
        as means over members. They are additive too.
        """
        named = [*range(DIRECTIONS + len(TERMS)), self.shape.count]
        return amounts.mean(-2)[..., named]

    @torch.no_grad()
    def price(self, sums: Tensor) -> Prices:
        """Returns the costs of shards with these sums of amounts; 0 for empty shards."""
        flat = sums.reshape(-1, *sums.shape[-2:])
        if len(flat) <= _BLOCK:
            return Prices(*(values.reshape(sums.shape[:-2]) for values in self._price(flat)))
        parts = [self._price(part) for part in torch.split(flat, _BLOCK)]
        forward, backward, deviation = (
            torch.cat(values).reshape(sums.shape[:-2]) for values in zip(*parts, strict=True)
        )
        return Prices(forward, backward, deviation)

    def _price(self, sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        costs = fused_ms(sums.transpose(0, 1), self._fusion)  # [members, 2, shards]
        means = costs.mean(0)
        # In place: for few shards most of the time goes into single operations.
        disagreement = (costs[:, 0] + costs[:, 1]).div_(means[0] + means[1]).sub_(1)
        variance = disagreement.square_().mean(0)
        # The excess by one member is as good as that by all, and cheaper.
        member = sums[:, 0]
        tables_ms = (member[:, 0] + member[:, 1]).clamp_min_(_FLOOR)
        excess = member[:, self.shape.uncertainty] / tables_ms
        variance.addcmul_(excess, excess, value=self.prior.extrapolation**2)
        scale, noise = self.uncertainty.scale, self.uncertainty.noise
        deviation = variance.mul_(scale**2).add_(noise**2).sqrt_()
        occupied = self.holds_any(sums).to(sums.dtype)
        forward, backward = means.mul_(occupied).unbind()
        return forward, backward, deviation.mul_(occupied)

    @torch.no_grad()
    def means(self, sums: Tensor) -> Tensor:
        """Returns ms of `price`, forward and backward [..., 2], in less time."""
        flat = sums.reshape(-1, *sums.shape[-2:])
        parts = []
        for part in torch.split(flat, _BLOCK):
            costs = fused_ms(part.transpose(0, 1), self._fusion).mean(0)
            parts.append(costs.mul_(self.holds_any(part)))
        means = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return means.mT.reshape(*sums.shape[:-2], DIRECTIONS)

    def holds_any(self, sums: Tensor) -> Tensor:
        """Returns which sums of amounts have any tables in them, shape [shards]."""
        return sums[:, 0, self.shape.count] > HALF_A_TABLE

    def predict(self, shards: Sequence[Shard], batch_sizes: Sequence[int]) -> Prices:
        """Returns the costs of shards, each with its batch size."""
        rows = PieceRows()
        memberships = rows.of_all(shards, batch_sizes)
        return self.price(memberships.sums(self.amounts_of(rows.inputs())))
