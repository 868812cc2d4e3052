"""The settings of a sweep."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from autoshard.benchmark.hardware import AskedKind
from autoshard.experiments.console.outputs import check_file
from autoshard.experiments.console.ranges import read_range
from autoshard.experiments.training.config import PPOShardConfig
from autoshard.workload import UserError
from autoshard.workload.bounds import check_bounds

SchedulerName = Literal["asha", "pbt", "none"]
SearchName = Literal["optuna", "random"]

_PATHS = ("json", "store")
# Options that mean nothing to a sweep of the other kind.
_OF_ONE = {
    "policy": (
        "max_iterations", "reward", "devices", "tables", "num_tables", "num_devices", "memory_fill",
        "batch_size", "cost_model", "games", "measured_share", "check_every", "check_tasks",
    ),
    "cost-model": ("hardware",),
}  # fmt: skip
_MOST_SEED = 2**32 - 1


@dataclass(frozen=True)
class TuneShardConfig:
    """Look for good hyperparameters: many trainings at once, by Ray Tune, on the Ray cluster.

    All trials share one pool of benchmark actors and one store of measurements. Each is a run in
    MLflow under the sweep's; the winner becomes a model version with the alias `winner`.
    """

    what: Literal["policy", "cost-model"] = "policy"
    """What is trained. A cost model learns from --store; options of tasks, games and rewards are a
    policy's."""
    num_samples: int = 20
    """Trials."""
    max_iterations: int = 30
    """Of PPO, in each trial."""
    scheduler: SchedulerName = "asha"
    """asha stops bad trials early; pbt lets bad ones go on from good ones; none does neither."""
    search: SearchName | None = None
    """How hyperparameters are chosen; by default optuna, with pbt random."""
    seconds: float | None = None
    """End after so many seconds, from the start of the command: trials that train then are stopped,
    others are left out, and the winner is the best of those that have a score."""
    at_once: int | None = None
    """Trials at the same time, at most; by default one for each CPU, also of nodes that join."""
    reward: Literal["estimated", "mixed", "measured"] = "estimated"
    """Where the costs of finished games come from."""
    devices: AskedKind = "auto"
    """What measures: auto takes GPUs where the cluster has any; cuda waits for GPUs to join."""
    tables: str = PPOShardConfig.tables
    """A CSV, JSON, Parquet or dlrm_datasets file, criteo, mlperf:dlrm-v2, wide:N or synthetic:N."""
    num_tables: str = PPOShardConfig.num_tables
    """Tables of a task: a number, or a range such as 20-100."""
    num_devices: str = PPOShardConfig.num_devices
    """Devices of a task: a number, or a range such as 2-8."""
    memory_fill: str = PPOShardConfig.memory_fill
    """Share of all devices' memory that the tables of a task take: loose to tight."""
    batch_size: int = PPOShardConfig.batch_size
    """Samples of a batch."""
    cost_model: str = PPOShardConfig.cost_model
    """Folder of a cost model, or the name of one that is shipped: it judges all trials."""
    games: int = PPOShardConfig.games
    """Played at once, in each trial."""
    measured_share: float = PPOShardConfig.measured_share
    """Of the games, with --reward mixed."""
    check_every: int = PPOShardConfig.check_every
    """Iterations between two looks at a trial's score; none is stopped before the first."""
    check_tasks: int = 32
    """Held-out tasks that make the score."""
    seed: int = 0
    """Of everything that is drawn."""
    storage: str = "runs/sweep"
    """Folder of the sweep: a path (shared by all nodes, if trials run on several), or s3://..."""
    store: Path | None = None
    """SQLite file of measurements on this machine; with --what cost-model the one to learn from,
    which may be Parquet. By default costs.db in --storage, or in runs/ if that is an object
    store."""
    hardware: str | None = None
    """Which of the store's hardware a cost model learns of, if it holds several."""
    resume: bool = False
    """Go on with the sweep in --storage, with its own settings; files may lie elsewhere."""
    force: bool = False
    """Replace the sweep in --storage."""
    json: Path | None = None
    """Write the result here."""
    mlflow_uri: str | None = None
    """Where to log; by default MLFLOW_TRACKING_URI, else sqlite:///mlflow.db."""

    def check(self) -> None:
        """UserError unless the numbers make sense."""
        self._refuse_options_without_effect()
        counts = ("num_samples", "max_iterations", "check_every", "check_tasks", "at_once")
        check_bounds(
            self,
            at_least={**dict.fromkeys(counts, 1), "seed": 0},
            more_than={"seconds": 0},
            up_to={"seed": _MOST_SEED},
        )
        if self.scheduler == "pbt" and self.search == "optuna":
            raise UserError(
                "--scheduler pbt changes hyperparameters while trials train, which no search "
                "understands: leave --search out"
            )
        if self.what == "cost-model" and self.store is None:
            raise UserError("--what cost-model learns from a store: name it with --store")
        if self.what == "cost-model" and self.scheduler == "pbt":
            raise UserError("--what cost-model trains in one go: --scheduler pbt has no use there")
        check_file(self.json, "--json")
        if self.what == "policy":
            self.training().check()

    def _refuse_options_without_effect(self) -> None:
        usual = TuneShardConfig()
        for what, options in _OF_ONE.items():
            for option in options:
                if what != self.what and getattr(self, option) != getattr(usual, option):
                    raise UserError(
                        f"--{option.replace('_', '-')} has no effect with --what {self.what}: "
                        "leave it out"
                    )

    @property
    def search_name(self) -> SearchName:
        """As asked for, or what goes with the scheduler."""
        return self.search or ("random" if self.scheduler == "pbt" else "optuna")

    def training(self) -> PPOShardConfig:
        """The settings of each training."""
        shared = {f.name for f in fields(self)} & {f.name for f in fields(PPOShardConfig)}
        shared -= {"storage", "resume", "force", "json", "seconds"}
        values = {name: getattr(self, name) for name in shared}
        most = read_range(self.num_devices, "--num-devices", int)[1]
        room = max(PPOShardConfig.max_devices, most)
        return PPOShardConfig(**values, iterations=self.max_iterations, max_devices=room)

    @staticmethod
    def from_json(settings: Mapping[str, Any]) -> "TuneShardConfig":
        """What `asdict` made of it, read from JSON."""
        paths = {n: None if settings[n] is None else Path(settings[n]) for n in _PATHS}
        return TuneShardConfig(**{**settings, **paths})
