"""The configuration of a training: options of ppo_shard.py, stored with the run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

from autoshard.cost_model import CostModel, EstimatedCosts
from autoshard.cost_model.pricing.mixed_costs import costs_of_machines
from autoshard.envs import RandomTaskSampler, TaskSampler
from autoshard.envs.options import OPTION_KINDS
from autoshard.envs.task_families import Choice, read_choices, tables_of, task_sampler_of
from autoshard.experiments.console.inputs import check_file, read_range
from autoshard.experiments.console.objectives import ObjectiveOptions
from autoshard.experiments.tracking.runs import check_registered
from autoshard.experiments.training.options import TrainingOptions
from autoshard.sharders.policy.network import PolicyShape
from autoshard.workload import EmbeddingTable, Objective, UserError, load_tables
from autoshard.workload.bounds import MAX_DEVICES, MAX_TABLES, check_bounds
from autoshard.workload.tables.parts import Part

Parts = Mapping[Part, Sequence[EmbeddingTable]]
Goal = Literal["maximum", "balance"]
LearnerName = Literal["critic", "group_baseline", "reinforce"]
RecipeName = Literal["autoshard", "dreamshard"]

_ITERATIONS = 20


@dataclass(frozen=True)
class Hyperparameters:
    """Hyperparameters of PPO and of the policy's network.

    Args:
        learning_rate: Learning rate of Adam.
        epochs: Passes over the samples of an iteration. Not used by `reinforce`, like the next two.
        minibatch: Steps per gradient.
        clip: Clipping of the probability ratio of an action.
        entropy: Weight of the entropy bonus.
        gae_lambda: Lambda of generalised advantage estimation; 1 uses returns alone, 0 the critic
            alone.
        group_size: Episodes of one task, whose mean return is the baseline of learners without a
            critic.
        shape: Shape of the network.
    """

    learning_rate: float = 1e-3
    epochs: int = 3
    minibatch: int = 1024
    clip: float = 0.2
    entropy: float = 0.0
    gae_lambda: float = 0.98
    group_size: int = 8
    shape: PolicyShape = field(default_factory=PolicyShape)

    def check(self) -> None:
        """Raises UserError unless the numbers are valid."""
        positive = (
            "learning_rate", "epochs", "minibatch", "clip", "shape.hidden", "shape.encoded",
        )  # fmt: skip
        check_bounds(
            self,
            "hyper.",
            at_least={"entropy": 0, "gae_lambda": 0, "group_size": 2, "shape.sharpness": 0},
            more_than=dict.fromkeys(positive, 0),
            up_to={"gae_lambda": 1},
        )
        for kind in self.shape.kinds:
            if kind not in OPTION_KINDS:
                known = " ".join(OPTION_KINDS)
                raise UserError(f"--hyper.shape.kinds {kind}: take some of {known}")


@dataclass(frozen=True, kw_only=True)
class PPOShardConfig(TrainingOptions, ObjectiveOptions):
    """Train a policy that places embedding tables on devices, and test its plans.

    Each table belongs to one part for ever: 70 % are for training, the others for evaluation and
    the test. The folder --out holds the policy, its cost model, the last checkpoint and
    measurements.
    """

    recipe: RecipeName | None = None
    """A published system, reimplemented: autoshard (KDD'22) or dreamshard (NeurIPS'22). It fixes
    some options and sets the defaults of others; docs/policy.md lists them."""
    families: str | None = None
    """Families of tasks, separated by commas, such as small,giants:tight, or all, in place of
    --tables and the options of tasks; docs/policy.md lists them."""
    memory_unevenness: float = 0.3
    """Unevenness of devices' memory: from 1 minus this to 1 of the largest device's."""
    max_devices: int = 128
    """Maximum number of devices that the policy supports."""
    goal: Goal = "maximum"
    """Reward of an episode. maximum: minus the step time by the objective, over its lower bound.
    balance: AutoShard's cheapest over costliest device."""
    collect: int = 0
    """Number of plans that are sampled from the policy and measured, before the first iteration and
    at each evaluation, to train the cost model. Requires --reward estimated."""
    iterations: int | None = None
    """Number of PPO iterations. Default: 20; with --resume, the number of the run."""
    seconds: float | None = None
    """Time limit in seconds from the start of the command. The iteration in progress is the last
    one, and --resume continues the run. Default: none."""
    num_env_runners: int | None = None
    """Number of processes that collect episodes. Default: the learner's process collects them."""
    learner: LearnerName = "critic"
    """critic: PPO with a critic and generalised advantage estimation. group_baseline: PPO with the
    mean return of other episodes of the same task as the baseline. reinforce: REINFORCE with that
    baseline, one gradient per iteration."""
    hyper: Hyperparameters = field(default_factory=Hyperparameters)
    """Hyperparameters of PPO and of the policy's network."""
    test_seconds: float = 60.0
    """Time limit in seconds of measuring plans of the final test; 0: they are only estimated. Not
    used if --reward is estimated and --collect is 0."""
    out: Path = Path("runs/autoshard")
    """Folder of the run."""
    register: str | None = None
    """Name of the policy in MLflow's registry, or NAME@ALIAS, such as autoshard-policy@champion:
    the new version then gets the alias. Default: it is only among the artifacts of the run."""

    def check(self) -> None:
        """Raises UserError unless the options are valid."""
        counts = ("iterations", "num_envs", "check_every", "check_tasks", "max_devices")
        others = ("seed", "num_env_runners", "measured_share", "collect", "test_seconds")
        check_bounds(
            self,
            at_least={**dict.fromkeys(counts, 1), **dict.fromkeys(others, 0)},
            up_to={"measured_share": 1},
        )
        self.hyper.check()
        if self.collect and self.reward != "estimated":
            raise UserError(
                f"--reward {self.reward} measures plans already: leave out --collect {self.collect}"
            )
        check_file(self.json, "--json")
        check_registered(self.register)
        if self.task_sampler().max_devices > self.max_devices:
            raise UserError(f"--max-devices {self.max_devices} is less than --num-devices")
        if self.families is not None and self.names_objective:
            raise UserError(
                "--families define what counts: leave out --objective, --link and --dense-ms"
            )

    def priced_for_tasks(self, model: CostModel) -> CostModel:
        """Returns the model whose costs the tasks count; those of families count operators.

        Inputs over the link are counted if all tasks have the same number of devices.
        """
        if self.choices:
            return model.for_objective(Objective())
        least, most = read_range(self.num_devices, "--num-devices", int)
        return self.priced(model, most if least == most else None, learn_link=False)

    def oracle(self, model: CostModel) -> EstimatedCosts:
        """Returns the oracle of the tasks, which knows several machines if devices are mixed.

        A pool measures on its own devices, so that all are equal where rewards are measured.
        """
        if not self.measures and any(choice.family.mixed for choice in self.choices):
            return costs_of_machines(model, self.batch_size)
        return EstimatedCosts(model, self.batch_size)

    def priced_by(self, model: CostModel) -> Self:
        """Returns the options with the objective named if it is not that of the options.

        `model` is what `priced_for_tasks` returned: it may not know what training takes.
        """
        if self.choices or model.in_training or not self.build_objective(2).in_training:
            return self
        return replace(self, objective="operators", dense_ms=None)

    @property
    def measures(self) -> bool:
        """Whether a benchmark pool measures during training."""
        return self.reward != "estimated" or self.collect > 0

    @property
    def max_iterations(self) -> int:
        """Iterations of PPO in all."""
        return _ITERATIONS if self.iterations is None else self.iterations

    @property
    def env_runners(self) -> int:
        """Number of processes that collect episodes, besides the learner's."""
        return self.num_env_runners or 0

    @property
    def group_size(self) -> int:
        """Number of episodes of one task."""
        return 1 if self.learner == "critic" else self.hyper.group_size

    @property
    def choices(self) -> tuple[Choice, ...]:
        """The families of --families; none where --tables are used."""
        return () if self.families is None else read_choices(self.families, "--families")

    @property
    def source(self) -> str:
        """Source of the tables."""
        return self.tables if self.families is None else self.families

    @property
    def task_description(self) -> str:
        """Description of the tasks."""
        if self.families is not None:
            return f"families {self.families}"
        return f"{self.num_tables} tables on {self.num_devices} devices"

    def all_tables(self) -> tuple[EmbeddingTable, ...]:
        """Loads the tables of all parts."""
        return tables_of(self.choices) if self.choices else load_tables(self.tables)

    def task_sampler(self) -> TaskSampler:
        """Returns the sampler of tasks."""
        if self.choices:
            return task_sampler_of(self.choices)
        devices = read_range(self.num_devices, "--num-devices", int, MAX_DEVICES)
        for number in range(*devices):
            self.build_objective(number)  # raises where nodes are not full
        return RandomTaskSampler(
            read_range(self.num_tables, "--num-tables", int, MAX_TABLES),
            devices,
            read_range(self.memory_fill, "--memory-fill", float),
            self.memory_unevenness,
            objective=self.build_objective(devices[1]),
        )

    @classmethod
    def from_json(cls, settings: Mapping[str, Any]) -> Self:
        """Returns the options that `to_json` stored."""
        hyper = dict(settings["hyper"])
        hyper["shape"] = PolicyShape.from_json(hyper["shape"])
        return super().from_json({**settings, "hyper": Hyperparameters(**hyper)})


@dataclass(frozen=True)
class TrainingSetup:
    """Options, tables and cost model of a training; trials of a sweep differ in hyperparameters."""

    config: PPOShardConfig  # options
    parts: Parts  # tables by part
    model: CostModel  # initial cost model
    store: Path  # file of measurements, on the machine of the pool
