"""A training run: what it is made of, how it goes on, what comes out of it."""

import math
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from rich.table import Table

from benchmark import BenchmarkPool, MeasurementStore
from cost_model import CostModel, EstimatedCosts, save_model
from envs import (
    Balance,
    CostSource,
    Deck,
    Dense,
    EstimatedRewards,
    MeasuredRewards,
    MixedRewards,
    NegativeMaximum,
)
from experiments import cli
from experiments.online import OnlineModel
from experiments.policy_check import (
    PolicyCheck,
    best_heuristic,
    draw_tasks,
    relative,
    unseen_tables,
)
from experiments.ppo import CPUS_PER_ENV_RUNNER, Setting, Trainer
from experiments.ppo_config import PPOShardConfig
from experiments.run_folder import COST_MODEL, Progress, RunFolder
from experiments.tracking import TrackedRun
from sharders import Policy, load_policy, save_policy
from workload import EmbeddingTable, ShardingTask, UserError
from workload.parts import Part

# Settings that say what a policy is, wherever it goes.
_TOLD = frozenset(
    (
        "tables", "num_tables", "num_devices", "memory_fill", "memory_unevenness", "batch_size",
        "cost_model", "reward", "goal", "games", "learning_rate", "sharpness", "seed",
    )
)  # fmt: skip
_TEST_TASKS = 8
_TEST_SEED = 1000  # no check's
_SEEDS_APART = 10_007


def make_source(reward: str, store: Path, share: float, seed: int) -> CostSource:
    """Where the costs of finished games come from."""
    if reward == "estimated":
        return EstimatedRewards()
    measured = MeasuredRewards(store)
    return measured if reward == "measured" else MixedRewards(measured, share, seed)


class Training:
    """PPO on the tables that teach; checks, checkpoints and updates of the cost model on the way.

    Args:
        config: the run's settings.
        folder: where it is kept.
        parts: tables by part.
        base: the cost model that it begins with.
        store: of what is measured.
        run: in MLflow.
        begun: iterations that were made before.
    """

    def __init__(
        self,
        config: PPOShardConfig,
        folder: RunFolder,
        parts: Mapping[Part, list[EmbeddingTable]],
        base: CostModel,
        store: Path,
        run: TrackedRun,
        begun: int = 0,
    ) -> None:
        self._config, self._folder, self._parts = config, folder, parts
        self._store, self._run = store, run
        self._pool = None if config.reward == "estimated" else BenchmarkPool(store)
        self._refuse_the_impossible(base)
        self._online = OnlineModel(base, store, config.batch_size)
        # What goes on after a checkpoint must not play the first iterations' games again.
        seed = config.seed + _SEEDS_APART * begun
        goal = NegativeMaximum() if config.goal == "maximum" else Balance()
        setting = Setting(
            base,
            tuple(parts["train"]),
            config.batch_size,
            config.generator(),
            Dense(goal) if isinstance(goal, NegativeMaximum) else goal,
            partial(make_source, config.reward, store, config.measured_share, seed),
        )
        cli.console.print(
            f"training on {len(parts['train'])} tables of {config.tables}: tasks of "
            f"{config.num_tables} tables on {config.num_devices} devices, {config.reward} rewards"
            + (f", measured on {len(self._pool.devices())} devices" if self._pool else ""),
            soft_wrap=True,
        )
        if config.generator().most_tables > len(parts["train"]):
            cli.console.print(
                f"note: tasks have at most the {len(parts['train'])} tables that teach"
            )
        self._trainer = Trainer(
            setting, config.hyperparameters(), config.games, config.num_env_runners, seed
        )
        self._check = PolicyCheck(self._tasks("validation", config.check_tasks, config.seed))
        self._progress = Progress(0, run.run_id, math.inf, 0.0)
        self._lines: list[dict[str, float]] = []
        self._notices: set[str] = set()
        self._trained_between = (0.0, 0.0)

    def _refuse_the_impossible(self, base: CostModel) -> None:
        """UserError where training would wait for ever, or mix costs of unlike machines."""
        resources = ray.cluster_resources()  # type: ignore[no-untyped-call]
        asked, cpus = self._config.num_env_runners, resources.get("CPU", 0.0)
        if asked * CPUS_PER_ENV_RUNNER > cpus:
            raise UserError(
                f"--num-env-runners {asked} is more than the {cpus:.0f} CPUs of the Ray cluster "
                f"carry: ask for at most {int(cpus / CPUS_PER_ENV_RUNNER)}"
            )
        known = base.provenance.hardware
        here = known if self._pool is None else self._pool.devices()[0].hardware
        if known.partition(":")[0] != here.partition(":")[0]:
            raise UserError(
                f"the cost model {self._config.cost_model} is of {known}, the pool measures on "
                f"{here}: calibrate it first with train_cost_model.py --calibrate"
            )

    def take_up(self, progress: Progress, checkpoint: Path, model: CostModel) -> None:
        """Go on from a checkpoint."""
        self._trainer.restore(checkpoint)
        self._progress = progress
        self._online.model = model
        self._trainer.learn(model)
        if not (self._folder.folder / COST_MODEL).is_dir():  # killed while it was replaced
            self._keep(load_policy(self._folder.folder))
        cli.console.print(f"going on after iteration {progress.iteration}")

    def train(self) -> None:
        """To the last iteration; a checkpoint after each."""
        if self._progress.iteration == 0:
            self._put_out(*self._checked(0))
            self._save()
        began = time.time()
        while self._progress.iteration < self._config.most_iterations:
            number = self._progress.iteration + 1
            started = time.time()
            figures = self._trainer.iterate()
            self._progress = replace(self._progress, iteration=number)
            if number % self._config.check_every == 0 or number == self._config.most_iterations:
                figures |= self._updated()
                policy, checked = self._checked(number)
                figures |= checked
                self._put_out(policy, checked)
            figures["seconds"] = time.time() - started
            self._progress = replace(
                self._progress, seconds=self._progress.seconds + figures["seconds"]
            )
            self._say(number, figures)
            self._save()
            self._trained_between = (began, time.time())

    def test(self) -> dict[str, Any]:
        """The policy that was put out against the heuristics, on test tables; the run's result."""
        tasks = self._tasks("test", _TEST_TASKS, _TEST_SEED)
        policy, model = load_policy(self._folder.folder), self._online.model
        check = PolicyCheck(tasks, self._config.seed)
        maxima, plans = check.maxima(policy, model)
        best = best_heuristic(maxima)
        against = {name: relative(values, maxima[best]) for name, values in maxima.items()}
        report = Table(
            title=f"{len(tasks)} tasks of unseen tables, slowest device by the cost model",
            title_justify="left",
        )
        for column in ("sharder", f"over {best}", "without a plan"):
            report.add_column(column, justify="left" if column == "sharder" else "right")
        for name, ratio in sorted(against.items(), key=lambda pair: pair[1]):
            report.add_row(name, f"{ratio:.3f}", str(maxima[name].count(None)))
        cli.console.print(report)
        finite = {name: ratio for name, ratio in against.items() if math.isfinite(ratio)}
        self._run.metrics({f"test.{name}": ratio for name, ratio in finite.items()})
        with tempfile.TemporaryDirectory() as place:
            oracle = EstimatedCosts(model, tasks[0].batch_size)
            for name in (best, "policy", "autoshard"):
                plan = plans[name][0]
                if plan is None:
                    continue
                picture, document = Path(place) / f"{name}.png", Path(place) / f"{name}.plan.json"
                oracle.plan_cost(plan, tasks[0]).picture(picture, name)
                plan.save(document)
                self._run.artifact(picture, "plans")
                self._run.artifact(document, "plans")
        for name in ("policy.json", "policy.safetensors"):
            self._run.artifact(self._folder.folder / name, "policy")
        for path in sorted((self._folder.folder / COST_MODEL).iterdir()):
            self._run.artifact(path, f"policy/{COST_MODEL}")
        steps = [line["steps"] for line in self._lines]
        busy = self._pool_busy()
        if self._lines:
            self._run.metrics({"pool_busy": busy, "seconds": self._progress.seconds})
        return {
            "iterations": self._progress.iteration,
            "env_steps": steps[-1] if steps else 0,
            "seconds": self._progress.seconds,
            "iterations_here": [
                {name: value if math.isfinite(value) else None for name, value in line.items()}
                for line in self._lines
            ],
            "pool_busy": busy,
            "best_check": self._progress.best_check,
            "test_over_best_heuristic": {
                name: ratio if math.isfinite(ratio) else None for name, ratio in against.items()
            },
            "test_max_ms": maxima,
            "best_heuristic": best,
            "policy": str(self._folder.folder),
            "mlflow_run": self._run.run_id,
        }

    def stop(self) -> None:
        """End the env runners, and close the store."""
        self._trainer.stop()
        if self._pool is not None:
            self._pool.close()

    def _tasks(self, part: Part, count: int, seed: int) -> list[ShardingTask]:
        generator = self._config.generator()
        tables = unseen_tables(self._parts, part)
        deck = Deck.of_tables(self._online.model, tables, self._config.batch_size)
        return draw_tasks(deck, generator, count, seed)

    def _updated(self) -> dict[str, float]:
        """Let the cost model learn from what was measured since, and tell the env runners."""
        update = self._online.update() if self._pool is not None else None
        if update is None:
            return {}
        self._trainer.learn(update.model)
        # What is kept goes by the new model too, and is judged by it, not by an old score.
        save_model(update.model, self._folder.folder / COST_MODEL, force=True)
        kept = self._score(load_policy(self._folder.folder))
        self._progress = replace(self._progress, best_check=kept["score"])
        cli.console.print(
            f"  the cost model learned from {update.new_shards} new shards; it was wrong by "
            f"{update.error_before:.1%} about them"
        )
        return {"cost_model_error": update.error_before, "new_shards": update.new_shards}

    def _checked(self, number: int) -> tuple[Policy, dict[str, float]]:
        policy = self._policy(number)
        told = self._score(policy)
        return policy, {f"check_{name}": value for name, value in told.items()}

    def _score(self, policy: Policy) -> dict[str, float]:
        """How a policy does in the check; a plan more counts for more than any time saved."""
        ratio, failed = self._check.relative_to_heuristic(policy, self._online.model)
        score = failed + (ratio if math.isfinite(ratio) else 1.0)
        return {"over_heuristic": ratio, "without_plan": failed, "score": score}

    def _put_out(self, policy: Policy, checked: Mapping[str, float]) -> None:
        """Keep the policy that did best in checks so far, with the cost model it goes by."""
        if checked["check_score"] > self._progress.best_check:
            return
        self._progress = replace(self._progress, best_check=checked["check_score"])
        self._keep(policy)

    def _keep(self, policy: Policy) -> None:
        save_model(self._online.model, self._folder.folder / COST_MODEL, force=True)
        save_policy(policy, self._folder.folder)

    def _policy(self, number: int) -> Policy:
        trained = {
            **{name: value for name, value in self._settings().items() if name in _TOLD},
            "iterations": number,
            "hardware": self._online.model.provenance.hardware,
        }
        return Policy(self._trainer.network, self._config.max_devices, trained)

    def _save(self) -> None:
        self._folder.save(self._settings(), self._progress, self._trainer.save, self._online.model)

    def _settings(self) -> dict[str, Any]:
        """The configuration as JSON has it."""
        return {
            name: str(value) if isinstance(value, Path) else value
            for name, value in asdict(self._config).items()
        }

    def _say(self, number: int, figures: dict[str, float]) -> None:
        """A line for people, the figures for MLflow, and what the pool has to say."""
        before = self._lines[-1]["steps"] if self._lines else 0.0
        self._lines.append(figures)
        self._run.metrics({k: v for k, v in figures.items() if math.isfinite(v)}, step=number)
        line = (
            f"{number:4}/{self._config.most_iterations}  {figures['steps']:9,.0f} steps  "
            f"max/bound {figures['relative_max']:.4f}  dead ends {figures['dead_ends']:.0f} of "
            f"{figures['games']:.0f}  {figures['asked']:.0f} shards measured  "
            f"{figures['seconds']:.1f} s"
        )
        if before:
            line += f"  {(figures['steps'] - before) / figures['seconds']:,.0f} steps/s"
        if "check_over_heuristic" in figures:
            line += (
                f"  unseen tables: {figures['check_over_heuristic']:.4f} of the best heuristic's, "
                f"{figures['check_without_plan']:.0f} without a plan"
            )
        cli.console.print(line, soft_wrap=True)
        for notice in self._pool.notices() if self._pool is not None else []:
            subject = notice.partition(":")[0]  # how much of a load is told once
            if subject not in self._notices:
                self._notices.add(subject)
                cli.console.print(f"note: {notice}", markup=False, soft_wrap=True)

    def _pool_busy(self) -> float:
        """Share of the devices' time inside timed operators, from first to last iteration here."""
        began, ended = self._trained_between
        if self._pool is None or began == ended:
            return 0.0
        with MeasurementStore(self._store) as store:
            fresh = [m for m in store.measurements() if m.measured_at >= began]
        busy = sum(m.timing.operator_seconds for m in fresh if m.timing is not None)
        return busy / ((ended - began) * len(self._pool.devices()))
