"""What a sweep can be about: policies, or cost models."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

from ray import tune

from autoshard.benchmark import BenchmarkPool
from autoshard.cost_model import (
    EstimatedCosts,
    Selection,
    load_model,
    read_costs,
    save_model,
    split,
)
from autoshard.cost_model.communication import FEWEST_EXCHANGES, train_communication
from autoshard.cost_model.evaluation import evaluate
from autoshard.cost_model.training import TrainOptions
from autoshard.experiments import tracking
from autoshard.experiments.judging.outcomes import best_of_each, maxima_of, relative
from autoshard.experiments.sweeps.config import TuneShardConfig
from autoshard.experiments.sweeps.search_space import (
    COST_MODEL_SPACE,
    POLICY_SPACE,
    Dimension,
    Value,
    at_point,
)
from autoshard.experiments.sweeps.trials import (
    CostModelTask,
    CostModelTrial,
    PolicyTask,
    PolicyTrial,
)
from autoshard.experiments.tracking.data_sources import (
    DataSource,
    short_name,
    store_source,
    tables_source,
)
from autoshard.experiments.training.loading import oracle_for
from autoshard.experiments.training.policy_check import PolicyCheck
from autoshard.experiments.training.run_folder import COST_MODEL
from autoshard.experiments.training.training import check_hardware, parts_of, tasks_of
from autoshard.sharders import HEURISTICS, load_policy
from autoshard.workload import load_tables

_TEST_TASKS = 32
_TEST_SEED = 1000  # no check's


class Subject(Protocol):
    """What trials train, and how their winner is tested.

    `score`: what the score is, for people. `registered_as`: the winner in MLflow's registry.
    `script`: trains one with the winner's hyperparameters.
    """

    name: str
    score: str
    space: Sequence[Dimension]
    registered_as: str
    script: str
    parameters: dict[str, Any]
    tags: dict[str, str]
    data: Sequence[DataSource]

    def start_pool(self) -> BenchmarkPool | None:
        """The pool that all trials share, if they measure."""

    def trainable(self) -> Any:
        """What Tune runs."""

    def complete(self, winner: Path, values: Mapping[str, Value]) -> None:
        """Add to the winner's folder what no trial trains, for it is no part of the score."""

    def test(self, kept: Mapping[str, Path], run: tracking.TrackedRun, /) -> dict[str, float]:
        """Figures of what trials have kept in folders, by name, on tables that nobody has seen.

        There is a "winner", which is also logged in pictures.
        """


class PolicySubject:
    """Policies: the mean slowest device on held-out tasks, over the best heuristic's."""

    score = "max cost over the best heuristic's"
    registered_as = tracking.POLICIES
    script = "ppo_shard.py"

    def __init__(self, config: TuneShardConfig, store: Path) -> None:
        self._training = config.training()
        tables = load_tables(config.tables)
        parts = parts_of(config.tables, tables)
        model = load_model(config.cost_model)
        oracle_for(model, config.batch_size, tables)  # which tells of tables it knows little of
        # All trials change these while they train, or none: a network's size stays as it was made.
        self.space: Sequence[Dimension] = tuple(
            d for d in POLICY_SPACE if d.live or config.scheduler != "pbt"
        )
        self.name = f"{short_name(config.tables)} {config.num_tables} on {config.num_devices}"
        self.tags: dict[str, str] = {
            "tables": short_name(config.tables),
            "hardware": model.provenance.hardware,
            "num_devices": config.num_devices,
        }
        self.parameters = asdict(config)
        self.data: Sequence[DataSource] = (tables_source(config.tables, tables),)
        self._task = PolicyTask(self._training, parts, model, store)

    def start_pool(self) -> BenchmarkPool | None:
        """Before any trial asks, so that the pool is where the store is."""
        if self._training.reward == "estimated":
            return None
        pool = BenchmarkPool(self._task.store, kind=self._training.devices)
        check_hardware(self._task.model, pool, self._training.cost_model)
        pool.check_store_is_here()
        return pool

    def trainable(self) -> Any:
        """PPO with hyperparameters of its own."""
        return tune.with_parameters(PolicyTrial, task=self._task)

    def complete(self, winner: Path, values: Mapping[str, Value]) -> None:
        """It is whole."""

    def test(self, kept: Mapping[str, Path], run: tracking.TrackedRun) -> dict[str, float]:
        """Each policy's slowest device over each task's best heuristic's; `cost_fused`'s, too."""
        model, parts = self._task.model, self._task.parts
        tasks = tasks_of(self._training, model, parts, "test", _TEST_TASKS, _TEST_SEED)
        check = PolicyCheck(tasks)
        winner = load_policy(kept["winner"])
        maxima = maxima_of(check.outcomes(winner, model, (*HEURISTICS, "cost_fused")))
        bar = best_of_each(maxima)
        figures: dict[str, float] = {}
        for name, folder in kept.items():
            outcomes = check.outcomes(load_policy(folder), model, ("policy",))
            maxima[name] = maxima_of(outcomes)["policy"]
            figures[f"test/{name}_without_plan"] = float(maxima[name].count(None))
            plan = outcomes["policy"][0].plan
            if name == "winner" and plan is not None:
                oracle = EstimatedCosts(model, tasks[0].batch_size)
                run.plan(name, plan, oracle.plan_cost(plan, tasks[0]))
        ratios = {name: relative(values, bar) for name, values in maxima.items()}
        told = {f"test/{name}": ratio.value for name, ratio in ratios.items() if ratio is not None}
        return figures | told


class CostModelSubject:
    """Cost models: the mean relative error on shards of held-out tables."""

    name = "cost model"
    score = "validation error"
    space: Sequence[Dimension] = COST_MODEL_SPACE
    registered_as = tracking.COST_MODELS
    script = "train_cost_model.py"

    def __init__(self, config: TuneShardConfig, store: Path) -> None:
        data = read_costs((store,), Selection(hardware=config.hardware))
        self._parts, self._exchanges = split(data), data.exchanges
        self.tags: dict[str, str] = {"hardware": data.hardware, "versions": data.versions}
        self.data: Sequence[DataSource] = (store_source(store),)
        self._seed = config.seed
        shared = ("what", "num_samples", "scheduler", "search", "seed")
        self.parameters = {name: getattr(config, name) for name in shared}

    def start_pool(self) -> BenchmarkPool | None:
        """Nothing is measured."""
        return None

    def trainable(self) -> Any:
        """A training with hyperparameters of its own."""
        return tune.with_parameters(CostModelTrial, task=CostModelTask(self._parts, self._seed))

    def complete(self, winner: Path, values: Mapping[str, Value]) -> None:
        """What all-to-alls cost, if the store tells."""
        if len(self._exchanges) >= FEWEST_EXCHANGES:
            model = load_model(winner / COST_MODEL)
            options = at_point(TrainOptions(), values)
            communication, _ = train_communication(self._exchanges, options, self._seed)
            whole = replace(model, communication=communication)
            save_model(whole, winner / COST_MODEL, force=True)

    def test(self, kept: Mapping[str, Path], _run: tracking.TrackedRun) -> dict[str, float]:
        """Each model's errors and its order of shards, on test tables."""
        figures: dict[str, float] = {}
        for name, folder in kept.items():
            model = load_model(folder / COST_MODEL)
            found = evaluate(model.compute, self._parts["train"], self._parts["test"]).score
            figures |= {f"test/{name}.{field}": value for field, value in vars(found).items()}
        return figures


def subject_of(config: TuneShardConfig, store: Path) -> Subject:
    """What the sweep is about; UserError if its tables or its store do not do."""
    if config.what == "cost-model":
        return CostModelSubject(config, store)
    return PolicySubject(replace(config, store=store), store)
