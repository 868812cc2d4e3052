"""Rewards of episodes (`Reward`), and the costs that they are computed from (`CostSource`)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from autoshard import benchmark  # whose pool is loaded where something is measured
from autoshard.cost_model.step.overhead import loads_of
from autoshard.envs.batched_env import BatchedPlacementEnv
from autoshard.workload.plans.step_price import StepPrice, expected_slowest, norm_power

_MIN_MS = 1e-9
_INFEASIBLE = 2.0  # worse than any sensible plan, but on the same scale


@dataclass(frozen=True)
class Costs:
    """Costs of completed episodes.

    Args:
        plan_ms: Step time by the task's objective, [episodes].
        devices_ms: Time of each device in all phases, 0 for padding: [episodes, devices].
    """

    plan_ms: Tensor
    devices_ms: Tensor


class Reward(Protocol):
    """Rewards of episodes. The return of an episode is `complete` or `infeasible`."""

    def shaping(self, before: Tensor, after: Tensor) -> Tensor:  # noqa: ARG002
        """Returns the rewards of a step before the end, by default 0: [episodes].

        The last reward makes up for them, so that they do not change the return.

        Args:
            before: Step time of the partial plan before the step over the lower bound, [episodes].
            after: The same ratio after the step.
        """
        return torch.zeros_like(after)

    def complete(self, costs: Costs, exists: Tensor, lower_bound_ms: Tensor) -> Tensor:
        """Returns the returns of completed episodes, [episodes].

        Args:
            costs: Step times and times of devices.
            exists: Mask of non-padding devices, [episodes, devices].
            lower_bound_ms: Estimated step time of an ideal plan, [episodes].
        """
        ...

    def infeasible(self, rest_share: Tensor) -> Tensor:
        """Returns the returns of infeasible episodes, -2 to -4: [episodes].

        Args:
            rest_share: Share of units that are not placed, [episodes].
        """
        return -_INFEASIBLE * (1 + rest_share)


@dataclass(frozen=True)
class Balance(Reward):
    """Lowest over highest cost of a device, as in AutoShard: 0 to 1."""

    def complete(
        self,
        costs: Costs,
        exists: Tensor,
        lower_bound_ms: Tensor,  # noqa: ARG002
    ) -> Tensor:
        """Returns the balances."""
        lowest = costs.devices_ms.masked_fill(~exists, torch.inf).amin(1)
        return lowest / costs.devices_ms.amax(1).clamp_min(_MIN_MS)


@dataclass(frozen=True)
class NegativeStep(Reward):
    """Negative step time over its lower bound: -1 is ideal."""

    def complete(
        self,
        costs: Costs,
        exists: Tensor,  # noqa: ARG002
        lower_bound_ms: Tensor,
    ) -> Tensor:
        """Returns the negative relative step times."""
        return -costs.plan_ms / lower_bound_ms


@dataclass(frozen=True)
class Dense(Reward):
    """Another reward, with a shaping reward for each step: the predicted rise of the step time."""

    total: Reward = field(default_factory=NegativeStep)

    def shaping(self, before: Tensor, after: Tensor) -> Tensor:
        """Returns the negative rise of the relative step time."""
        return before - after

    def complete(self, costs: Costs, exists: Tensor, lower_bound_ms: Tensor) -> Tensor:
        """Returns those of the other reward."""
        return self.total.complete(costs, exists, lower_bound_ms)

    def infeasible(self, rest_share: Tensor) -> Tensor:
        """Returns those of the other reward."""
        return self.total.infeasible(rest_share)


class CostSource(Protocol):
    """Source of the costs of completed episodes."""

    @property
    def num_requested(self) -> int:
        """Number of shards requested from a pool so far."""
        ...

    def __call__(self, episodes: BatchedPlacementEnv, env_ids: Sequence[int]) -> Costs:
        """Returns the costs of the completed episodes in these environments."""
        ...


class EstimatedCostSource:
    """Costs that the cost model predicts, as in DreamShard.

    Args:
        scenarios: Number of scenarios in which the expected step time is computed; all costs are
            scaled to it. With 0, costs are those of the mean scenario.
    """

    num_requested = 0

    def __init__(self, scenarios: int = 0) -> None:
        self._scenarios = scenarios

    def __call__(self, episodes: BatchedPlacementEnv, env_ids: Sequence[int]) -> Costs:
        """Returns predicted costs."""
        chosen = list(env_ids)
        costs = Costs(episodes.plan_ms[chosen], episodes.cost_ms[chosen])
        if not self._scenarios or not len(env_ids):
            return costs
        common_ms, expected_ms = episodes.common_ms[chosen], self._expected_ms(episodes, env_ids)
        scale = expected_ms / (costs.plan_ms - common_ms).clamp_min(_MIN_MS)
        return Costs(expected_ms + common_ms, costs.devices_ms * scale[:, None])

    def _expected_ms(self, episodes: BatchedPlacementEnv, env_ids: Sequence[int]) -> Tensor:
        """Returns what devices take, without what all bear alike: [episodes]."""
        chosen = torch.tensor(env_ids)
        pricing, amounts = episodes.catalog.in_scenarios(self._scenarios)
        sums = episodes.sums_of(amounts, chosen)
        for row, env_id in enumerate(env_ids):
            instance = episodes.instances[env_id]
            if blocks := episodes.blocks_placed(env_id):
                pieces, homes = zip(*blocks, strict=True)
                parts = episodes.tables_of_blocks(env_id)
                sums[row].index_add_(
                    0, torch.tensor(homes), pricing.with_parts(parts).amounts(pieces)
                )
            if instance is not None and instance.hardware:
                sums[row, : len(instance.hardware)] += pricing.of_devices(instance.hardware)
        costs = pricing.price(sums)  # [envs, devices, scenarios, 2]
        power = norm_power(episodes.catalog.model.compute.prior.rest)
        expected = episodes.stages_ms[chosen, :, -1].amax(1)  # all-to-alls are certain
        price = StepPrice.rows(episodes.prices[chosen, :, None])
        for stage in price.compute_stages(*costs.unbind(-1)):
            slowest = expected_slowest(stage.double().numpy(), power)
            expected = expected + torch.from_numpy(slowest).float()
        return expected


class MeasuredCostSource:
    """Costs measured by the cluster's benchmark pool, all environments in one call.

    A shard that cannot be measured has its predicted cost. All-to-alls are priced by the objective.

    Args:
        store: File or address of the measurement store.
        kind: Kind of devices that measure.
    """

    def __init__(self, store: Path | str, kind: str = "auto") -> None:
        self._store, self._kind = str(store), kind
        self.num_requested = 0
        self._pool: benchmark.BenchmarkPool | None = None  # connected in the worker that measures

    def __call__(self, episodes: BatchedPlacementEnv, env_ids: Sequence[int]) -> Costs:
        """Returns measured costs, normalised to the reference level of the cost model."""
        catalog = episodes.catalog
        prices = catalog.price(episodes.sums)
        forward, backward = prices.forward_ms, prices.backward_ms
        places, shards = [], []
        for env_id in env_ids:
            for device, shard in enumerate(episodes.shards(env_id)):
                if shard is not None:
                    places.append((env_id, device))
                    shards.append(shard)
        self._pool = self._pool or benchmark.BenchmarkPool(self._store, kind=self._kind)
        settings = benchmark.MeasureSettings(catalog.batch_size, catalog.operator)
        answers = self._pool.measure(shards, settings)
        overhead = catalog.model.counted_overhead
        for where, shard, answer in zip(places, shards, answers, strict=True):
            if answer.ok:
                cost = answer.normalized_to(catalog.model.provenance.reference_level).cost()
                both = np.array([cost.forward_ms, cost.backward_ms])
                if overhead is not None:
                    both = overhead.in_training(both, loads_of(shard.pieces, catalog.batch_size))
                forward[where], backward[where] = both.tolist()
        self.num_requested += len(shards)
        columns = episodes.held_columns
        stages = torch.stack(episodes.stages(episodes.price, forward, backward, columns), dim=-1)
        stages = (stages * episodes.exists[..., None])[list(env_ids)]
        plan_ms = stages.amax(1).sum(1) + episodes.common_ms[list(env_ids)]
        return Costs(plan_ms, stages.sum(2))


class MixedCostSource:
    """Predicted costs, replaced by measured ones for a random share of the episodes.

    Measurements go into the store, where the cost model can be trained on them.

    Args:
        measured: Source of measured costs.
        share: Share of episodes that are measured, 0 to 1.
        seed: Seed of their selection.
    """

    def __init__(self, measured: MeasuredCostSource, share: float, seed: int = 0) -> None:
        self._measured, self._share = measured, share
        self._rng = np.random.default_rng(seed)

    @property
    def num_requested(self) -> int:
        """Number of shards requested from the pool so far."""
        return self._measured.num_requested

    def __call__(self, episodes: BatchedPlacementEnv, env_ids: Sequence[int]) -> Costs:
        """Returns measured costs of some episodes, and predicted costs of the others."""
        costs = EstimatedCostSource()(episodes, env_ids)
        chosen = np.flatnonzero(self._rng.random(len(env_ids)) < self._share).tolist()
        if chosen:
            found = self._measured(episodes, [env_ids[row] for row in chosen])
            costs.plan_ms[chosen], costs.devices_ms[chosen] = found.plan_ms, found.devices_ms
        return costs
