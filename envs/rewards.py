"""What a game is worth: objects that turn the devices' costs into a reward, and where costs come
from: `EstimatedRewards`, `MeasuredRewards`, `MixedRewards`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from autoshard.benchmark import BenchmarkPool, MeasureSettings
from autoshard.cost_model.outlook import expected_max, sharpness
from autoshard.envs.game import ShardingGame

_LEAST_MS = 1e-9
_DEAD_END = 2.0  # worse than any sensible plan, yet not so much that nothing else counts


class Reward(Protocol):
    """What games are worth. An episode's rewards add up to `complete`, or to `dead_end`."""

    def along(self, worst_before: Tensor, worst_after: Tensor) -> Tensor:
        """Paid for a step that changed the predicted maximum, over the bound: [games]."""
        ...

    def complete(self, costs_ms: Tensor, exists: Tensor, bound_ms: Tensor) -> Tensor:
        """Of games whose devices cost [games, devices]; `exists` tells which are devices."""
        ...

    def dead_end(self, left_share: Tensor) -> Tensor:
        """Of games that ended with a share of their tables unplaced."""
        ...


@dataclass(frozen=True)
class Balance:
    """The least over the greatest cost of a device, as in AutoShard: 0 to 1."""

    def along(self, worst_before: Tensor, worst_after: Tensor) -> Tensor:  # noqa: ARG002
        """Nothing."""
        return torch.zeros_like(worst_after)

    def complete(
        self,
        costs_ms: Tensor,
        exists: Tensor,
        bound_ms: Tensor,  # noqa: ARG002
    ) -> Tensor:
        """The balance."""
        least = costs_ms.masked_fill(~exists, torch.inf).amin(1)
        return least / costs_ms.masked_fill(~exists, 0.0).amax(1).clamp_min(1e-9)

    def dead_end(self, left_share: Tensor) -> Tensor:
        """Less than the worst balance."""
        return -_DEAD_END * (1 + left_share)


@dataclass(frozen=True)
class NegativeMaximum:
    """Minus the slowest device's cost over what it could be at best (`bound_ms`): -1 is ideal."""

    def along(self, worst_before: Tensor, worst_after: Tensor) -> Tensor:  # noqa: ARG002
        """Nothing."""
        return torch.zeros_like(worst_after)

    def complete(self, costs_ms: Tensor, exists: Tensor, bound_ms: Tensor) -> Tensor:
        """Minus the relative maximum."""
        return -costs_ms.masked_fill(~exists, 0.0).amax(1) / bound_ms

    def dead_end(self, left_share: Tensor) -> Tensor:
        """As if one device did the work of two, and up to four."""
        return -_DEAD_END * (1 + left_share)


@dataclass(frozen=True)
class Dense:
    """Another reward, part of which is paid on the way: each step pays how far it raised the
    predicted maximum. The end pays the rest, so episodes are worth what they were.
    """

    total: Reward = field(default_factory=NegativeMaximum)

    def along(self, worst_before: Tensor, worst_after: Tensor) -> Tensor:
        """Minus the rise."""
        return worst_before - worst_after

    def complete(self, costs_ms: Tensor, exists: Tensor, bound_ms: Tensor) -> Tensor:
        """That of the other reward."""
        return self.total.complete(costs_ms, exists, bound_ms)

    def dead_end(self, left_share: Tensor) -> Tensor:
        """That of the other reward."""
        return self.total.dead_end(left_share)


class CostSource(Protocol):
    """Says what the devices of finished games cost."""

    @property
    def measured(self) -> int:
        """Shards asked of a pool so far."""
        ...

    def __call__(self, game: ShardingGame, seats: Sequence[int]) -> Tensor:
        """Milliseconds [seats, devices]; 0 for devices that are empty or do not exist."""
        ...


class EstimatedRewards:
    """Costs by the cost model: DreamShard's way.

    Args:
        scenarios: in which the slowest device is expected: devices' costs are then scaled so that
            the greatest is that expectation. With 0 they are as estimated.
    """

    measured = 0

    def __init__(self, scenarios: int = 0) -> None:
        self._scenarios = scenarios

    def __call__(self, game: ShardingGame, seats: Sequence[int]) -> Tensor:
        """What the game has predicted on the way, or expects in scenarios."""
        costs = game.cost_ms[list(seats)]
        if not self._scenarios or not len(seats):
            return costs
        scale = self._expected_ms(game, seats) / costs.amax(1).clamp_min(_LEAST_MS)
        return costs * scale[:, None]

    def _expected_ms(self, game: ShardingGame, seats: Sequence[int]) -> Tensor:
        """The slowest device of each game: [seats]."""
        pricing, amounts = game.deck.in_scenarios(self._scenarios)
        costs = pricing.price(game.sums_of(amounts, torch.tensor(seats)))
        power = sharpness(game.deck.model.compute.prior.rest)
        return torch.from_numpy(expected_max(costs.double().numpy(), power)).float()


class MeasuredRewards:
    """Costs by the cluster's benchmark pool. All seats are measured in one call.

    A shard that cannot be measured counts with its estimate.

    Args:
        store: where measurements are kept.
        kind: of devices that measure.
    """

    def __init__(self, store: Path | str, kind: str = "auto") -> None:
        self._store, self._kind = str(store), kind
        self.measured = 0
        self._pool: BenchmarkPool | None = None  # found where the games are played

    def __call__(self, game: ShardingGame, seats: Sequence[int]) -> Tensor:
        """Measured, told at the level of quiet that the cost model knows."""
        costs = game.cost_ms[list(seats)].clone()
        places, shards = [], []
        for row, seat in enumerate(seats):
            for device, shard in enumerate(game.shards(seat)):
                if shard is not None:
                    places.append((row, device))
                    shards.append(shard)
        deck = game.deck
        level = deck.model.provenance.quiet
        self._pool = self._pool or BenchmarkPool(self._store, kind=self._kind)
        answers = self._pool.measure(shards, MeasureSettings(deck.batch_size, deck.operator))
        for (row, device), answer in zip(places, answers, strict=True):
            if answer.ok:
                costs[row, device] = answer.told_at(level).total_ms
        self.measured += len(shards)
        return costs


class MixedRewards:
    """Estimated costs; those of a share of the games, drawn at random, are measured.

    What is measured goes into the store, where the cost model learns from it.
    """

    def __init__(self, measured: MeasuredRewards, share: float, seed: int = 0) -> None:
        self._measured, self._share = measured, share
        self._rng = np.random.default_rng(seed)

    @property
    def measured(self) -> int:
        """Shards asked of the pool."""
        return self._measured.measured

    def __call__(self, game: ShardingGame, seats: Sequence[int]) -> Tensor:
        """Measured for some of the seats, estimated for the others."""
        costs = EstimatedRewards()(game, seats)
        chosen = np.flatnonzero(self._rng.random(len(seats)) < self._share).tolist()
        if chosen:
            costs[chosen] = self._measured(game, [seats[row] for row in chosen])
        return costs
