"""Evaluation of a policy on tables that it is not trained on, with costs by the cost model."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import geometric_mean, median

from autoshard.cost_model import CostModel, EstimatedCosts
from autoshard.cost_model.pricing.mixed_costs import costs_of_machines
from autoshard.envs import TableCatalog
from autoshard.experiments.evaluation.planners import (
    Outcome,
    Planners,
    best_of_each,
    estimated,
    make_plans,
    steps_of,
)
from autoshard.experiments.evaluation.ratio import relative
from autoshard.experiments.evaluation.task_sets import sample_tasks
from autoshard.experiments.training.config import Parts, TrainingSetup
from autoshard.sharders import HEURISTICS, Policy
from autoshard.workload import EmbeddingTable, ShardingTask, UserError
from autoshard.workload.tables.parts import Part, tables_by_part

_MIN_TABLES = 3  # for training, and for tasks of evaluation and of tests
_LEARNED = ("cost", "cost_fused", "policy", "autoshard")


def split_tables(source: str, tables: Sequence[EmbeddingTable]) -> Parts:
    """Returns tables by part; UserError names their source if there are too few."""
    parts = tables_by_part(tables)
    others = len(tables) - len(parts["train"])
    if min(len(parts["train"]), others) < _MIN_TABLES:
        raise UserError(
            f"{source}: has too few tables: {len(parts['train'])} to train on and {others} "
            f"for evaluation and tests, {_MIN_TABLES} of each are needed"
        )
    return parts


def unseen_tables(parts: Parts, part: Part) -> Sequence[EmbeddingTable]:
    """Returns the tables of a part that is not trained on, or of both such parts if it has too few.

    Evaluation selects the policy that is kept, so tests need other tables, even if their tasks are
    smaller.
    """
    if len(parts[part]) >= _MIN_TABLES:
        return parts[part]
    return [*parts["validation"], *parts["test"]]


def unseen_tasks(setup: TrainingSetup, part: Part, seed: int) -> Iterator[ShardingTask]:
    """Yields endless tasks, sampled as for training, from tables that are not trained on."""
    config, tables = setup.config, unseen_tables(setup.parts, part)
    catalog = TableCatalog(config.oracle(setup.model), [table.whole() for table in tables])
    return sample_tasks(catalog, config.task_sampler(), seed)


class PolicyEvaluator:
    """Compares plans of a policy with those of heuristics, always for the same tasks.

    Args:
        tasks: Tasks of tables that are not trained on.
        seed: Seed of sharders that sample.
    """

    def __init__(self, tasks: Sequence[ShardingTask], seed: int = 0) -> None:
        self.tasks = tasks
        self.seed = seed
        self._references: tuple[CostModel, list[float | None]] | None = None

    def score(self, policy: Policy, model: CostModel) -> dict[str, float]:
        """Returns the metrics of an evaluation; lower is better.

        `over_heuristic` is the policy's step time over that of each task's best heuristic, as the
        geometric mean over tasks. Where memory is too tight for all heuristics, the untrained
        policy replaces them. `without_plan` counts tasks without a plan of the policy. Each adds 1
        to the `score`, so that another plan counts more than any time saved. `memory_mb` is what
        the fullest device of a plan holds, as the geometric mean over tasks; without a plan, all
        of the largest device counts. `planning_ms` is the median time to make a plan.
        """
        if self._references is None or self._references[0] is not model:
            found = best_of_each(steps_of(self.outcomes(policy, model, HEURISTICS)))
            if None in found:
                untrained = self.outcomes(Policy.untrained(), model, ("policy",))
                pairs = zip(found, steps_of(untrained)["policy"], strict=True)
                found = [start if best is None else best for best, start in pairs]
            self._references = (model, found)
        outcomes = self.outcomes(policy, model, ("policy",))
        ours = steps_of(outcomes)["policy"]
        ratio = relative(ours, self._references[1])
        failed = ours.count(None)
        return {
            "over_heuristic": float("nan") if ratio is None else ratio.value,
            "without_plan": failed,
            "score": failed + (1.0 if ratio is None else ratio.value),
            "memory_mb": geometric_mean(map(_fullest_mb, self.tasks, outcomes["policy"])),
            # The median, for the first plan loads what the others use.
            "planning_ms": 1e3 * median(o.seconds or 0.0 for o in outcomes["policy"]),
        }

    def outcomes(
        self,
        policy: Policy,
        model: CostModel,
        names: Iterable[str] = (*HEURISTICS, *_LEARNED),
        others: Mapping[str, Policy] | None = None,
    ) -> dict[str, list[Outcome]]:
        """Returns each sharder's plan for each task, with its estimated cost.

        Args:
            policy: Policy of sharders that use one.
            model: Cost model that estimates the costs.
            names: Names of the sharders.
            others: Further policies by name. Each makes one plan, as the sharder `policy` does.
        """
        first = self.tasks[0]
        price = costs_of_machines if first.hardware else EstimatedCosts
        oracle = price(model, first.batch_size)
        planners = Planners(tuple(names), oracle, policy, self.seed, others=others or {})
        return estimated(make_plans(planners.sharders(), self.tasks), self.tasks, oracle)


def _fullest_mb(task: ShardingTask, outcome: Outcome) -> float:
    """Returns the memory of a plan's fullest device; without a plan, that of the largest device."""
    held = task.devices if outcome.cost is None else outcome.cost.devices
    return max(device.memory_bytes for device in held) / 1e6
