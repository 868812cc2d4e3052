"""The configuration of a sweep: options of tune_shard.py, stored with the sweep."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from autoshard.experiments.console.inputs import check_file, read_range
from autoshard.experiments.tracking.storage import Storage
from autoshard.experiments.training.config import PPOShardConfig
from autoshard.experiments.training.options import RewardName, TrainingOptions
from autoshard.workload import UserError, documents
from autoshard.workload.bounds import check_bounds

SchedulerName = Literal["asha", "pbt", "pb2", "none"]
SearchName = Literal["optuna", "random"]

SCORE = "score"  # in the results of trials; all objectives are minimised
OBJECTIVES: Mapping[str, str] = {  # their names in the results of trials
    "step": SCORE,
    "memory": "memory_mb",
    "planning": "planning_ms",
}
SWEEP, SWEEP_SCHEMA = "sweep.json", documents.Schema("autoshard.sweep", 2)  # in the storage
_MAX_SEED = 2**32 - 1


@dataclass(frozen=True, kw_only=True)
class TuneShardConfig(TrainingOptions):
    """Search hyperparameters of policies with Ray Tune.

    All trials share one pool of benchmark actors and one store of measurements. Each is a child run
    in MLflow. The winner becomes a model version with the alias `winner`.
    """

    num_samples: int = 20
    """Number of trials."""
    max_iterations: int = 30
    """Number of PPO iterations of a trial."""
    objectives: str = "step"
    """What is minimised, separated by commas: step, and memory (of the fullest device), planning
    (time to make a plan) or both. The winner is the trial with the best step."""
    scheduler: SchedulerName | None = None
    """asha: stop bad trials early. pbt: population based training, which continues bad trials from
    good ones. pb2: the same, with new values by a Gaussian process. none: none of them. Default:
    asha; with several --objectives, none."""
    search: SearchName | None = None
    """Search algorithm. Default: optuna; with --scheduler pbt or pb2, random."""
    seconds: float | None = None
    """Time limit in seconds from the start of the command. Running trials are stopped, others left
    out, and the winner is the best trial with a score. Default: none."""
    at_once: int | None = None
    """Maximum number of concurrent trials. Default: one per CPU, including nodes that join."""
    reward: RewardName = "estimated"
    """Source of the costs that reward episodes."""
    check_tasks: int = 32
    """Number of tasks of an evaluation, which gives the score of a trial."""
    storage: str = "runs/sweep"
    """Folder of the sweep: a path, which all nodes must share, or s3://..."""

    def check(self) -> None:
        """Raises UserError unless the options are valid."""
        counts = ("num_samples", "max_iterations", "check_every", "check_tasks", "at_once")
        check_bounds(
            self,
            at_least={**dict.fromkeys(counts, 1), "seed": 0},
            more_than={"seconds": 0},
            up_to={"seed": _MAX_SEED},
        )
        if self.is_population_based and self.search == "optuna":
            raise UserError(
                f"--scheduler {self.scheduler} changes hyperparameters while trials train, which "
                "--search optuna does not support: leave --search out"
            )
        if "step" not in self.metrics or len(self.metrics) != len(self.objectives.split(",")):
            raise UserError(
                f"--objectives {self.objectives}: name step, and memory, planning or both, such as "
                "step,memory"
            )
        if len(self.metrics) > 1 and self.scheduler_name != "none":
            raise UserError(
                f"--scheduler {self.scheduler} compares trials by one objective, --objectives "
                f"{self.objectives} has {len(self.metrics)}: leave --scheduler out"
            )
        check_file(self.json, "--json")
        self.training().check()

    @property
    def metrics(self) -> dict[str, str]:
        """Names of the objectives in results, by their names in --objectives; no unknown ones."""
        return {n: OBJECTIVES[n] for n in self.objectives.split(",") if n in OBJECTIVES}

    @property
    def scheduler_name(self) -> SchedulerName:
        """The scheduler: as requested, or the default."""
        return self.scheduler or ("none" if len(self.metrics) > 1 else "asha")

    @property
    def is_population_based(self) -> bool:
        """Whether trials become others while they train."""
        return self.scheduler in ("pbt", "pb2")

    @property
    def search_name(self) -> SearchName:
        """The search algorithm: as requested, or the scheduler's default."""
        return self.search or ("random" if self.is_population_based else "optuna")

    def training(self) -> PPOShardConfig:
        """Returns the configuration of each training, except for its hyperparameters."""
        own = ("storage", "resume", "force", "json")
        shared = {f.name: getattr(self, f.name) for f in fields(TrainingOptions)}
        max_devices = read_range(self.num_devices, "--num-devices", int)[1]
        return PPOShardConfig(
            **{name: value for name, value in shared.items() if name not in own},
            iterations=self.max_iterations,
            max_devices=max(PPOShardConfig.max_devices, max_devices),
        )


def read_sweep(storage: Storage) -> tuple[TuneShardConfig, str, dict[str, Any] | None]:
    """Returns a sweep's options, its run in MLflow, and its result once it is finished."""
    document = storage.read_json(SWEEP)
    if document is None:
        raise UserError(f"{storage.uri}: holds no sweep: name the --storage of tune_shard.py")
    with documents.naming(f"{storage.uri}/{SWEEP}"), documents.fields_of("sweep"):
        SWEEP_SCHEMA.check(document)
        config = TuneShardConfig.from_json(document["settings"])
        return config, str(document["mlflow_run"]), document.get("result")
