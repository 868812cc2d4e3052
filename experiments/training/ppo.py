"""RLlib's PPO with our environment, policy network and connectors."""

import logging
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.env.env_runner_group import EnvRunnerGroup
from ray.rllib.utils.metrics import NUM_ENV_STEPS_SAMPLED_LIFETIME
from ray.tune import register_env

from autoshard.cost_model import CostModel
from autoshard.cost_model.threads import one_thread
from autoshard.envs import (
    Balance,
    CostSource,
    Dense,
    EstimatedCostSource,
    MeasuredCostSource,
    MixedCostSource,
    Reward,
    ShardingVectorEnv,
    TableCatalog,
)
from autoshard.envs.observation import Floats
from autoshard.envs.vector import Info
from autoshard.experiments.console import cli
from autoshard.experiments.training.config import Goal, PPOShardConfig, TrainingSetup
from autoshard.experiments.training.group_baseline import GroupBaselineLearner
from autoshard.sharders.policy.connectors import ActionsAsBatch, ObservationsAsBatch
from autoshard.sharders.policy.module import PolicyModule
from autoshard.sharders.policy.network import PolicyNetwork
from autoshard.workload import UserError

CPUS_PER_ENV_RUNNER = 0.5
REWARDS: dict[Goal, Reward] = {"maximum": Dense(), "balance": Balance()}
_SCENARIOS = 16  # number of scenarios in the expected step time of estimated costs
_ENVIRONMENT = "Sharding"
_PATIENCE_SECONDS = 120.0  # a lost env runner is replaced within ten or twenty
_COST_MODEL = "autoshard_cost_model"  # attribute of an algorithm: its env runners' cost model

logging.getLogger("ray.rllib").setLevel(logging.ERROR)  # it prints a notice for every user of PPO
# It tells of lost env runners in several lines; LostRunners does in one.
logging.getLogger("ray.rllib.utils.actor_manager").setLevel(logging.CRITICAL)


class _TrainingEnv(ShardingVectorEnv):
    """An environment that is seeded once.

    Before each batch of complete episodes, RLlib resets it with the same seed: all batches would be
    of the same few tasks.
    """

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: Info | None = None
    ) -> tuple[Floats, Info]:
        """Starts new episodes; the seed counts the first time."""
        return super().reset(seed=seed if self._np_random is None else None, options=options)


def make_environment(setup: TrainingSetup, seed: int, num_envs: int) -> ShardingVectorEnv:
    """Returns the environment of an env runner.

    Args:
        setup: Options, tables that tasks are sampled from, cost model, and store.
        seed: Seed of the choice of measured episodes.
        num_envs: Number of parallel environments.
    """
    config, shape = setup.config, setup.config.hyper.shape
    whole = [table.whole() for table in setup.parts["train"]]
    # The published systems of recipes use mean costs.
    estimated = EstimatedCostSource(_SCENARIOS if config.recipe is None else 0)
    source: CostSource = estimated
    if config.reward != "estimated":
        source = measured = MeasuredCostSource(setup.store, kind=config.devices)
        if config.reward == "mixed":
            source = MixedCostSource(measured, config.measured_share, seed)
    return _TrainingEnv(
        TableCatalog(config.oracle(setup.model), whole, shape.splits),
        num_envs,
        config.task_sampler(),
        REWARDS[config.goal],
        source,
        max_splits=None if shape.splits else 0,
        group_size=config.group_size,
        kinds=shape.kinds,
    )


class Trainer:
    """RLlib's PPO on the environment of a configuration.

    Args:
        setup: Options, tables, initial cost model and store.
        seed: Seed of all random numbers, in place of that in the options.
    """

    def __init__(self, setup: TrainingSetup, seed: int) -> None:
        # Held as long as env runners may be restarted: Ray releases large arguments of actors
        # (ray-project/ray#53727), and a lost env runner could not be replaced.
        self._arguments = ray.put((setup, seed))
        register_env(_ENVIRONMENT, partial(_make_environment, self._arguments))
        self.algorithm: Algorithm = ppo_config(setup.config, seed).build_algo()
        self._learning_rate = setup.config.hyper.learning_rate
        self._steps = 0

    @property
    def network(self) -> PolicyNetwork:
        """The network of the current policy."""
        module = self.algorithm.get_module()
        assert isinstance(module, PolicyModule)
        return module.network

    @one_thread()  # beside a busy pool, two threads wait for each other and take 20 times as long
    def iterate(self) -> dict[str, float]:
        """Collects episodes, updates the policy, and returns the iteration's metrics."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while (result := self._train()).get(NUM_ENV_STEPS_SAMPLED_LIFETIME, 0) <= self._steps:
            # All env runners are lost, and their replacement takes a while.
            if time.monotonic() > deadline:
                raise UserError(
                    f"no env runner has answered for {_PATIENCE_SECONDS:.0f} s: continue with "
                    "--resume, and find the cause with --num-env-runners 0"
                )
        self._steps = int(result[NUM_ENV_STEPS_SAMPLED_LIFETIME])
        learned = result.get("learners", {}).get("default_policy", {})
        found: list[dict[str, float]] = _env_runners(self.algorithm).foreach_env_runner(
            lambda runner: {} if runner.env is None else runner.env.unwrapped.tally()
        )
        tallies = [tally for tally in found if tally]
        finished = sum(t["episodes"] - t["infeasible"] for t in tallies)
        relative = sum(t["step_over_bound"] * (t["episodes"] - t["infeasible"]) for t in tallies)
        return {
            "steps": float(self._steps),
            "episode_return": float(result["env_runners"].get("episode_return_mean", "nan")),
            "step_over_bound": relative / finished if finished else float("nan"),
            "episodes": sum(t["episodes"] for t in tallies),
            "infeasible": sum(t["infeasible"] for t in tallies),
            "requested_shards": sum(t["requested_shards"] for t in tallies),
            **{
                name: float(learned.get(key, "nan"))
                for name, key in (
                    ("entropy", "entropy"),
                    ("policy_loss", "policy_loss"),
                    ("value_loss", "vf_loss"),
                    ("value_explained", "vf_explained_var"),
                )
            },
        }

    def _train(self) -> dict[str, Any]:
        try:
            result: dict[str, Any] = self.algorithm.train()  # type: ignore[no-untyped-call]
        except RuntimeError as error:  # RLlib wraps errors of the environment
            if isinstance(error.__cause__, UserError):
                raise error.__cause__ from None
            raise
        return result

    def use_cost_model(self, model: CostModel) -> None:
        """Sends a cost model to all env runners."""
        setattr(self.algorithm, _COST_MODEL, model)
        _send_cost_model(self.algorithm, model)

    def save(self, folder: Path) -> None:
        """Writes RLlib's checkpoint."""
        self.algorithm.save_to_path(str(folder))

    def restore(self, folder: Path) -> None:
        """Resumes from a checkpoint, with this trainer's own hyperparameters."""
        self.algorithm.restore_from_path(str(folder))  # type: ignore[no-untyped-call]
        group = self.algorithm.learner_group
        assert group is not None
        # The optimizer's state includes its learning rate.
        group.foreach_learner(partial(_set_learning_rate, rate=self._learning_rate))

    def stop(self) -> None:
        """Ends the env runners."""
        self.algorithm.stop()  # type: ignore[no-untyped-call]


class LostRunners(RLlibCallback):
    """Reports env runners that were lost, and sends their successors the current cost model."""

    def on_env_runners_recreated(
        self, *, algorithm: Algorithm, env_runner_indices: list[int], **_context: Any
    ) -> None:
        """Implements RLlib's hook."""
        names = ", ".join(map(str, env_runner_indices))
        cli.note(f"env runner {names} was lost and is replaced")
        model = getattr(algorithm, _COST_MODEL, None)
        if model is not None:
            _send_cost_model(algorithm, model)


def ppo_config(config: PPOShardConfig, seed: int) -> PPOConfig:
    """Returns RLlib's configuration. Env runners and learner use CPUs; GPUs are left to the pool.

    With the group baseline, an env runner collects complete episodes, and all of a task. With a
    critic, samples may be parts of episodes.
    """
    hyper, grouped = config.hyper, config.learner != "critic"
    runners = max(1, config.env_runners)
    num_envs = max(1, config.num_envs // runners)  # for each env runner
    if grouped:
        num_envs = max(1, num_envs // hyper.group_size) * hyper.group_size
    # An episode takes a step for each table, and one to begin the next.
    batch = (config.task_sampler().max_tables + 1) * num_envs * runners
    built = (
        PPOConfig()  # type: ignore[no-untyped-call]
        .environment(_ENVIRONMENT, disable_env_checking=True)
        .env_runners(
            num_env_runners=config.env_runners,
            num_envs_per_env_runner=num_envs,
            num_cpus_per_env_runner=CPUS_PER_ENV_RUNNER,  # type: ignore[arg-type]
            gym_env_vectorize_mode="vector_entry_point",
            rollout_fragment_length="auto",
            batch_mode="complete_episodes" if grouped else "truncate_episodes",
            add_default_connectors_to_env_to_module_pipeline=False,
            add_default_connectors_to_module_to_env_pipeline=False,
            env_to_module_connector=lambda *_, **_options: ObservationsAsBatch(),
            module_to_env_connector=lambda *_, **_options: ActionsAsBatch(),
        )
        .learners(num_learners=0)
        .training(
            train_batch_size_per_learner=batch,
            minibatch_size=min(hyper.minibatch, batch),
            num_epochs=hyper.epochs,
            lr=hyper.learning_rate,
            gamma=1.0,
            lambda_=hyper.gae_lambda,
            clip_param=hyper.clip,
            entropy_coeff=hyper.entropy,
            vf_loss_coeff=1.0,
            use_kl_loss=False,
            grad_clip=1.0,
        )
        .rl_module(
            rl_module_spec=RLModuleSpec(
                module_class=PolicyModule, model_config={"shape": asdict(hyper.shape)}
            )
        )
        .callbacks(LostRunners)
        .fault_tolerance(restart_failed_env_runners=True, delay_between_env_runner_restarts_s=1.0)
        .debugging(seed=seed, log_level="ERROR")
    )
    if grouped:
        built.learners(learner_class=GroupBaselineLearner).training(use_critic=False)
    if config.learner == "reinforce":
        # One gradient per round of episodes, by the policy that played them: probability ratios
        # are 1, nothing is clipped, and PPO's gradient is that of REINFORCE. (No round has fewer
        # samples than episodes, so there is no second gradient.)
        built.training(
            num_epochs=1, minibatch_size=None, train_batch_size_per_learner=num_envs * runners
        )
    return built


def _make_environment(arguments: "ray.ObjectRef[Any]", context: Any) -> ShardingVectorEnv:
    setup, seed = ray.get(arguments)
    return make_environment(setup, seed, context["num_envs"])


def _env_runners(algorithm: Algorithm) -> EnvRunnerGroup:
    assert algorithm.env_runner_group is not None
    return algorithm.env_runner_group


def _send_cost_model(algorithm: Algorithm, model: CostModel) -> None:
    _env_runners(algorithm).foreach_env_runner(
        lambda runner: None if runner.env is None else runner.env.unwrapped.set_cost_model(model)
    )


def _set_learning_rate(learner: Any, rate: float) -> None:
    for module in learner.module.keys():  # noqa: SIM118 - RLlib's container is no mapping
        for _, optimizer in learner.get_optimizers_for_module(module):
            for group in optimizer.param_groups:
                group["lr"] = rate
