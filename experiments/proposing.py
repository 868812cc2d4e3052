"""The part of training that measures: proposals to learn from, promises to be kept."""

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmark import BenchmarkPool, Measurement, MeasureSettings, TimingOptions
from benchmark.devices import KINDS
from cost_model import CostDataset, EstimatedCosts
from cost_model.proposals import MakeSharder, promises, worth_measuring
from experiments import cli
from experiments.joining import ray_cluster
from experiments.progress import following
from sharders import AloneGreedySharder, FusedGreedySharder, LocalSearchSharder
from workload import EmbeddingTable, Shard, ShardingTask, UserError, random_tasks
from workload.parts import tables_by_part

SEARCH = "search"
SHARDERS: dict[str, MakeSharder] = {
    SEARCH: LocalSearchSharder,
    "fused_greedy": FusedGreedySharder,
    "alone_greedy": AloneGreedySharder,
}
# A maximum of noisy values reads high: as long as it takes until a cost is known to 2 %.
_TO_THE_END = TimingOptions(max_iterations=200)
_TASKS_A_ROUND = 12
_REPEATED = 60  # test shards that are measured once more, to know the noise of measuring
_CHECK_SEED = 1000  # no round's
_MEMORY_BYTES = 2**36  # rounds and checks are about time, not about memory


class Proposer:
    """Measures on the hardware that the dataset came from.

    Args:
        pool: what measures.
        data: what is known so far.
        seed: of tasks and shards that are drawn.
    """

    def __init__(self, pool: BenchmarkPool, data: CostDataset, seed: int) -> None:
        self._pool = pool
        self._seed = seed
        self._batch_size = data.most_common_batch
        self._operator = data.operator
        self._known = {shard.digest for shard in data.shards}
        self._tables = data.tables()

    @staticmethod
    def start(
        stack: ExitStack, sources: Sequence[Path], data: CostDataset, needed: bool, seed: int
    ) -> "Proposer | None":
        """One that measures into the first store; None, or UserError if it is needed, without."""
        stores = [source for source in sources if source.suffix != ".parquet"]
        reason = "no store (.db) is named to measure into"
        if stores:
            stack.enter_context(ray_cluster())
            # A store of CPU costs is gone on with on CPUs, also where there are GPUs.
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
        cli.console.print(f"note: promises are not checked: {reason}", soft_wrap=True)
        return None

    def measure_proposals(self, oracle: EstimatedCosts, number: int, budget: int) -> None:
        """Measure what is worth most of what sharders propose by the oracle."""

        def tasks(members: Sequence[EmbeddingTable]) -> list[ShardingTask]:
            return self._tasks(members, _TASKS_A_ROUND, self._seed + number)

        shards = worth_measuring(
            oracle, list(SHARDERS.values()), self._tables, tasks, self._known, budget,
            self._seed + number,
        )  # fmt: skip
        cli.console.print(f"round {number + 1}: measuring {len(shards)} proposed shards")
        self._measure(shards)
        self._known.update(shard.digest for shard in shards)

    def measure_again(self, test: CostDataset) -> None:
        """Measure test shards once more, with other batches of the same description."""
        some = [
            shard
            for shard, batch in zip(test.shards, test.batch_sizes, strict=True)
            if batch == self._batch_size
        ][:_REPEATED]
        cli.console.print(f"measuring {len(some)} test shards again, to know the noise")
        self._measure(some, seed=1)

    def check(self, oracle: EstimatedCosts, count: int) -> dict[str, Any] | None:
        """What plans of all sharders promise for tasks of test tables, and what comes of it."""
        tasks = self._tasks(tables_by_part(self._tables)["test"], count, _CHECK_SEED + self._seed)
        found = {}
        for name, make in SHARDERS.items():
            sharder = make(oracle)
            plans = [(task, sharder.shard(task)) for task in tasks]
            cli.console.print(f"measuring {count} plans of {name}")
            found[name] = promises(oracle, plans, self._measure)
        search = found[SEARCH]
        if not all(found.values()):
            cli.console.print("note: promises are not checked: no plan could be measured")
            return None
        return {
            "measured_over_promised": statistics.mean(promise.ratio for promise in search),
            "max_measured_over_promised": statistics.mean(promise.max_ratio for promise in search),
            "tasks": len(search),
            "measured_max_ms": {
                name: statistics.mean(max(promise.measured_ms) for promise in some)
                for name, some in found.items()
            },
        }

    def _tasks(self, tables: Sequence[EmbeddingTable], count: int, seed: int) -> list[ShardingTask]:
        return random_tasks(tables, count, self._batch_size, self._operator, _MEMORY_BYTES, seed)

    def _measure(self, shards: Sequence[Shard], seed: int = 0) -> list[Measurement]:
        settings = MeasureSettings(self._batch_size, self._operator, seed)
        with following(len(shards), "shards") as step:
            return self._pool.measure(shards, settings, _TO_THE_END, progress=lambda _: step())
