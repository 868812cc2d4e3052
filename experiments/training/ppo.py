"""PPO on the game: RLlib's algorithm for our environment, policy and connectors."""

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
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
from autoshard.envs import CostSource, Deck, Generator, Reward, ShardingVectorEnv
from autoshard.experiments.console import cli
from autoshard.experiments.training.rivals import RivalLearner
from autoshard.sharders.policy_connectors import ActionsAsBatch, ObservationsAsBatch
from autoshard.sharders.policy_module import PolicyModule
from autoshard.sharders.policy_network import PolicyNetwork, PolicyShape
from autoshard.workload import EmbeddingTable, UserError
from autoshard.workload.bounds import check_bounds

CPUS_PER_ENV_RUNNER = 0.5
_ENVIRONMENT = "Sharding"
_PATIENCE_SECONDS = 120.0  # a lost env runner is back after ten or twenty
_BELIEVED = "autoshard_cost_model"  # where an algorithm keeps what its env runners should believe

logging.getLogger("ray.rllib").setLevel(logging.ERROR)  # it greets every user of PPO


@dataclass(frozen=True)
class Hyperparameters:
    """Of PPO and of the policy.

    Args:
        learning_rate: of Adam.
        epochs: passes over what an iteration has sampled.
        minibatch: steps in a gradient.
        clip: how far the odds of a choice may move in an iteration.
        entropy: weight of staying undecided.
        gae_lambda: of generalised advantages; 1 trusts returns alone, 0 the critic alone.
        shape: of the network.
    """

    learning_rate: float = 1e-3
    epochs: int = 3
    minibatch: int = 1024
    clip: float = 0.2
    entropy: float = 0.0
    gae_lambda: float = 0.98
    shape: PolicyShape = field(default_factory=PolicyShape)

    def check(self) -> None:
        """UserError unless the numbers make sense."""
        positive = (
            "learning_rate", "epochs", "minibatch", "clip", "shape.hidden", "shape.encoded",
            "shape.sharpness",
        )  # fmt: skip
        check_bounds(
            self,
            "hyper.",
            at_least={"entropy": 0, "gae_lambda": 0},
            more_than=dict.fromkeys(positive, 0),
            up_to={"gae_lambda": 1},
        )


@dataclass(frozen=True)
class Setting:
    """What is played: everything that an env runner needs to make its environment."""

    model: CostModel
    tables: tuple[EmbeddingTable, ...]
    batch_size: int
    generator: Generator
    reward: Reward
    source: Callable[[], CostSource]
    rivals: int = 1

    def make(self, num_envs: int) -> ShardingVectorEnv:
        """The environment."""
        deck = Deck.of_tables(self.model, self.tables, self.batch_size, split=True)
        return ShardingVectorEnv(
            deck, num_envs, self.generator, self.reward, self.source(), rivals=self.rivals
        )


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
    """RLlib's PPO on a setting.

    Args:
        setting: what is played.
        hyperparameters: how it is learned.
        games: played at once, by all env runners together; an iteration is about a game of each.
        num_env_runners: processes that play; 0: this one does.
        seed: of everything that is drawn.
    """

    def __init__(
        self,
        setting: Setting,
        hyperparameters: Hyperparameters,
        games: int,
        num_env_runners: int,
        seed: int,
    ) -> None:
        # Kept as long as env runners may be started again: Ray forgets large arguments of actors
        # (ray-project/ray#53727), and a lost env runner would not come back.
        self._setting = ray.put(setting)
        register_env(_ENVIRONMENT, partial(_make, self._setting))
        config = ppo_config(setting, hyperparameters, games, num_env_runners, seed)
        self.algorithm: Algorithm = config.build_algo()
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
    def iterate(self) -> dict[str, float]:
        """One iteration of PPO; its figures, with the games' `tally` in sum."""
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
        """End the env runners."""
        self.algorithm.stop()  # type: ignore[no-untyped-call]


def _to_module(_env: Any = None, _spaces: Any = None, _device: Any = None) -> ConnectorV2:
    return ObservationsAsBatch()


def _to_env(_env: Any = None, _spaces: Any = None) -> ConnectorV2:
    return ActionsAsBatch()


def _make(setting: "ray.ObjectRef[Setting]", context: dict[str, Any]) -> ShardingVectorEnv:
    return ray.get(setting).make(context["num_envs"])


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
    setting: Setting, hyper: Hyperparameters, games: int, num_env_runners: int, seed: int
) -> PPOConfig:
    """RLlib's configuration. Env runners and learner are on CPUs; GPUs are left to the pool."""
    seats = max(1, games // max(1, num_env_runners))
    # A game takes a step for each table, and one to be dealt.
    batch = (setting.generator.most_tables + 1) * seats * max(1, num_env_runners)
    rounds = setting.rivals > 1
    told: dict[str, Any] = {"learner_class": RivalLearner, "use_critic": False} if rounds else {}
    return (
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
            **told,
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
