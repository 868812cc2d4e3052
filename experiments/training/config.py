"""The settings of a training run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from autoshard.benchmark.hardware import AskedKind
from autoshard.envs import Generator, RandomDeals
from autoshard.envs.task_families import Choice, deals_of, read_choices, tables_of
from autoshard.experiments.console.objectives import ObjectiveOptions
from autoshard.experiments.console.outputs import check_file
from autoshard.experiments.console.ranges import read_range
from autoshard.experiments.training.hyperparameters import Hyperparameters, LearnerName
from autoshard.sharders.policy_network import PolicyShape
from autoshard.workload import EmbeddingTable, UserError, load_tables
from autoshard.workload.bounds import check_bounds

Goal = Literal["maximum", "balance"]
RecipeName = Literal["autoshard", "dreamshard"]

_ITERATIONS = 20
_PATHS = ("out", "store", "json")


@dataclass(frozen=True)
class PPOShardConfig(ObjectiveOptions):
    """Train a policy that places embedding tables on devices, and say what its plans are worth.

    Tables are split once and for all: 70 % teach, the others check and test. The folder --out
    holds the policy, its cost model, the last checkpoint and what was measured.
    """

    recipe: RecipeName | None = None
    """A published system, by our own code: autoshard (KDD'22) or dreamshard (NeurIPS'22). What
    makes it that system is fixed; other options begin as it has them. docs/policy.md says how."""
    tables: str = "synthetic:400:1"
    """A CSV, JSON, Parquet or dlrm_datasets file, criteo, mlperf:dlrm-v2, wide:N or synthetic:N."""
    families: str | None = None
    """In place of --tables and all that follows on tasks up to --memory-unevenness: families of
    tasks with commas between them, such as small,giants:tight, or all; docs/policy.md has them."""
    num_tables: str = "60"
    """Tables of a task: a number, or a range such as 20-100."""
    num_devices: str = "4"
    """Devices of a task: a number, or a range such as 2-8."""
    memory_fill: str = "0.1-0.9"
    """Share of all devices' memory that the tables of a task take: loose to tight."""
    memory_unevenness: float = 0.3
    """Devices have from 1 minus this to 1 of the largest device's memory."""
    max_devices: int = 128
    """The most devices that the policy may be asked for later."""
    batch_size: int = 1024
    """Samples of a batch."""
    cost_model: str = "cpu"
    """Folder of a cost model, or the name of one that is shipped."""
    reward: Literal["estimated", "mixed", "measured"] = "mixed"
    """Where the costs of finished games come from; what is measured also teaches the cost model."""
    devices: AskedKind = "auto"
    """What measures: auto takes GPUs where the cluster has any; cuda waits for GPUs to join."""
    goal: Goal = "maximum"
    """What games are worth: minus the slowest device's cost, or AutoShard's min / max."""
    measured_share: float = 0.03
    """Of the games, with --reward mixed."""
    collect: int = 0
    """With --reward estimated: plans that are drawn from the policy and measured before each update
    of the cost model, which then begins with one."""
    iterations: int | None = None
    """Of PPO; by default 20, and with --resume as many as the run was to have."""
    seconds: float | None = None
    """End after the iteration by which so many seconds are spent, from the start of the command, as
    if it were the last; --resume goes on. By default as long as all iterations take."""
    games: int = 128
    """Played at once; an iteration is about one of each."""
    num_env_runners: int | None = None
    """Processes that play beside the one that learns; by default that one plays too."""
    learner: LearnerName = "critic"
    """critic: PPO with a critic's advantages; rivals: PPO with those over other games of a task;
    reinforce: REINFORCE with these, one gradient an iteration; imitation: of the best of these, and
    of searched plans; both: PPO over rivals, with imitation that fades."""
    hyper: Hyperparameters = field(default_factory=Hyperparameters)
    """Of PPO and of the policy's network; tune_shard.py looks for good ones."""
    check_every: int = 5
    """Iterations between checks on unseen tables, and between updates of the cost model."""
    check_tasks: int = 16
    """Tasks in a check."""
    test_seconds: float = 60.0
    """Where anything measures: how long plans of the test at the end are measured, at most;
    0 leaves it at what the cost model says of them."""
    seed: int = 0
    """Of everything that is drawn."""
    out: Path = Path("runs/autoshard")
    """Folder of the run."""
    resume: bool = False
    """Go on with the run in --out, with its own settings; --iterations may be more, there may be
    other --num-env-runners, and files may lie elsewhere."""
    force: bool = False
    """Replace the run in --out."""
    store: Path | None = None
    """SQLite file of measurements; by default costs.db in --out."""
    storage: str | None = None
    """A shared path or object store (s3://...) that keeps the run and its measurements as well."""
    json: Path | None = None
    """Write the result here."""
    mlflow_uri: str | None = None
    """Where to log; by default MLFLOW_TRACKING_URI, else sqlite:///mlflow.db."""

    def check(self) -> None:
        """UserError unless the numbers make sense."""
        counts = ("iterations", "games", "check_every", "check_tasks", "max_devices")
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
        if not self.hyper.shape.halves and self.learner in ("imitation", "both"):
            raise UserError(
                f"--learner {self.learner} imitates plans with halved tables: leave out "
                "--hyper.shape.no-halves, or name another learner"
            )
        check_file(self.json, "--json")
        devices = self.generator().most_devices
        if devices > self.max_devices:
            raise UserError(f"--max-devices {self.max_devices} is less than --num-devices")
        if self.families is not None and self.names_objective:
            raise UserError("--families say what counts: leave out --objective and --link")

    @property
    def measures(self) -> bool:
        """Whether a pool measures on the way."""
        return self.reward != "estimated" or self.collect > 0

    @property
    def most_iterations(self) -> int:
        """Of PPO, in all."""
        return _ITERATIONS if self.iterations is None else self.iterations

    @property
    def env_runners(self) -> int:
        """Processes that play beside the one that learns."""
        return self.num_env_runners or 0

    @property
    def choices(self) -> tuple[Choice, ...]:
        """The families that are asked for; none where tables are."""
        return () if self.families is None else read_choices(self.families, "--families")

    @property
    def source(self) -> str:
        """Where tables come from, in words."""
        return self.tables if self.families is None else self.families

    @property
    def tasks_told(self) -> str:
        """What is dealt, in words."""
        if self.families is not None:
            return f"families {self.families}"
        return f"{self.num_tables} tables on {self.num_devices} devices"

    def all_tables(self) -> tuple[EmbeddingTable, ...]:
        """The tables of all parts."""
        return tables_of(self.choices) if self.choices else load_tables(self.tables)

    def generator(self) -> Generator:
        """Who deals."""
        if self.choices:
            return deals_of(self.choices)
        devices = read_range(self.num_devices, "--num-devices", int)
        return RandomDeals(
            read_range(self.num_tables, "--num-tables", int),
            devices,
            read_range(self.memory_fill, "--memory-fill", float),
            self.memory_unevenness,
            objective=self.wanted(devices[1], lambda _devices: None),
        )

    @staticmethod
    def from_json(settings: Mapping[str, Any]) -> "PPOShardConfig":
        """What `asdict` made of it, read from JSON."""
        hyper = dict(settings["hyper"])
        paths = {n: None if settings[n] is None else Path(settings[n]) for n in _PATHS}
        hyper["shape"] = PolicyShape(**hyper["shape"])
        return PPOShardConfig(**{**settings, **paths, "hyper": Hyperparameters(**hyper)})
