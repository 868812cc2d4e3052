"""What a training measures, and the cost model that learns from it."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from autoshard.benchmark import BenchmarkPool, MeasureSettings
from autoshard.cost_model import CostModel, EstimatedCosts
from autoshard.cost_model.training import one_thread
from autoshard.envs import TableCatalog
from autoshard.experiments.training.config import PPOShardConfig
from autoshard.experiments.training.online_model import OnlineModel, Update
from autoshard.sharders.policy_network import PolicyNetwork
from autoshard.sharders.rollouts import PolicyRollouts, RolloutConfig
from autoshard.workload import EmbeddingTable, Shard, ShardingPlan, UserError


class Measuring:
    """The pool that a training's rewards are measured by, and an adapted cost model.

    Args:
        config: Of the training.
        base: Cost model that the run begins with, from which each update of it starts.
        tables: Tables that are trained on.
        store: Measurements.
        seed: Seed of the tasks and plans of `collect`.
        adapt: Whether the cost model learns from measurements.
    """

    def __init__(
        self,
        config: PPOShardConfig,
        base: CostModel,
        tables: Sequence[EmbeddingTable],
        store: Path,
        seed: int,
        adapt: bool,
    ) -> None:
        self._config, self._tables = config, tables
        self.pool = BenchmarkPool(store, kind=config.devices)
        check_hardware(base, self.pool, config.cost_model)
        if adapt:
            self.pool.check_store_is_here()  # the cost model learns from the file
        self._online = OnlineModel(base, store, config.batch_size) if adapt else None
        self._rng = np.random.default_rng(seed)

    def update(self) -> Update | None:
        """Adapts the cost model to new measurements, if there are any."""
        return None if self._online is None else self._online.update()

    @one_thread()
    def collect(self, network: PolicyNetwork, model: CostModel) -> int:
        """Draws --collect plans of the policy and measures them; returns how many shards.

        So the cost model is accurate where the policy plays.
        """
        if not self._config.collect:
            return 0
        oracle = EstimatedCosts(model, self._config.batch_size)
        catalog = TableCatalog(oracle, [table.whole() for table in self._tables])
        task_sampler, player = self._config.task_sampler(), PolicyRollouts(network, oracle)
        shards: list[Shard] = []
        for _ in range(self._config.collect):
            task = catalog.task(task_sampler(catalog, self._rng))
            rng = torch.Generator().manual_seed(int(self._rng.integers(2**31)))
            played = player.play(task, [RolloutConfig(), RolloutConfig(sampled=True)], rng=rng)
            if not played:
                continue  # neither game found a plan
            plan = ShardingPlan.of_pieces(task, played[-1].placed)  # the drawn one, if it has one
            shards += [shard for shard in plan.shards(task) if shard is not None]
        self.pool.measure(shards, MeasureSettings(catalog.batch_size, catalog.operator))
        return len(shards)


def check_hardware(model: CostModel, pool: BenchmarkPool, named: str) -> None:
    """Raises UserError where a pool measures on another kind of device than the cost model's."""
    known, here = model.provenance.hardware, pool.devices()[0].hardware
    if known.partition(":")[0] != here.partition(":")[0]:
        raise UserError(
            f"the cost model {named} is of {known}, the pool measures on {here}: calibrate it "
            "with train_cost_model.py --calibrate, or end the pool (pool.py stop) and say with "
            "--devices what is to measure"
        )
