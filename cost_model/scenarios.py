"""Scenarios: draws of what is not known, so that plans are chosen and told of as risks.

A scenario is a member of the ensemble and a factor for each table, one draw for all of its slices,
wherever they lie: a table takes its doubt along, so in a comparison of two plans it cancels.
Amounts add up in each scenario as they do in the mean, so scenarios are one more dimension of sums.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from autoshard.cost_model.compute import ComputeCostModel
from autoshard.cost_model.network import DIRECTIONS, fused_ms
from autoshard.cost_model.table_residuals import ResidualPosterior
from autoshard.workload import EmbeddingTable, Piece

_AT_ONCE = 512  # shards priced together: more do not fit a core's own cache


Embed = Callable[[Sequence[Piece]], Tensor]  # amounts of slices by each member


class Pricing(Protocol):
    """Prices sums of amounts in one or several scenarios."""

    def amounts(self, pieces: Sequence[Piece]) -> Tensor:
        """What each slice brings to whichever shard it joins; it adds up."""
        ...

    def price(self, sums: Tensor) -> Tensor:
        """Milliseconds of shards with such sums, forward and backward: [..., scenarios, 2]."""
        ...


class Expectation:
    """The one scenario in which all is as estimated.

    Args:
        model: the networks.
        embed: what slices bring by each of them.
    """

    def __init__(self, model: ComputeCostModel, embed: Embed) -> None:
        self._model = model
        self.amounts = embed

    def price(self, sums: Tensor) -> Tensor:
        """Milliseconds, forward and backward: [..., 1, 2]."""
        return self._model.means(sums)[..., None, :]


class Scenarios:
    """Prices shards of given tables in several scenarios.

    Args:
        model: the networks.
        embed: what slices bring by each of them.
        groups: all tables that there may be slices of.
        beliefs: what is known of the factors of each group; the mean of it is in `embed`.
        count: scenarios; an even number.
        seed: of the draws.
    """

    def __init__(
        self,
        model: ComputeCostModel,
        embed: Embed,
        groups: Sequence[Sequence[EmbeddingTable]],
        beliefs: Sequence[ResidualPosterior],
        count: int,
        seed: int = 0,
    ) -> None:
        rng = np.random.default_rng([seed, count])
        drawn = []
        for tables, known in zip(groups, beliefs, strict=True):
            half = rng.standard_normal((count // 2, len(tables)))
            draws = np.concatenate([half, -half])  # whatever is low in one is high in another
            # In torch, whose threads are ours to count.
            far = torch.from_numpy(draws) @ torch.from_numpy(known.roots).mT
            drawn.append(far.exp().permute(1, 2, 0).numpy())
        factors = np.concatenate(drawn, axis=1)  # [S, tables, directions]
        factors /= factors.mean(0)  # so that the mean over scenarios is the estimate
        every = [table for tables in groups for table in tables]
        self.count = count
        self._model = model
        self._embed = embed
        self._numbers = {table.access_digest: n for n, table in enumerate(every)}
        self._factors = torch.from_numpy(factors).float().transpose(0, 1)  # [tables, S, 2]
        self._members = torch.arange(count) % model.ensemble.members
        fusion = model.ensemble.weights_of("fusion")
        self._both = torch.cat([torch.arange(model.ensemble.members), self._members])
        self._fusion = {name: weight[self._both] for name, weight in fusion.items()}
        self._stretch = model.uncertainty.scale

    def amounts(self, pieces: Sequence[Piece]) -> Tensor:
        """What each slice brings by each member and in each scenario.

        [slices, members + scenarios, amounts]
        """
        amounts = self._embed(pieces)[:, self._both]
        rows = [self._numbers[piece.table.access_digest] for piece in pieces]
        amounts[:, -self.count :, :DIRECTIONS] *= self._factors[rows]
        return amounts

    @torch.no_grad()
    def price(self, sums: Tensor) -> Tensor:
        """Milliseconds of shards with such sums in each scenario, forward and backward:
        [..., scenarios, 2].
        """
        flat = sums.reshape(-1, *sums.shape[-2:])
        parts = [self._price(part) for part in torch.split(flat, _AT_ONCE)]
        return torch.cat(parts).reshape(*sums.shape[:-2], self.count, DIRECTIONS)

    def _price(self, sums: Tensor) -> Tensor:
        costs = fused_ms(sums.transpose(0, 1), self._fusion)  # [members + S, 2, n]
        members = self._model.ensemble.members
        alone, drawn = costs[:members].sum(1), costs[members:]
        # Members differ from each other otherwise than from the truth, but not in their mean.
        mean = alone.mean(0)
        stretched = (alone / mean).pow(self._stretch)
        factors = stretched / stretched.mean(0) * mean / alone * self._model.holds_any(sums)
        return (drawn * factors[self._members][:, None]).permute(2, 0, 1)
