"""How a policy does, while it is trained and after: estimated, on tables it never learned from."""

import statistics
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from cost_model import CostModel, EstimatedCosts
from envs import Deck, Generator
from sharders import HEURISTICS, Means, Policy, make_sharder
from workload import Device, EmbeddingTable, PlanError, ShardingPlan, ShardingTask
from workload.parts import Part

Maxima = Mapping[str, Sequence[float | None]]  # ms of each sharder for each task; None: no plan

_FEWEST = 3  # tables that tasks are drawn from
_LEARNED = ("cost", "cost_fused", "policy", "autoshard")


def draw_tasks(deck: Deck, generator: Generator, count: int, seed: int) -> list[ShardingTask]:
    """Tasks as the generator deals them."""
    rng = np.random.default_rng(seed)
    tasks = []
    for _ in range(count):
        deal = generator(deck, rng)
        tables = tuple(deck.pieces[number].table for number in deal.pieces)
        devices = tuple(Device(f"device{n}", int(m)) for n, m in enumerate(deal.memory_bytes))
        tasks.append(ShardingTask(tables, devices, deck.batch_size, deck.operator))
    return tasks


class PolicyCheck:
    """The same tasks for every check.

    Args:
        tasks: of tables that are not trained on.
        seed: of sharders that draw.
    """

    def __init__(self, tasks: Sequence[ShardingTask], seed: int = 0) -> None:
        self.tasks = tasks
        self.seed = seed
        self._heuristics: tuple[CostModel, Maxima] | None = None

    def relative_to_heuristic(self, policy: Policy, model: CostModel) -> tuple[float, int]:
        """The policy's maxima over those of each task's best heuristic, in the mean; and tasks that
        it found no plan for.
        """
        if self._heuristics is None or self._heuristics[0] is not model:  # they never change
            self._heuristics = (model, self.maxima(policy, model, HEURISTICS)[0])
        heuristics = self._heuristics[1]
        ours = self.maxima(policy, model, ("policy",))[0]["policy"]
        return relative(ours, best_of_each(heuristics)), ours.count(None)

    def maxima(
        self, policy: Policy, model: CostModel, names: Iterable[str] = (*HEURISTICS, *_LEARNED)
    ) -> tuple[dict[str, list[float | None]], dict[str, list[ShardingPlan | None]]]:
        """The slowest device of each sharder's plan for each task, estimated; and the plans."""
        oracle = EstimatedCosts(model, self.tasks[0].batch_size)
        means = Means(oracle, policy, seed=self.seed)
        maxima: dict[str, list[float | None]] = {}
        plans: dict[str, list[ShardingPlan | None]] = {}
        for name in names:
            sharder = make_sharder(name, means)
            maxima[name], plans[name] = [], []
            for task in self.tasks:
                try:
                    plan = sharder.shard(task)
                except PlanError:
                    plans[name].append(None)
                    maxima[name].append(None)
                    continue
                shards = [shard for shard in plan.shards(task) if shard is not None]
                plans[name].append(plan)
                maxima[name].append(float(oracle.prices(shards).total_ms.max()))
        return maxima, plans


def best_heuristic(maxima: Maxima) -> str:
    """The one with the least mean among those that found most plans."""
    heuristics = [name for name in maxima if name in HEURISTICS]

    def rank(name: str) -> tuple[int, float]:
        found = [ms for ms in maxima[name] if ms is not None]
        return len(maxima[name]) - len(found), statistics.mean(found) if found else float("inf")

    return min(heuristics, key=rank)


def best_of_each(maxima: Maxima) -> list[float | None]:
    """What the best heuristic of each task needs; None where none found a plan.

    One heuristic for all tasks would be that which finds most plans where memory is tight, and
    that is not the one that a user would take where memory is loose.
    """
    heuristics = [values for name, values in maxima.items() if name in HEURISTICS]
    return [
        min((ms for ms in of_task if ms is not None), default=None)
        for of_task in zip(*heuristics, strict=True)
    ]


def relative(ours: Sequence[float | None], theirs: Sequence[float | None]) -> float:
    """Mean of ours over mean of theirs, on tasks for which both have a plan; NaN without any."""
    both = [(a, b) for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None]
    if not both:
        return float("nan")
    return sum(a for a, _ in both) / sum(b for _, b in both)


def unseen_tables(
    by_part: Mapping[Part, Sequence[EmbeddingTable]], part: Part
) -> list[EmbeddingTable]:
    """Tables of a part that is not trained on; of both such parts if one has hardly any.

    Where checks choose the policy that is kept, what tests it must not be among them: tasks are
    smaller rather than of tables of both parts.
    """
    if len(by_part[part]) >= _FEWEST:
        return list(by_part[part])
    return [*by_part["validation"], *by_part["test"]]
