"""What is played while a policy is trained."""

from collections.abc import Callable
from dataclasses import dataclass

from autoshard.cost_model import CostModel
from autoshard.envs import CostSource, Deck, Generator, Reward, ShardingVectorEnv
from autoshard.workload import EmbeddingTable


@dataclass(frozen=True)
class Setting:
    """What is played: everything that an env runner needs to make its environment."""

    model: CostModel
    tables: tuple[EmbeddingTable, ...]
    batch_size: int
    generator: Generator
    reward: Reward
    source: Callable[[], CostSource]
    halves: bool = True  # tables may be halved

    def make(self, num_envs: int, rivals: int) -> ShardingVectorEnv:
        """The environment; so many seats side by side play the same tasks."""
        deck = Deck.of_tables(self.model, self.tables, self.batch_size, self.halves)
        halvings = None if self.halves else 0
        return ShardingVectorEnv(
            deck,
            num_envs,
            self.generator,
            self.reward,
            self.source(),
            halvings=halvings,
            rivals=rivals,
        )
