"""`ComputeCostModel`: forward and backward milliseconds of any shard of any tables."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autoshard.cost_model.ensemble import Ensemble
from autoshard.cost_model.inputs import PieceRows, piece_inputs
from autoshard.cost_model.network import (
    DIRECTIONS,
    TERMS,
    InputScale,
    NetworkShape,
    ShardNetwork,
    fused_ms,
)
from autoshard.workload import Piece, Shard

OUT_OF_DISTRIBUTION = 1.0  # deviations beyond what was learned from at which a table is told of
_AT_ONCE = 2048  # shards priced together: more do not fit a core's own cache
_FLOOR = 1e-9
_HALF_A_TABLE = 0.5  # sums of nothing are not exactly 0


@dataclass(frozen=True)
class Uncertainty:
    """How the networks' disagreement becomes an interval; fitted on shards held out.

    The relative deviation of a cost is sqrt((disagreement * scale)^2 + noise^2), where strange
    tables count as disagreement; `width_90` and `width_95` are how many of them the intervals of
    90 and 95 % reach to either side.
    """

    scale: float = 1.0
    noise: float = 0.05
    width_90: float = 1.645
    width_95: float = 1.96


@dataclass(frozen=True)
class ResidualPrior:
    """What is believed of tables' factors, beside what networks say, before any is measured.

    Deviations of their logarithms; fitted on tables held out.

    Args:
        own: of a table, whatever others are.
        alike: that tables which are alike share.
        doubt: of a table for each deviation that it lies outside of what was learned from; shared
            by tables that are alike.
        rest: of a shard's cost, when all is known of its tables.
    """

    own: float = 0.05
    shared: float = 0.05
    extrapolation: float = 0.3
    rest: float = 0.03


@dataclass(frozen=True)
class Prices:
    """Estimated costs, in any shape. `deviation` is relative, of the total."""

    forward_ms: Tensor
    backward_ms: Tensor
    deviation: Tensor

    @property
    def total_ms(self) -> Tensor:
        """Forward and backward together."""
        return self.forward_ms + self.backward_ms


class ComputeCostModel:
    """An ensemble of set networks that knows how well it knows.

    Amounts of tables and their sums over shards are [..., members, amounts].
    """

    def __init__(
        self,
        shape: NetworkShape,
        scale: InputScale,
        ensemble: Ensemble,
        uncertainty: Uncertainty,
        prior: ResidualPrior | None = None,
    ) -> None:
        self.shape = shape
        self.scale = scale
        self.ensemble = ensemble
        self.uncertainty = uncertainty
        self.prior = prior or ResidualPrior()
        self._fusion = ensemble.weights_of("fusion")

    def with_uncertainty(
        self, uncertainty: Uncertainty, prior: ResidualPrior | None = None
    ) -> "ComputeCostModel":
        """The same networks, trusted otherwise."""
        prior = prior or self.prior
        return ComputeCostModel(self.shape, self.scale, self.ensemble, uncertainty, prior)

    def with_input_range(self, inputs: Tensor) -> "ComputeCostModel":
        """The same networks, to which tables with such inputs are no strangers."""
        low = torch.minimum(self.scale.low, inputs.amin(0))
        high = torch.maximum(self.scale.high, inputs.amax(0))
        scale = self.scale._replace(low=low, high=high)
        ensemble = Ensemble(ShardNetwork(self.shape, scale), self.ensemble.weights)
        return ComputeCostModel(self.shape, scale, ensemble, self.uncertainty, self.prior)

    def with_ensemble(self, ensemble: Ensemble) -> "ComputeCostModel":
        """Other networks of the same shape, trusted alike."""
        return ComputeCostModel(self.shape, self.scale, ensemble, self.uncertainty, self.prior)

    @torch.no_grad()
    def amounts(self, pieces: Sequence[Piece], batch_size: int) -> Tensor:
        """What each slice brings to whichever shard it joins: [slices, members, amounts]."""
        return self.amounts_of(piece_inputs(pieces, batch_size))

    @torch.no_grad()
    def amounts_of(self, inputs: Tensor) -> Tensor:
        """The same by the slices' inputs."""
        return self.ensemble("table", inputs).transpose(0, 1).contiguous()

    def described(self, amounts: Tensor) -> Tensor:
        """Those amounts that mean the same to every model: [..., amounts with a name].

        Forward and backward ms beside others, terms of work, and 1 for the table, as means of the
        members. They add up too.
        """
        named = [*range(DIRECTIONS + len(TERMS)), self.shape.count]
        return amounts.mean(-2)[..., named]

    @torch.no_grad()
    def price(self, sums: Tensor) -> Prices:
        """What shards with these sums of amounts cost; nothing if there are no tables in them."""
        flat = sums.reshape(-1, *sums.shape[-2:])
        if len(flat) <= _AT_ONCE:
            return Prices(*(values.reshape(sums.shape[:-2]) for values in self._price(flat)))
        parts = [self._price(part) for part in torch.split(flat, _AT_ONCE)]
        forward, backward, deviation = (
            torch.cat(values).reshape(sums.shape[:-2]) for values in zip(*parts, strict=True)
        )
        return Prices(forward, backward, deviation)

    def _price(self, sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        costs = fused_ms(sums.transpose(0, 1), self._fusion)  # [members, 2, shards]
        means = costs.mean(0)
        # In place where it may be: for few shards most of the time goes into single operations.
        off = (costs[:, 0] + costs[:, 1]).div_(means[0] + means[1]).sub_(1)
        variance = off.square_().mean(0)
        # One member's doubt is as good as that of all, and cheaper.
        first = sums[:, 0]
        alone = (first[:, 0] + first[:, 1]).clamp_min_(_FLOOR)
        doubt = first[:, self.shape.uncertainty] / alone
        unsure = variance.addcmul_(doubt, doubt, value=self.prior.extrapolation**2)
        known = self.uncertainty
        deviation = unsure.mul_(known.scale**2).add_(known.noise**2).sqrt_()
        used = self.holds_any(sums).to(sums.dtype)
        forward, backward = means.mul_(used).unbind()
        return forward, backward, deviation.mul_(used)

    @torch.no_grad()
    def means(self, sums: Tensor) -> Tensor:
        """The milliseconds of `price` alone, forward and backward [..., 2], in less time."""
        flat = sums.reshape(-1, *sums.shape[-2:])
        parts = []
        for part in torch.split(flat, _AT_ONCE):
            costs = fused_ms(part.transpose(0, 1), self._fusion).mean(0)
            parts.append(costs.mul_(self.holds_any(part)))
        found = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return found.mT.reshape(*sums.shape[:-2], DIRECTIONS)

    def holds_any(self, sums: Tensor) -> Tensor:
        """Whether there are tables in shards with these sums of amounts: [shards]."""
        return sums[:, 0, self.shape.count] > _HALF_A_TABLE

    def predict(self, shards: Sequence[Shard], batch_sizes: Sequence[int]) -> Prices:
        """What shards cost, each in a batch of its size."""
        rows = PieceRows()
        held = rows.of_all(shards, batch_sizes)
        return self.price(held.sums(self.amounts_of(rows.inputs())))

    def excess(self, inputs: Tensor) -> Tensor:
        """How far outside of what was learned from inputs lie, in deviations."""
        return self.scale.excess(inputs)
