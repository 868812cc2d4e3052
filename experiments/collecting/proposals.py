"""Measurements for training a cost model: proposed shards, noise, and checks of predictions."""

import statistics
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from autoshard.benchmark import (
    BenchmarkPool,
    Measurement,
    MeasureSettings,
    ReferenceLevel,
    TimingOptions,
)
from autoshard.benchmark.backends import KINDS
from autoshard.cost_model import CostDataset, EstimatedCosts
from autoshard.cost_model.pricing.proposals import (
    MakeSharder,
    compare_predictions,
    select_shards_to_measure,
)
from autoshard.experiments.collecting.pacing import Pace, stream_within
from autoshard.experiments.console import cli
from autoshard.experiments.console.budget import Budget
from autoshard.experiments.console.progress import following
from autoshard.experiments.console.ray_cluster import ray_cluster
from autoshard.sharders import AloneGreedySharder, FusedGreedySharder, LocalSearchSharder
from autoshard.workload import EmbeddingTable, Shard, ShardingTask, UserError, random_tasks
from autoshard.workload.tables.parts import tables_by_part

SEARCH = "search"
SHARDERS: dict[str, MakeSharder] = {
    SEARCH: LocalSearchSharder,
    "fused_greedy": FusedGreedySharder,
    "alone_greedy": AloneGreedySharder,
}
_TASKS_A_ROUND = 12
_TIMING = TimingOptions(max_iterations=200)  # errors of predictions are a few percent
_REPEATED = 60  # test shards that are measured again, for the measuring noise
_CHECK_SEED = 1000  # not used by rounds
_MEMORY_BYTES = 2**36  # rounds and checks are about time, not about memory


class Proposer:
    """Measures on the hardware of a dataset.

    Args:
        pool: Pool that measures.
        data: Known costs.
        seed: Seed of tasks and shards.
        tables: Tables of tasks; by default those of the dataset.

    Attributes:
        left_out: Number of things that were left out because of time limits, by kind.
    """

    def __init__(
        self,
        pool: BenchmarkPool,
        data: CostDataset,
        seed: int,
        tables: Sequence[EmbeddingTable] | None = None,
    ) -> None:
        self._pool = pool
        self._seed = seed
        self._batch_size = data.most_common_batch
        self._operator = data.operator
        self._known = {shard.digest for shard in data.shards}
        self._tables = data.tables() if tables is None else tables
        self.left_out: Counter[str] = Counter()

    @staticmethod
    def start(
        stack: ExitStack, sources: Sequence[Path], data: CostDataset, needed: bool, seed: int
    ) -> "Proposer | None":
        """Returns a proposer that measures into the first store; None if that is impossible.

        Raises:
            UserError: It is impossible, and needed.
        """
        stores = [source for source in sources if source.suffix != ".parquet"]
        reason = "no store (.db) is named to measure into"
        if stores:
            stack.enter_context(ray_cluster())
            # A store of CPU costs is continued on CPUs, even where there are GPUs.
            kind = data.hardware.partition(":")[0]
            pool = BenchmarkPool(stores[0], kind=kind if kind in KINDS else "auto")
            stack.callback(pool.close)
            here = pool.make()
            if here == (data.hardware, data.versions):
                return Proposer(pool, data, seed)
            reason = (
                f"the costs are of {data.hardware} with {data.versions}, here is "
                f"{' with '.join(here)}"
            )
        if needed:
            raise UserError(f"proposals cannot be measured: {reason}")
        cli.note(f"predictions are not checked: {reason}")
        return None

    def measure_proposals(
        self, oracle: EstimatedCosts, number: int, count: int, budget: Budget
    ) -> None:
        """Measures the `count` most informative shards that sharders propose by the oracle."""

        def tasks(members: Sequence[EmbeddingTable]) -> list[ShardingTask]:
            return self._tasks(members, _TASKS_A_ROUND, self._seed + number)

        shards = select_shards_to_measure(
            oracle, list(SHARDERS.values()), self._tables, tasks, self._known, count,
            self._seed + number,
        )  # fmt: skip
        cli.say(f"round {number + 1}: measuring {len(shards)} proposed shards")
        found = self._measure(shards, budget)
        self._known.update(found)
        self.left_out["proposed_shards"] += len(shards) - len(found)

    def measure_again(self, test: CostDataset, budget: Budget) -> None:
        """Measures test shards again, with other batches of the same description."""
        repeated = [
            shard
            for shard, batch in zip(test.shards, test.batch_sizes, strict=True)
            if batch == self._batch_size
        ][:_REPEATED]
        cli.say(f"measuring {len(repeated)} test shards again, for the measuring noise")
        found = self._measure(repeated, budget, seed=1)
        self.left_out["repeated_shards"] += len(repeated) - len(found)

    def check(
        self, oracle: EstimatedCosts, count: int, budget: Budget | None = None
    ) -> dict[str, Any] | None:
        """Returns predicted against measured step times of all sharders on tasks of test tables.

        If time does not suffice for all tasks, the first ones are measured.
        """
        tasks = self._tasks(tables_by_part(self._tables)["test"], count, _CHECK_SEED + self._seed)
        cli.say(f"measuring plans of {', '.join(SHARDERS)} for {count} tasks")
        sharders = [make(oracle) for make in SHARDERS.values()]
        plans = [[(task, sharder.shard(task)) for sharder in sharders] for task in tasks]
        shards = [
            {s.digest: s for task, plan in of_task for s in plan.shards(task) if s is not None}
            for of_task in plans
        ]
        different = {digest: s for of_task in shards for digest, s in of_task.items()}
        known = self._measure(list(different.values()), budget or Budget())
        pairs = zip(plans, shards, strict=True)
        whole = [of_task for of_task, needed in pairs if needed.keys() <= known.keys()]
        self.left_out["check_tasks"] += count - len(whole)
        found = {
            name: compare_predictions(
                oracle,
                [of_task[number] for of_task in whole],
                lambda shards: [known[shard.digest] for shard in shards],
            )
            for number, name in enumerate(SHARDERS)
        }
        search = found[SEARCH]
        if not all(found.values()):
            cli.note("predictions are not checked: no plan could be measured")
            return None
        return {
            "measured_over_promised": statistics.mean(pair.ratio for pair in search),
            "max_measured_over_promised": statistics.mean(pair.max_ratio for pair in search),
            "tasks": len(search),
            "measured_max_ms": {
                name: statistics.mean(max(pair.measured_ms) for pair in of_sharder)
                for name, of_sharder in found.items()
            },
        }

    def _tasks(self, tables: Sequence[EmbeddingTable], count: int, seed: int) -> list[ShardingTask]:
        return random_tasks(tables, count, self._batch_size, self._operator, _MEMORY_BYTES, seed)

    def _measure(
        self, shards: Sequence[Shard], budget: Budget, seed: int = 0
    ) -> dict[str, Measurement]:
        """Returns measurements by digest, of as many of the first shards as the budget allows.

        All are normalised to one reference level.
        """
        settings = MeasureSettings(self._batch_size, self._operator, seed)
        pace = Pace(shards, self._batch_size, len(self._pool.devices()))
        found: dict[str, Measurement] = {}
        level: ReferenceLevel | None = None
        with following(len(shards), "shards", lambda: budget.at_most(pace.left_s())) as step:
            for _, answer in stream_within(self._pool, shards, settings, pace, budget, _TIMING):
                found[answer.shard.digest] = answer
                level = level if answer.timing is None else answer.timing.reference_level
                step()
        return {digest: answer.normalized_to(level) for digest, answer in found.items()}
