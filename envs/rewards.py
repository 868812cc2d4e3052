"""What a game is worth: objects that turn what its plan costs into a reward, and where costs come
from: `EstimatedRewards`, `MeasuredRewards`, `MixedRewards`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from autoshard import benchmark  # whose pool is loaded where something is measured
from autoshard.envs.batched_env import BatchedPlacementEnv
from autoshard.workload.step_price import StepPrice, expected_slowest, norm_power

_MIN_MS = 1e-9
_INFEASIBLE = 2.0  # worse than any sensible plan, yet not so much that nothing else counts


@dataclass(frozen=True)
class Costs:
    """What finished games cost: a step by each one's objective [games], and each device in all of
    its phases [games, devices], 0 for those that do not exist.
    """

    plan_ms: Tensor
    devices_ms: Tensor


class Reward(Protocol):
    """What games are worth. An episode's rewards add up to `complete`, or to `dead_end`."""

    def along(self, before: Tensor, after: Tensor) -> Tensor:
        """Paid for a step that changed what the plan so far costs, over the bound: [games]."""
        ...

    def complete(self, costs: Costs, exists: Tensor, lower_bound_ms: Tensor) -> Tensor:
        """Of games that ended well; `exists` tells which are devices."""
        ...

    def infeasible(self, left_share: Tensor) -> Tensor:
        """Of games that ended with a share of their tables unplaced."""
        ...


@dataclass(frozen=True)
class Balance:
    """The least over the greatest cost of a device, as in AutoShard: 0 to 1."""

    def along(self, before: Tensor, after: Tensor) -> Tensor:  # noqa: ARG002
        """Nothing."""
        return torch.zeros_like(after)

    def complete(
        self,
        costs: Costs,
        exists: Tensor,
        lower_bound_ms: Tensor,  # noqa: ARG002
    ) -> Tensor:
        """The balance."""
        least = costs.devices_ms.masked_fill(~exists, torch.inf).amin(1)
        return least / costs.devices_ms.amax(1).clamp_min(_MIN_MS)

    def infeasible(self, left_share: Tensor) -> Tensor:
        """Less than the worst balance."""
        return -_INFEASIBLE * (1 + left_share)


@dataclass(frozen=True)
class NegativeStep:
    """Minus what a step takes over what it could at best (`bound_ms`): -1 is ideal."""

    def along(self, before: Tensor, after: Tensor) -> Tensor:  # noqa: ARG002
        """Nothing."""
        return torch.zeros_like(after)

    def complete(
        self,
        costs: Costs,
        exists: Tensor,  # noqa: ARG002
        lower_bound_ms: Tensor,
    ) -> Tensor:
        """Minus what the step takes, relative."""
        return -costs.plan_ms / lower_bound_ms

    def infeasible(self, left_share: Tensor) -> Tensor:
        """As if one device did the work of two, and up to four."""
        return -_INFEASIBLE * (1 + left_share)


@dataclass(frozen=True)
class Dense:
    """Another reward, part of which is paid on the way: each action pays how far it raised what a
    step is predicted to take. The end pays the rest, so episodes are worth what they were.
    """

    total: Reward = field(default_factory=NegativeStep)

    def along(self, before: Tensor, after: Tensor) -> Tensor:
        """Minus the rise."""
        return before - after

    def complete(self, costs: Costs, exists: Tensor, lower_bound_ms: Tensor) -> Tensor:
        """That of the other reward."""
        return self.total.complete(costs, exists, lower_bound_ms)

    def infeasible(self, left_share: Tensor) -> Tensor:
        """That of the other reward."""
        return self.total.infeasible(left_share)


class CostSource(Protocol):
    """Says what finished games cost."""

    @property
    def measured(self) -> int:
        """Shards asked of a pool so far."""
        ...

    def __call__(self, episodes: BatchedPlacementEnv, env_ids: Sequence[int]) -> Costs:
        """Of games on these seats that ended well."""
        ...


class EstimatedRewards:
    """Costs by the cost model: DreamShard's way.

    Args:
        scenarios: in which a step is expected: costs are then scaled so that it takes that long.
            With 0 they are as estimated.
    """

    measured = 0

    def __init__(self, scenarios: int = 0) -> None:
        self._scenarios = scenarios

    def __call__(self, episodes: BatchedPlacementEnv, env_ids: Sequence[int]) -> Costs:
        """What the game has predicted on the way, or expects in scenarios."""
        chosen = list(env_ids)
        costs = Costs(episodes.plan_ms[chosen], episodes.cost_ms[chosen])
        if not self._scenarios or not len(env_ids):
            return costs
        scale = self._expected_ms(episodes, env_ids) / costs.plan_ms.clamp_min(_MIN_MS)
        return Costs(costs.plan_ms * scale, costs.devices_ms * scale[:, None])

    def _expected_ms(self, episodes: BatchedPlacementEnv, env_ids: Sequence[int]) -> Tensor:
        """What a step of each game is expected to take: [seats]."""
        chosen = torch.tensor(env_ids)
        pricing, amounts = episodes.catalog.in_scenarios(self._scenarios)
        costs = pricing.price(episodes.sums_of(amounts, chosen))  # [seats, devices, scenarios, 2]
        power = norm_power(episodes.catalog.model.compute.prior.rest)
        expected = episodes.stages_ms[chosen, :, -1].amax(1)  # all-to-alls are as they are
        price = StepPrice.rows(episodes.prices[chosen, :, None])
        for stage in price.compute_stages(*costs.unbind(-1)):
            slowest = expected_slowest(stage.double().numpy(), power)
            expected = expected + torch.from_numpy(slowest).float()
        return expected


class MeasuredRewards:
    """Costs by the cluster's benchmark pool. All seats are measured in one call.

    A shard that cannot be measured counts with its estimate; all-to-alls go by the objective.

    Args:
        store: where measurements are kept.
        kind: of devices that measure.
    """

    def __init__(self, store: Path | str, kind: str = "auto") -> None:
        self._store, self._kind = str(store), kind
        self.measured = 0
        self._pool: benchmark.BenchmarkPool | None = None  # found where the games are played

    def __call__(self, episodes: BatchedPlacementEnv, env_ids: Sequence[int]) -> Costs:
        """Measured, told at the level of quiet that the cost model knows."""
        prices = episodes.catalog.price(episodes.sums)
        forward, backward = prices.forward_ms, prices.backward_ms
        places, shards = [], []
        for env_id in env_ids:
            for device, shard in enumerate(episodes.shards(env_id)):
                if shard is not None:
                    places.append((env_id, device))
                    shards.append(shard)
        catalog = episodes.catalog
        level = catalog.model.provenance.reference_level
        self._pool = self._pool or benchmark.BenchmarkPool(self._store, kind=self._kind)
        settings = benchmark.MeasureSettings(catalog.batch_size, catalog.operator)
        answers = self._pool.measure(shards, settings)
        for where, answer in zip(places, answers, strict=True):
            if answer.ok:
                cost = answer.normalized_to(level).cost()
                forward[where], backward[where] = cost.forward_ms, cost.backward_ms
        self.measured += len(shards)
        waits = torch.stack(episodes.stages(forward, backward, episodes.columns), dim=-1)[
            list(env_ids)
        ]
        return Costs(waits.amax(1).sum(1), waits.sum(2))


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

    def __call__(self, episodes: BatchedPlacementEnv, env_ids: Sequence[int]) -> Costs:
        """Measured for some of the seats, estimated for the others."""
        costs = EstimatedRewards()(episodes, env_ids)
        chosen = np.flatnonzero(self._rng.random(len(env_ids)) < self._share).tolist()
        if chosen:
            told = self._measured(episodes, [env_ids[row] for row in chosen])
            costs.plan_ms[chosen], costs.devices_ms[chosen] = told.plan_ms, told.devices_ms
        return costs
