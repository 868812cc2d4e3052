"""A training: what it is made of, how it goes on step by step. It prints and logs nothing."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import ray

from autoshard.benchmark import BenchmarkPool
from autoshard.cost_model import CostModel, save_model
from autoshard.envs import (
    Balance,
    CostSource,
    Deck,
    Dense,
    EstimatedRewards,
    MeasuredRewards,
    MixedRewards,
    Reward,
)
from autoshard.experiments.console.budget import Budget
from autoshard.experiments.judging.contest import Contest
from autoshard.experiments.training.collector import PlanCollector
from autoshard.experiments.training.config import Goal, PPOShardConfig
from autoshard.experiments.training.online_model import OnlineModel
from autoshard.experiments.training.policy_check import (
    PolicyCheck,
    deal_tasks,
    unseen_tables,
)
from autoshard.experiments.training.ppo import CPUS_PER_ENV_RUNNER, Trainer
from autoshard.experiments.training.run_folder import COST_MODEL, Progress, RunFolder
from autoshard.experiments.training.setting import Setting
from autoshard.experiments.training.settings import as_json
from autoshard.sharders import Policy, load_policy, save_policy
from autoshard.workload import EmbeddingTable, ShardingTask, UserError
from autoshard.workload.parts import Part, tables_by_part

# Settings that say what a policy is, wherever it goes.
_TOLD = frozenset(
    (
        "recipe", "tables", "families", "num_tables", "num_devices", "memory_fill",
        "memory_unevenness", "batch_size", "cost_model", "reward", "objective", "link", "goal",
        "collect", "games", "learner", "hyper", "seed",
    )
)  # fmt: skip
_REWARDS: dict[Goal, Reward] = {"maximum": Dense(), "balance": Balance()}
_SEEDS_APART = 10_007
_SCENARIOS = 16  # in which the slowest device is expected, for estimated rewards
_FEWEST_TABLES = 3  # that teach, and that check and test


def make_source(config: PPOShardConfig, store: Path, seed: int) -> CostSource:
    """Where the costs of finished games come from."""
    if config.reward == "estimated":
        # The systems of recipes take costs as they are predicted.
        return EstimatedRewards(_SCENARIOS if config.recipe is None else 0)
    measured = MeasuredRewards(store, kind=config.devices)
    if config.reward == "measured":
        return measured
    return MixedRewards(measured, config.measured_share, seed)


def setting_of(
    config: PPOShardConfig,
    model: CostModel,
    tables: Sequence[EmbeddingTable],
    store: Path,
    seed: int,
) -> Setting:
    """What is played with these settings, of tables that teach."""
    return Setting(
        model,
        tuple(tables),
        config.batch_size,
        config.generator(),
        _REWARDS[config.goal],
        partial(make_source, config, store, seed),
        config.hyper.shape.halves,
    )


class Training:
    """PPO on the tables that teach; checks, checkpoints and updates of the cost model on the way.

    Args:
        config: the run's settings.
        folder: where it is kept.
        parts: tables by part.
        base: the cost model that it begins with.
        store: of what is measured.
        run_id: of the run in MLflow, for whoever goes on.
        begun: iterations that were made before.
        budget: training ends after the iteration by which it is spent.
        adapt: let the cost model learn from what is measured; otherwise all is judged by `base`.
    """

    def __init__(
        self,
        config: PPOShardConfig,
        folder: RunFolder,
        parts: Mapping[Part, list[EmbeddingTable]],
        base: CostModel,
        store: Path,
        run_id: str = "",
        begun: int = 0,
        budget: Budget | None = None,
        adapt: bool = True,
    ) -> None:
        self.config, self.folder = config, folder
        self._parts = parts
        self.pool = BenchmarkPool(store, kind=config.devices) if config.measures else None
        self._refuse_the_impossible(base)
        if adapt and self.pool is not None:
            self.pool.check_store_is_here()  # the cost model learns from the file
        self._online = OnlineModel(base, store, config.batch_size) if adapt else None
        self.model = base
        # What goes on after a checkpoint must not play the first iterations' games again.
        seed = config.seed + _SEEDS_APART * begun
        setting = setting_of(config, base, parts["train"], store, seed)
        self._collector: PlanCollector | None = None
        if self.pool is not None and config.collect:
            self._collector = PlanCollector(setting, self.pool, config.collect, seed)
        self._trainer = Trainer(
            setting, config.learner, config.hyper, config.games, config.env_runners, seed
        )
        self._check = PolicyCheck(self.tasks("validation", config.check_tasks, config.seed))
        self._run_id = run_id
        self._budget = budget or Budget()
        self._out_of_time = False
        self.progress = Progress(0, run_id, math.inf, 0.0, math.inf)

    def _refuse_the_impossible(self, base: CostModel) -> None:
        """UserError where training would wait for ever, or mix costs of unlike machines."""
        resources = ray.cluster_resources()  # type: ignore[no-untyped-call]
        asked, cpus = self.config.env_runners, resources.get("CPU", 0.0)
        if asked * CPUS_PER_ENV_RUNNER > cpus:
            raise UserError(
                f"--num-env-runners {asked} is more than the {cpus:.0f} CPUs of the Ray cluster "
                f"carry: ask for at most {int(cpus / CPUS_PER_ENV_RUNNER)}"
            )
        check_hardware(base, self.pool, self.config.cost_model)

    @property
    def done(self) -> bool:
        """True after the last iteration, or after that by which the budget was spent."""
        return self.left_out == 0 or self._out_of_time

    @property
    def left_out(self) -> int:
        """Iterations that are not made yet."""
        return max(0, self.config.most_iterations - self.progress.iteration)

    def take_up(self, progress: Progress, checkpoint: Path, model: CostModel) -> None:
        """Go on from a checkpoint."""
        self._trainer.restore(checkpoint)
        self.progress = replace(progress, mlflow_run=self._run_id)
        self.model = model
        self._trainer.learn(model)
        if not (self.folder.folder / COST_MODEL).is_dir():  # killed while it was replaced
            self._keep(load_policy(self.folder.folder))

    def begin(self) -> None:
        """Put out the policy that training starts from, so that there is always one."""
        self._put_out(*self._checked(0))
        if self._collect():
            self._updated()
        self._save()

    def step(self) -> dict[str, float]:
        """An iteration, with what is due after it, and a checkpoint; the figures of it."""
        number = self.progress.iteration + 1
        started = time.time()
        left = min(1 - number / self.config.most_iterations, self._budget.left_share)
        figures = self._trainer.iterate(left)
        self.progress = replace(self.progress, iteration=number)
        # One more would take about as long.
        self._out_of_time = self._budget.left_s() < time.time() - started
        if number % self.config.check_every == 0 or self.done:
            if not self.done:  # or nobody would learn from it
                figures["asked"] += self._collect()
            figures |= self._updated()
            policy, checked = self._checked(number)
            figures |= checked
            self._put_out(policy, checked)
            self._out_of_time |= self._budget.left_s() <= 0  # measuring may take long
        figures["seconds"] = time.time() - started
        self.progress = replace(self.progress, seconds=self.progress.seconds + figures["seconds"])
        self._save()
        return figures

    def stop(self) -> None:
        """End the env runners, and close the store."""
        self._trainer.stop()
        if self.pool is not None:
            self.pool.close()

    def tasks(self, part: Part, count: int, seed: int) -> list[ShardingTask]:
        """Tasks as training's, of tables that it never learns from."""
        return tasks_of(self.config, self.model, self._parts, part, count, seed)

    def contest(self, begin: int, seed: int) -> Contest:
        """The same of test tables, without end, for a judge to begin with so many."""
        tables, deals = unseen_tables(self._parts, "test"), self.config.generator()
        tasks = deal_unseen(self.config, self.model, self._parts, "test", seed)
        return Contest.drawn(tasks, begin, tables, deals.most_devices)

    def _collect(self) -> int:
        """Have plans of the policy measured, if that is asked for; how many shards they have."""
        if self._collector is None:
            return 0
        return self._collector.collect(self._trainer.network, self.model)

    def _updated(self) -> dict[str, float]:
        """Let the cost model learn from what was measured since, and tell the env runners."""
        if self._online is None or self.pool is None:
            return {}
        update = self._online.update()
        if update is None:
            return {}
        self.model = update.model
        self._trainer.learn(update.model)
        # What is kept goes by the new model too, and is judged by it, not by an old score.
        save_model(update.model, self.folder.folder / COST_MODEL, force=True)
        kept = self._score(load_policy(self.folder.folder))
        self.progress = replace(self.progress, best_check=kept["score"])
        return {"cost_model_error": update.error_before, "new_shards": update.new_shards}

    def _checked(self, number: int) -> tuple[Policy, dict[str, float]]:
        policy = self._policy(number)
        told = self._score(policy)
        self.progress = replace(self.progress, last_check=told["score"])
        return policy, {f"check_{name}": value for name, value in told.items()}

    def _score(self, policy: Policy) -> dict[str, float]:
        """How a policy does in the check; a plan more counts for more than any time saved."""
        ratio, failed = self._check.relative_to_heuristic(policy, self.model)
        score = failed + (ratio if math.isfinite(ratio) else 1.0)
        return {"over_heuristic": ratio, "without_plan": failed, "score": score}

    def _put_out(self, policy: Policy, checked: Mapping[str, float]) -> None:
        """Keep the policy that did best in checks so far, with the cost model it goes by."""
        if checked["check_score"] > self.progress.best_check:
            return
        self.progress = replace(self.progress, best_check=checked["check_score"])
        self._keep(policy)

    def _keep(self, policy: Policy) -> None:
        save_model(self.model, self.folder.folder / COST_MODEL, force=True)
        save_policy(policy, self.folder.folder)

    def _policy(self, number: int) -> Policy:
        trained = {
            **{name: value for name, value in as_json(self.config).items() if name in _TOLD},
            "iterations": number,
            "hardware": self.model.provenance.hardware,
        }
        return Policy(self._trainer.network, self.config.max_devices, trained)

    def _save(self) -> None:
        self.folder.save(as_json(self.config), self.progress, self._trainer.save, self.model)


def parts_of(named: str, tables: Sequence[EmbeddingTable]) -> dict[Part, list[EmbeddingTable]]:
    """Tables by part; UserError if there are too few of one."""
    parts = tables_by_part(tables)
    others = len(tables) - len(parts["train"])
    if min(len(parts["train"]), others) < _FEWEST_TABLES:
        raise UserError(
            f"{named}: has too few tables: {len(parts['train'])} would teach and {others} "
            f"check and test, {_FEWEST_TABLES} of each are needed"
        )
    return parts


def deal_unseen(
    config: PPOShardConfig,
    model: CostModel,
    parts: Mapping[Part, list[EmbeddingTable]],
    part: Part,
    seed: int,
) -> Iterator[ShardingTask]:
    """Tasks as those of a training with these settings, of tables that it never learns from."""
    deck = Deck.of_tables(model, unseen_tables(parts, part), config.batch_size)
    return deal_tasks(deck, config.generator(), seed)


def tasks_of(
    config: PPOShardConfig,
    model: CostModel,
    parts: Mapping[Part, list[EmbeddingTable]],
    part: Part,
    count: int,
    seed: int,
) -> list[ShardingTask]:
    """The first of them."""
    return list(islice(deal_unseen(config, model, parts, part, seed), count))


def check_hardware(model: CostModel, pool: BenchmarkPool | None, named: str) -> None:
    """UserError where a pool of GPUs would be told of by a model of CPUs, or the other way."""
    if pool is None:
        return
    known, here = model.provenance.hardware, pool.devices()[0].hardware
    if known.partition(":")[0] != here.partition(":")[0]:
        raise UserError(
            f"the cost model {named} is of {known}, the pool measures on {here}: calibrate it "
            "with train_cost_model.py --calibrate, or end the pool (pool.py stop) and say with "
            "--devices what is to measure"
        )
