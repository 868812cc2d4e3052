"""The two things the whole platform is made of: what answers costs, and what makes plans."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from autoshard.workload.plans import ShardingPlan
from autoshard.workload.tables import Shard
from autoshard.workload.tasks import ShardingTask


@dataclass(frozen=True)
class ShardCost:
    """Milliseconds of one fused operator, and how well they are known.

    `spread` is the relative half width of the interval that holds the sum with 95 %.
    """

    forward_ms: float
    backward_ms: float
    spread: float = 0.0

    @property
    def total_ms(self) -> float:
        """Forward and backward together."""
        return self.forward_ms + self.backward_ms


@runtime_checkable
class CostOracle(Protocol):
    """Answers what shards cost, measured or estimated, in the order they are asked."""

    def costs(self, shards: Sequence[Shard]) -> list[ShardCost]:
        """The cost of each shard."""
        ...


@runtime_checkable
class Sharder(Protocol):
    """Decides which device holds what."""

    def shard(self, task: ShardingTask) -> ShardingPlan:
        """A valid plan for the task; UserError if there is none that it can find."""
        ...
