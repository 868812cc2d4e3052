"""How a policy does, while it is trained and after: estimated, on tables it never learned from."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

import numpy as np

from autoshard.cost_model import CostModel, EstimatedCosts
from autoshard.envs import Deck, Generator
from autoshard.experiments.judging.contestants import Contestants
from autoshard.experiments.judging.outcomes import (
    Outcome,
    best_of_each,
    estimated,
    make_plans,
    maxima_of,
    mean_ratio,
)
from autoshard.sharders import HEURISTICS, Policy
from autoshard.workload import EmbeddingTable, ShardingTask
from autoshard.workload.parts import Part

_FEWEST = 3  # tables that tasks are drawn from
_LEARNED = ("cost", "cost_fused", "policy", "autoshard")


def deal_tasks(deck: Deck, generator: Generator, seed: int) -> Iterator[ShardingTask]:
    """Tasks as the generator deals them, without end."""
    rng = np.random.default_rng(seed)
    while True:
        yield deck.task(generator(deck, rng))


def draw_tasks(deck: Deck, generator: Generator, count: int, seed: int) -> list[ShardingTask]:
    """The first of them."""
    return list(islice(deal_tasks(deck, generator, seed), count))


class PolicyCheck:
    """The same tasks for every check.

    Args:
        tasks: of tables that are not trained on.
        seed: of sharders that draw.
    """

    def __init__(self, tasks: Sequence[ShardingTask], seed: int = 0) -> None:
        self.tasks = tasks
        self.seed = seed
        self._bars: tuple[CostModel, list[float | None]] | None = None

    def relative_to_heuristic(self, policy: Policy, model: CostModel) -> tuple[float, int]:
        """The policy's steps over those of each task's best heuristic, the mean of all tasks, those
        with long steps and with short ones alike; and tasks that it found no plan for.

        Where memory is too tight for all heuristics, the policy before training stands in: such
        tasks would count for nothing else.
        """
        if self._bars is None or self._bars[0] is not model:  # they never change
            bars = best_of_each(maxima_of(self.outcomes(policy, model, HEURISTICS)))
            if None in bars:
                began = self.outcomes(Policy.untrained(), model, ("policy",))
                starts = maxima_of(began)["policy"]
                pairs = zip(bars, starts, strict=True)
                bars = [start if bar is None else bar for bar, start in pairs]
            self._bars = (model, bars)
        ours = maxima_of(self.outcomes(policy, model, ("policy",)))["policy"]
        ratio = mean_ratio(ours, self._bars[1])
        return math.nan if ratio is None else ratio, ours.count(None)

    def outcomes(
        self, policy: Policy, model: CostModel, names: Iterable[str] = (*HEURISTICS, *_LEARNED)
    ) -> dict[str, list[Outcome]]:
        """Each sharder's plan for each task, with its cost as the model estimates it."""
        oracle = EstimatedCosts(model, self.tasks[0].batch_size)
        contestants = Contestants(tuple(names), oracle, policy, self.seed)
        sharders = contestants.sharders()
        return estimated(make_plans(sharders, self.tasks), self.tasks, oracle)


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
