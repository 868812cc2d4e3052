"""Scenarios: joint samples of everything that is uncertain about costs.

A scenario is a member of the ensemble and one correction for each table, which all its pieces share
wherever they are. So in a comparison of two plans the uncertainty of a table cancels. Amounts are
additive in each scenario: scenarios are one more dimension of sums.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from autoshard.cost_model.networks.compute import ComputeCostModel
from autoshard.cost_model.networks.network import DIRECTIONS, fused_ms
from autoshard.cost_model.step.common_price import CommonPrice, CommonPrices
from autoshard.cost_model.step.overhead import SumOverhead
from autoshard.cost_model.uncertainty.residuals import ResidualPosterior
from autoshard.workload import EmbeddingTable, Piece, ShardingTask

_BLOCK = 512  # shards priced together: more do not fit a core's own cache


Embed = Callable[[Sequence[Piece]], Tensor]  # amounts of pieces by each member


class Pricing(Protocol):
    """Prices sums of amounts in one or several scenarios."""

    def amounts(self, pieces: Sequence[Piece]) -> Tensor:
        """Returns the additive amounts of each piece."""
        ...

    def price(self, sums: Tensor) -> Tensor:
        """Returns forward and backward ms of shards with these sums, [..., scenarios, 2]."""
        ...

    def of_devices(self, hardware: Sequence[str]) -> Tensor | float:
        """Returns the amounts with which the sums of these devices begin, before any unit.

        They say what kinds of devices these are; 0 where all are of one kind.
        """
        ...

    def common(self, task: ShardingTask) -> CommonPrice:
        """Returns the price of what all devices bear alike."""
        ...


class Expectation:
    """Pricing with one scenario: the mean of the ensemble.

    Args:
        model: Cost model.
        embed: Returns the amounts of pieces by each member.
        overhead: What training takes beside operators, if that counts.
    """

    def __init__(
        self, model: ComputeCostModel, embed: Embed, overhead: SumOverhead | None = None
    ) -> None:
        self._model, self._overhead = model, overhead
        self._common = CommonPrices(None if overhead is None else overhead.of_step)
        self.amounts = embed

    def price(self, sums: Tensor) -> Tensor:
        """Returns forward and backward ms, [..., 1, 2]."""
        means = self._model.means(sums)
        if self._overhead is not None:
            means = self._overhead.add(means, sums[..., 0, :])
        return means[..., None, :]

    def of_devices(self, hardware: Sequence[str]) -> float:  # noqa: ARG002 - of one kind
        """Returns 0: devices are of one kind."""
        return 0.0

    def common(self, task: ShardingTask) -> CommonPrice:
        """Returns the price of what all devices bear alike."""
        return self._common.of(task)


class Scenarios:
    """Prices shards of given tables in several scenarios.

    Args:
        model: Cost model.
        embed: Returns the amounts of pieces by each member, at posterior means.
        groups: All tables of the pieces.
        posteriors: Posterior of the corrections of each group.
        count: Number of scenarios, which is even.
        seed: Seed of the samples.
        overhead: What training takes beside operators, if that counts.

    Attributes:
        count: Number of scenarios.
        overhead: The same overhead.
    """

    def __init__(
        self,
        model: ComputeCostModel,
        embed: Embed,
        groups: Sequence[Sequence[EmbeddingTable]],
        posteriors: Sequence[ResidualPosterior],
        count: int,
        seed: int = 0,
        overhead: SumOverhead | None = None,
    ) -> None:
        self.overhead = overhead
        self._common = CommonPrices(None if overhead is None else overhead.of_step)
        rng = np.random.default_rng([seed, count])
        drawn = []
        for tables, posterior in zip(groups, posteriors, strict=True):
            half = rng.standard_normal((count // 2, len(tables)))
            normals = torch.from_numpy(np.concatenate([half, -half]))  # antithetic
            # In torch, whose number of threads is limited here.
            logs = normals @ torch.from_numpy(posterior.roots).mT
            drawn.append(logs.exp().permute(1, 2, 0).numpy())
        factors = np.concatenate(drawn, axis=1)  # [S, tables, directions]
        factors /= factors.mean(0)  # so that the mean over scenarios is the estimate
        self.count = count
        self._model = model
        self._embed = embed
        digests = [table.access_digest for tables in groups for table in tables]
        self._numbers = {digest: n for n, digest in enumerate(digests)}
        self._factors = torch.from_numpy(factors).float().transpose(0, 1)  # [tables, S, 2]
        self._members = torch.arange(count) % model.ensemble.members
        fusion = model.ensemble.weights_of("fusion")
        self._both = torch.cat([torch.arange(model.ensemble.members), self._members])
        self._fusion = {name: weight[self._both] for name, weight in fusion.items()}
        self._stretch = model.uncertainty.scale

    def with_parts(self, tables: Mapping[str, str]) -> "Scenarios":
        """Returns the same scenarios for parts of tables, each with its table's corrections.

        Args:
            tables: Access digest of the table of each part, by the part's.
        """
        found = copy(self)
        found._numbers = {p: self._numbers[t] for p, t in tables.items()} | self._numbers
        return found

    def amounts(self, pieces: Sequence[Piece]) -> Tensor:
        """Returns the amounts of pieces, shape [pieces, members + scenarios, amounts]."""
        amounts = self._embed(pieces)[:, self._both]
        rows = [self._numbers[piece.table.access_digest] for piece in pieces]
        amounts[:, -self.count :, :DIRECTIONS] *= self._factors[rows]
        return amounts

    def of_devices(self, hardware: Sequence[str]) -> Tensor | float:  # noqa: ARG002 - of one kind
        """Returns 0: devices are of one kind."""
        return 0.0

    def price(self, sums: Tensor) -> Tensor:
        """Returns forward and backward ms in each scenario, [..., scenarios, 2]."""
        return self.in_training(self.operators_ms(sums), sums)

    def common(self, task: ShardingTask) -> CommonPrice:
        """Returns the price of what all devices bear alike."""
        return self._common.of(task)

    def in_training(self, operators_ms: Tensor, sums: Tensor) -> Tensor:
        """Returns ms of passes, of which operators take these [..., scenarios, 2]."""
        if self.overhead is None:
            return operators_ms
        return self.overhead.add(operators_ms, sums[..., :1, :])

    @torch.no_grad()
    def operators_ms(self, sums: Tensor) -> Tensor:
        """Returns forward and backward ms of operators in each scenario, [..., scenarios, 2]."""
        flat = sums.reshape(-1, *sums.shape[-2:])
        parts = [self._price(part) for part in torch.split(flat, _BLOCK)]
        return torch.cat(parts).reshape(*sums.shape[:-2], self.count, DIRECTIONS)

    def _price(self, sums: Tensor) -> Tensor:
        costs = fused_ms(sums.transpose(0, 1), self._fusion)  # [members + S, 2, n]
        members = self._model.ensemble.members
        alone, drawn = costs[:members].sum(1), costs[members:]
        # Disagreement is scaled to the fitted uncertainty; the mean of members stays.
        mean = alone.mean(0)
        stretched = (alone / mean).pow(self._stretch)
        factors = stretched / stretched.mean(0) * mean / alone * self._model.holds_any(sums)
        return (drawn * factors[self._members][:, None]).permute(2, 0, 1)
