"""Plans measured on the cluster's pool: to compare them, and to choose the best of a few."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmark import (
    BenchmarkPool,
    Measurement,
    MeasureSettings,
    PlanCost,
    TimingOptions,
    price_plan,
)
from cost_model import CostModel
from experiments import cli
from experiments.joining import ray_cluster
from workload import Shard, ShardCost, ShardingPlan, ShardingTask

# A maximum of noisy values reads high: as long as it takes until a cost is known to 2 %.
TO_THE_END = TimingOptions(max_iterations=200)
# Sharders that measure choose by other batches than those that judge them: the best of a few
# noisy measurements was lucky, too.
VERIFYING_SEED, JUDGING_SEED = 1, 0


@contextmanager
def plan_pool(store: Path) -> Iterator[BenchmarkPool]:
    """The cluster's pool, which keeps what it measures in the store. Tells what it has noticed."""
    with ray_cluster():
        pool = BenchmarkPool(store)
        try:
            yield pool
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"what was measured is in {store}; run again to go on"
            ) from None
        for notice in pool.notices():
            cli.console.print(f"note: {notice}", markup=False, soft_wrap=True)
        pool.close()


class PlanMeter:
    """Measures what each device of a plan computes: forward and backward of its fused operator.

    The all-to-all is left out: on a CPU ranks share cores, so it would say more about this machine
    than about the plan.

    Args:
        pool: what measures.
        model: costs are told as its own are, if the pool has the hardware that it speaks of.
        seed: of the batches that are looked up.
    """

    def __init__(self, pool: BenchmarkPool, model: CostModel, seed: int = 0) -> None:
        self._pool = pool
        self._seed = seed
        same = pool.devices()[0].hardware == model.provenance.hardware
        self._level = model.provenance.quiet if same else None

    def costs(self, task: ShardingTask, plans: Sequence[ShardingPlan]) -> list[PlanCost | None]:
        """Each plan's cost; None where a shard cannot be measured, which is told of.

        All shards are measured in the order of the plans.
        """
        by_plan = [[s for s in plan.shards(task) if s is not None] for plan in plans]
        flat = [shard for shards in by_plan for shard in shards]
        settings = MeasureSettings(task.batch_size, task.operator, self._seed)
        answers = {
            answer.shard.digest: answer.told_at(self._level)
            for answer in self._pool.measure(flat, settings, TO_THE_END, retry_failed=True)
        }
        oracle = _Answers(answers)
        without = {digest for digest, answer in answers.items() if not answer.ok}
        for reason in sorted({answers[digest].reason for digest in without}):
            cli.console.print(f"note: a shard cannot be measured: {reason}", soft_wrap=True)
        return [
            None if any(s.digest in without for s in shards) else price_plan(plan, task, oracle)
            for plan, shards in zip(plans, by_plan, strict=True)
        ]

    def max_ms(self, task: ShardingTask, plans: Sequence[ShardingPlan]) -> list[float]:
        """The slowest device of each plan: what sharders choose by. Infinite without a cost."""
        return [
            math.inf if cost is None else cost.max_compute_ms for cost in self.costs(task, plans)
        ]


class _Answers:
    """The oracle that has been told."""

    def __init__(self, answers: dict[str, Measurement]) -> None:
        self._answers = answers

    def costs(self, shards: Sequence[Shard]) -> list[ShardCost]:
        return [self._answers[shard.digest].cost() for shard in shards]
