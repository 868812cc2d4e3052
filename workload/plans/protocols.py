"""The two central interfaces: cost oracles and sharders."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from autoshard.workload.plans.plan import ShardingPlan
from autoshard.workload.tables.table import Shard
from autoshard.workload.tasks.task import ShardingTask


@dataclass(frozen=True)
class ShardCost:
    """Milliseconds of one fused operator.

    `spread` is the half width of the 95 % interval of the sum, relative to it.
    """

    forward_ms: float
    backward_ms: float
    spread: float = 0.0

    @property
    def total_ms(self) -> float:
        """Returns forward and backward time together."""
        return self.forward_ms + self.backward_ms


@runtime_checkable
class CostOracle(Protocol):
    """Returns costs of shards, measured or predicted."""

    def costs(self, shards: Sequence[Shard], hardware: Sequence[str] = ()) -> list[ShardCost]:
        """Returns the cost of each shard, on the hardware of its device where that is named."""
        ...


@runtime_checkable
class Sharder(Protocol):
    """Makes a plan for a task."""

    def shard(self, task: ShardingTask) -> ShardingPlan:
        """Returns a valid plan for the task; UserError if it finds none."""
        ...
