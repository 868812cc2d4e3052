"""Measures plans that the policy draws while it trains, for the cost model to learn from."""

from collections.abc import Sequence

import numpy as np
import torch

from autoshard.benchmark import BenchmarkPool, MeasureSettings
from autoshard.cost_model import CostModel, EstimatedCosts
from autoshard.cost_model.training import one_thread
from autoshard.envs import Deck
from autoshard.experiments.training.config import PPOShardConfig
from autoshard.sharders.player import Player, Way
from autoshard.sharders.policy_network import PolicyNetwork
from autoshard.workload import EmbeddingTable, Shard, ShardingPlan


class PlanCollector:
    """Measures plans of the current policy, so that the cost model is accurate where it plays.

    Args:
        config: Of the training; `collect` is the number of plans at a time.
        tables: Tables that are trained on.
        pool: Measures.
        seed: Seed of tasks and plans.
    """

    def __init__(
        self,
        config: PPOShardConfig,
        tables: Sequence[EmbeddingTable],
        pool: BenchmarkPool,
        seed: int,
    ) -> None:
        self._config, self._tables, self._pool = config, tables, pool
        self._rng = np.random.default_rng(seed)

    @one_thread()
    def collect(self, network: PolicyNetwork, model: CostModel) -> int:
        """Draws plans and has the pool measure them; returns how many shards they have."""
        oracle = EstimatedCosts(model, self._config.batch_size)
        deck = Deck(oracle, [table.whole() for table in self._tables])
        generator, player = self._config.generator(), Player(network, oracle)
        shards: list[Shard] = []
        for _ in range(self._config.collect):
            task = deck.task(generator(deck, self._rng))
            rng = torch.Generator().manual_seed(int(self._rng.integers(2**31)))
            played = player.play(task, [Way(), Way(drawn=True)], rng=rng)
            if not played:
                continue  # neither game found a plan
            plan = ShardingPlan.of_slices(task, played[-1].placed)  # the drawn one, if it has one
            shards += [shard for shard in plan.shards(task) if shard is not None]
        self._pool.measure(shards, MeasureSettings(deck.batch_size, deck.operator))
        return len(shards)
