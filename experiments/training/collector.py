"""Plans that a policy draws while it trains, measured for the cost model to learn from."""

import numpy as np
import torch

from autoshard.benchmark import BenchmarkPool, MeasureSettings
from autoshard.cost_model import CostModel, EstimatedCosts
from autoshard.cost_model.training import one_thread
from autoshard.envs import Deck
from autoshard.experiments.training.setting import Setting
from autoshard.sharders.player import Player, Way
from autoshard.sharders.policy_network import PolicyNetwork
from autoshard.workload import Shard, ShardingPlan


class PlanCollector:
    """Measures plans as the policy makes them now: a cost model is to be right where it plays.

    Args:
        setting: tables that teach, and who deals.
        pool: measures.
        plans: at a time.
        seed: of tasks and plans.
    """

    def __init__(self, setting: Setting, pool: BenchmarkPool, plans: int, seed: int) -> None:
        self._setting, self._pool, self._plans = setting, pool, plans
        self._rng = np.random.default_rng(seed)

    @one_thread()
    def collect(self, network: PolicyNetwork, model: CostModel) -> int:
        """Draw a plan for each of so many tasks, and have it measured; how many shards they have.
        The pool's store has what they measured.
        """
        oracle = EstimatedCosts(model, self._setting.batch_size)
        deck = Deck(oracle, [table.whole() for table in self._setting.tables])
        player = Player(network, oracle)
        shards: list[Shard] = []
        for _ in range(self._plans):
            task = deck.task(self._setting.generator(deck, self._rng))
            rng = torch.Generator().manual_seed(int(self._rng.integers(2**31)))
            played = player.play(task, [Way(), Way(drawn=True)], rng=rng)
            if not played:
                continue  # two dead ends
            plan = ShardingPlan.of_slices(task, played[-1].placed)  # the drawn one, if it ended
            shards += [shard for shard in plan.shards(task) if shard is not None]
        self._pool.measure(shards, MeasureSettings(deck.batch_size, deck.operator))
        return len(shards)
