"""The training loop: PPO iterations, evaluations, checkpoints and updates of the cost model.

It prints and logs nothing.
"""

import math
import time
from dataclasses import replace
from itertools import islice

import ray

from autoshard import benchmark
from autoshard.cost_model import save_model
from autoshard.experiments.console.budget import Budget
from autoshard.experiments.training.config import PPOShardConfig, TrainingSetup
from autoshard.experiments.training.policy_evaluation import PolicyEvaluator, unseen_tasks
from autoshard.experiments.training.ppo import CPUS_PER_ENV_RUNNER, Trainer
from autoshard.experiments.training.run_folder import Progress, RunFolder, SavedRun
from autoshard.sharders import Policy, load_policy, save_policy
from autoshard.sharders.policy.files import COST_MODEL
from autoshard.workload import UserError

# Options that are stored with a policy.
_KEPT_OPTIONS = (
    "objective", "link", "inter_node_link", "devices_per_node", "recipe", "tables", "families",
    "num_tables", "num_devices", "memory_fill",
    "memory_unevenness", "batch_size", "cost_model", "reward", "goal", "collect", "num_envs",
    "learner", "hyper", "seed",
)  # fmt: skip
_SEEDS_APART = 10_007


class Training:
    """PPO on the tables of the part `train`. All state is in a run folder after each iteration.

    Args:
        setup: Options, tables, cost model, from which each update starts, and store.
        folder: Folder of the run.
        saved: State to resume from; None begins a run.
        run_id: Run in MLflow, for resuming.
        budget: Time limit.
        adapt: Whether the cost model learns from measurements.
    """

    def __init__(
        self,
        setup: TrainingSetup,
        folder: RunFolder,
        saved: SavedRun | None = None,
        run_id: str = "",
        budget: Budget | None = None,
        adapt: bool = True,
    ) -> None:
        self.setup, self.folder, self.model = setup, folder, setup.model
        self.config = config = setup.config
        self.progress = Progress(0, run_id, math.inf, 0.0, math.inf)
        self._budget = budget or Budget()
        self._out_of_time = False
        check_env_runners(config)

        # A resumed run must not repeat the episodes of the first iterations.
        seed = config.seed + _SEEDS_APART * (saved.progress.iteration if saved else 0)
        self._trainer = Trainer(setup, seed)
        self._online = None
        if config.measures:
            # Loads Ray's pool, which is not needed if all costs are estimated.
            from autoshard.experiments.training.measuring import OnlineCostModel

            self._online = OnlineCostModel(setup, seed, adapt)
        tasks = unseen_tasks(setup, "validation", config.seed)
        self._evaluator = PolicyEvaluator(list(islice(tasks, config.check_tasks)))
        if saved is not None:
            self._restore(saved, run_id)

    @property
    def pool(self) -> "benchmark.BenchmarkPool | None":
        """The pool; None if all costs are estimated."""
        return None if self._online is None else self._online.pool

    @property
    def done(self) -> bool:
        """Whether training has ended, by iterations or by time."""
        return self.remaining_iterations == 0 or self._out_of_time

    @property
    def remaining_iterations(self) -> int:
        """Number of remaining iterations."""
        return max(0, self.config.max_iterations - self.progress.iteration)

    def begin(self) -> None:
        """Evaluates and keeps the initial policy, so that there always is one."""
        self._evaluate()
        if self._collect():
            self._update_cost_model()
        self._save()

    def step(self) -> dict[str, float]:
        """Makes an iteration, and an evaluation if one is due; returns the metrics."""
        number = self.progress.iteration + 1
        started = time.monotonic()
        metrics = self._trainer.iterate()
        self.progress = replace(self.progress, iteration=number)
        # One more would take about as long.
        self._out_of_time = self._budget.left_s() < time.monotonic() - started
        if number % self.config.check_every == 0 or self.done:
            if not self.done:  # otherwise nothing would learn from it
                metrics["requested_shards"] += self._collect()
            metrics |= self._update_cost_model()
            metrics |= self._evaluate()
            self._out_of_time |= self._budget.is_spent  # measuring may take long
        metrics["seconds"] = time.monotonic() - started
        self.progress = replace(self.progress, seconds=self.progress.seconds + metrics["seconds"])
        self._save()
        return metrics

    def stop(self) -> None:
        """Ends the env runners, and closes the pool."""
        self._trainer.stop()
        if self.pool is not None:
            self.pool.close()

    def _collect(self) -> int:
        """Measures --collect plans of the policy; returns the number of shards."""
        if self._online is None:
            return 0
        return self._online.collect(self._trainer.network, self.model)

    def _update_cost_model(self) -> dict[str, float]:
        """Adapts the cost model to new measurements; returns metrics of the update, if any."""
        update = None if self._online is None else self._online.update()
        if update is None:
            return {}
        self.model = update.model
        self._trainer.use_cost_model(update.model)
        # The kept policy uses the new model too, so its score is computed again.
        save_model(update.model, self.folder.folder / COST_MODEL, force=True)
        kept = self._evaluator.score(load_policy(self.folder.folder), update.model)
        self.progress = replace(self.progress, best_check=kept["score"])
        return {"cost_model_error": update.error_before, "new_shards": update.new_shards}

    def _evaluate(self) -> dict[str, float]:
        """Evaluates the policy; keeps it with its cost model if its score is the best so far."""
        policy = self._policy()
        metrics = self._evaluator.score(policy, self.model)
        self.progress = replace(
            self.progress,
            last_check=metrics["score"],
            last_memory_mb=metrics["memory_mb"],
            last_planning_ms=metrics["planning_ms"],
        )
        if metrics["score"] <= self.progress.best_check:
            self.progress = replace(self.progress, best_check=metrics["score"])
            self._keep(policy)
        return {f"check_{name}": value for name, value in metrics.items()}

    def _policy(self) -> Policy:
        options = self.config.to_json()
        trained = {
            **{name: options[name] for name in _KEPT_OPTIONS},
            "iterations": self.progress.iteration,
            "hardware": self.model.provenance.hardware,
        }
        return Policy(self._trainer.network, self.config.max_devices, trained)

    def _keep(self, policy: Policy) -> None:
        save_model(self.model, self.folder.folder / COST_MODEL, force=True)
        save_policy(policy, self.folder.folder)

    def _save(self) -> None:
        self.folder.save(self.config.to_json(), self.progress, self._trainer.save, self.model)

    def _restore(self, saved: SavedRun, run_id: str) -> None:
        self._trainer.restore(saved.checkpoint)
        model = self.config.priced_for_tasks(saved.model)  # a saved model does not say what counts
        self._trainer.use_cost_model(model)
        self.progress = replace(saved.progress, mlflow_run=run_id)
        self.model = model
        if not (self.folder.folder / COST_MODEL).is_dir():  # killed while it was replaced
            self._keep(load_policy(self.folder.folder))


def check_env_runners(config: PPOShardConfig) -> None:
    """Raises UserError if env runners would wait for CPUs for ever."""
    cpus = ray.cluster_resources().get("CPU", 0.0)  # type: ignore[no-untyped-call]
    if config.env_runners * CPUS_PER_ENV_RUNNER > cpus:
        raise UserError(
            f"--num-env-runners {config.env_runners} is too much for the {cpus:.0f} CPUs of the "
            f"Ray cluster: use at most {int(cpus / CPUS_PER_ENV_RUNNER)}"
        )
