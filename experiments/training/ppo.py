"""PPO on the game: RLlib's algorithm for our environment, policy and connectors."""

import logging
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.env.env_runner_group import EnvRunnerGroup
from ray.rllib.utils.metrics import NUM_ENV_STEPS_SAMPLED_LIFETIME
from ray.tune import register_env

from autoshard.cost_model import CostModel
from autoshard.cost_model.training import one_thread
from autoshard.envs import ShardingVectorEnv
from autoshard.experiments.console import cli
from autoshard.experiments.training.hyperparameters import Hyperparameters, LearnerName
from autoshard.experiments.training.imitation import REINFORCED, ImitatingLearner
from autoshard.experiments.training.rivals import RivalLearner
from autoshard.experiments.training.school import School
from autoshard.experiments.training.setting import Setting
from autoshard.experiments.training.teacher import Lessons
from autoshard.sharders.policy_connectors import ActionsAsBatch, ObservationsAsBatch
from autoshard.sharders.policy_module import PolicyModule
from autoshard.sharders.policy_network import PolicyNetwork
from autoshard.workload import UserError

CPUS_PER_ENV_RUNNER = 0.5
_ENVIRONMENT = "Sharding"
_PATIENCE_SECONDS = 120.0  # a lost env runner is back after ten or twenty
_BELIEVED = "autoshard_cost_model"  # where an algorithm keeps what its env runners should believe

logging.getLogger("ray.rllib").setLevel(logging.ERROR)  # it greets every user of PPO


class LostRunners(RLlibCallback):
    """Tells of env runners that were lost; their successors learn the current cost model."""

    def on_env_runners_recreated(
        self, *, algorithm: Algorithm, env_runner_indices: list[int], **_told: Any
    ) -> None:
        """Called by RLlib."""
        names = ", ".join(map(str, env_runner_indices))
        cli.console.print(f"note: env runner {names} was lost and is replaced; training goes on")
        believed = getattr(algorithm, _BELIEVED, None)
        if believed is not None:
            tell(algorithm, believed)


class Trainer:
    """RLlib's PPO on a setting, by one of several learners.

    Args:
        setting: what is played.
        learner: that learns.
        hyperparameters: how.
        games: played at once, by all env runners together; an iteration is about a game of each.
        num_env_runners: processes that play; 0: this one does.
        seed: of everything that is drawn.
    """

    def __init__(
        self,
        setting: Setting,
        learner: LearnerName,
        hyperparameters: Hyperparameters,
        games: int,
        num_env_runners: int,
        seed: int,
    ) -> None:
        # Kept as long as env runners may be started again: Ray forgets large arguments of actors
        # (ray-project/ray#53727), and a lost env runner would not come back.
        self._setting = ray.put(setting)
        rivals = 1 if learner == "critic" else hyperparameters.rivals
        register_env(_ENVIRONMENT, partial(_make, self._setting, rivals))
        most_tables = setting.generator.most_tables
        config = ppo_config(most_tables, learner, hyperparameters, games, num_env_runners, seed)
        self.algorithm: Algorithm = config.build_algo()
        imitates = learner in ("imitation", "both")
        self._school = School(self._setting, hyperparameters, seed) if imitates else None
        self._fades = learner == "both"
        self._weight = hyperparameters.imitation if self._fades else 1.0
        self._learning_rate = hyperparameters.learning_rate
        self._steps = 0

    @property
    def network(self) -> PolicyNetwork:
        """The policy as it is."""
        module = self.algorithm.get_module()
        assert isinstance(module, PolicyModule)
        return module.network

    @property
    def steps(self) -> int:
        """Steps played so far, in all iterations."""
        return self._steps

    @one_thread()  # beside a busy pool two threads wait for each other, twenty times as long
    def iterate(self, left: float = 1.0) -> dict[str, float]:
        """One iteration; its figures, with the games' `tally` in sum.

        `left`: share of the run that is to come, with which imitation fades beside PPO.
        """
        self._teach(left)
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while (result := self._train()).get(NUM_ENV_STEPS_SAMPLED_LIFETIME, 0) <= self._steps:
            # All env runners are lost, and take a while to come back.
            if time.monotonic() > deadline:
                raise UserError(
                    f"no env runner has played for {_PATIENCE_SECONDS:.0f} s: go on with --resume, "
                    "and see with --num-env-runners 0 what is wrong with them"
                )
        learned = result.get("learners", {}).get("default_policy", {})
        tallies: list[dict[str, float]] = _runners(self.algorithm).foreach_env_runner(
            lambda runner: {} if runner.env is None else runner.env.unwrapped.tally()
        )
        told = [tally for tally in tallies if tally]
        finished = sum(tally["games"] - tally["dead_ends"] for tally in told)
        relative = sum(t["relative_max"] * (t["games"] - t["dead_ends"]) for t in told)
        self._steps = int(result[NUM_ENV_STEPS_SAMPLED_LIFETIME])
        return {
            "steps": float(self._steps),
            "episode_return": float(result["env_runners"].get("episode_return_mean", "nan")),
            "relative_max": relative / finished if finished else float("nan"),
            "games": sum(tally["games"] for tally in told),
            "dead_ends": sum(tally["dead_ends"] for tally in told),
            "asked": sum(tally["asked"] for tally in told),
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

    def _teach(self, left: float) -> None:
        """Hand the learner what teachers have prepared, and let them prepare more."""
        if self._school is None:
            return
        lessons = self._school.lessons(self.network)
        group = self.algorithm.learner_group
        assert group is not None
        weight = self._weight * (left if self._fades else 1.0)
        group.foreach_learner(partial(_taught, lessons=lessons, weight=weight))

    def _train(self) -> dict[str, Any]:
        try:
            result: dict[str, Any] = self.algorithm.train()  # type: ignore[no-untyped-call]
        except RuntimeError as error:  # RLlib's, around whatever an environment has raised
            if isinstance(error.__cause__, UserError):
                raise error.__cause__ from None
            raise
        return result

    def learn(self, model: CostModel) -> None:
        """All env runners believe this cost model from now on."""
        setattr(self.algorithm, _BELIEVED, model)
        tell(self.algorithm, model)

    def save(self, folder: Path) -> None:
        """Write RLlib's checkpoint."""
        self.algorithm.save_to_path(str(folder))

    def restore(self, folder: Path) -> None:
        """Go on from it, with this trainer's own hyperparameters."""
        self.algorithm.restore_from_path(str(folder))  # type: ignore[no-untyped-call]
        group = self.algorithm.learner_group
        assert group is not None
        # The optimizer's state brings its learning rate along.
        group.foreach_learner(partial(_set_learning_rate, rate=self._learning_rate))

    def stop(self) -> None:
        """End the env runners, and the teachers."""
        if self._school is not None:
            self._school.close()
        self.algorithm.stop()  # type: ignore[no-untyped-call]


def _to_module(_env: Any = None, _spaces: Any = None, _device: Any = None) -> ConnectorV2:
    return ObservationsAsBatch()


def _to_env(_env: Any = None, _spaces: Any = None) -> ConnectorV2:
    return ActionsAsBatch()


def _make(
    setting: "ray.ObjectRef[Setting]", rivals: int, context: dict[str, Any]
) -> ShardingVectorEnv:
    return ray.get(setting).make(context["num_envs"], rivals)


def _taught(learner: Any, lessons: list[Lessons], weight: float) -> None:
    assert isinstance(learner, ImitatingLearner)
    learner.teach(lessons, weight)


def _set_learning_rate(learner: Any, rate: float) -> None:
    for module in learner.module.keys():  # noqa: SIM118 - RLlib's container is no mapping
        for _, optimizer in learner.get_optimizers_for_module(module):
            for group in optimizer.param_groups:
                group["lr"] = rate


def tell(algorithm: Algorithm, model: CostModel) -> None:
    """Let all env runners that are there believe a cost model."""
    _runners(algorithm).foreach_env_runner(partial(_learn, model=model))


def _runners(algorithm: Algorithm) -> EnvRunnerGroup:
    assert algorithm.env_runner_group is not None
    return algorithm.env_runner_group


def _learn(runner: Any, model: CostModel) -> None:
    if runner.env is not None:
        runner.env.unwrapped.learn(model)


def ppo_config(
    most_tables: int,
    learner: LearnerName,
    hyper: Hyperparameters,
    games: int,
    num_env_runners: int,
    seed: int,
) -> PPOConfig:
    """RLlib's configuration. Env runners and learner are on CPUs; GPUs are left to the pool."""
    rounds = learner != "critic"
    seats = max(1, games // max(1, num_env_runners))
    if rounds:  # where all rivals of a task sit side by side
        seats = max(1, seats // hyper.rivals) * hyper.rivals
    # A game takes a step for each table, and one to be dealt.
    batch = (most_tables + 1) * seats * max(1, num_env_runners)
    config = (
        PPOConfig()  # type: ignore[no-untyped-call]
        .environment(_ENVIRONMENT, disable_env_checking=True)
        .env_runners(
            num_env_runners=num_env_runners,
            num_envs_per_env_runner=seats,
            num_cpus_per_env_runner=CPUS_PER_ENV_RUNNER,  # type: ignore[arg-type]
            gym_env_vectorize_mode="vector_entry_point",
            rollout_fragment_length="auto",
            batch_mode="complete_episodes" if rounds else "truncate_episodes",
            add_default_connectors_to_env_to_module_pipeline=False,
            add_default_connectors_to_module_to_env_pipeline=False,
            env_to_module_connector=_to_module,
            module_to_env_connector=_to_env,
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
    if rounds:
        kind = ImitatingLearner if learner in ("imitation", "both") else RivalLearner
        told = {REINFORCED: learner == "both"}
        config.learners(learner_class=kind, learner_config_dict=told)
        config.training(use_critic=False)
    if learner == "reinforce":
        # One gradient of a round of games, by the policy that played it: no choice's odds have
        # moved, nothing is clipped, and PPO's gradient is that of REINFORCE. (No round has less
        # than a step of each seat, so there is no second one.)
        round_of = seats * max(1, num_env_runners)
        config.training(num_epochs=1, minibatch_size=None, train_batch_size_per_learner=round_of)
    return config
