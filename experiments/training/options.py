"""Options shared by training one policy (ppo_shard.py) and many (tune_shard.py).

They are stored with the run, with absolute paths, so that it can be resumed on another machine.
"""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

from autoshard.benchmark.backends import RequestedKind
from autoshard.experiments.console.mlflow_uris import absolute_uri
from autoshard.experiments.tracking.storage import absolute
from autoshard.workload import UserError

RewardName = Literal["estimated", "mixed", "measured"]

_PATHS = ("out", "store", "json")


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Tasks, rewards and files of a training; configurations inherit it."""

    tables: str = "synthetic:400:1"
    """A CSV, JSON, Parquet or dlrm_datasets file, criteo, mlperf:dlrm-v2, wide:N or synthetic:N."""
    num_tables: str = "60"
    """Tables of a task: a number, or a range such as 20-100."""
    num_devices: str = "4"
    """Devices of a task: a number, or a range such as 2-8."""
    memory_fill: str = "0.1-0.9"
    """Share of all devices' memory that the tables of a task take: a number, or a range from loose
    to tight."""
    batch_size: int = 1024
    """Samples of a batch."""
    cost_model: str = "cpu"
    """Folder of a cost model, or the name of a shipped one."""
    reward: RewardName = "mixed"
    """Source of the costs that reward episodes. The cost model learns from measured ones."""
    devices: RequestedKind = "auto"
    """Kind of measuring devices. auto: GPUs if the cluster has any; cuda waits for GPUs to join."""
    measured_share: float = 0.03
    """Share of the episodes that are measured. Requires --reward mixed."""
    num_envs: int = 128
    """Number of parallel environments; an iteration is about one episode of each."""
    check_every: int = 5
    """Number of iterations between evaluations on tables that are not trained on, and between
    updates of the cost model. A sweep compares and stops its trials by these evaluations."""
    check_tasks: int = 16
    """Number of tasks of an evaluation."""
    seed: int = 0
    """Seed of all random numbers."""
    resume: bool = False
    """Continue the run in the folder with its own options. --iterations, --num-env-runners,
    --seconds, --test-seconds and paths of files may differ."""
    force: bool = False
    """Replace the run in the folder."""
    store: Path | None = None
    """SQLite file of measurements on this machine. Default: costs.db in the run's folder, or in
    runs/ if a sweep's folder is in an object store."""
    storage: str | None = None
    """Shared path or object store (s3://...) that keeps a copy of the run and its measurements."""
    json: Path | None = None
    """File for the result."""
    mlflow_uri: str | None = None
    """MLflow tracking URI. Default: MLFLOW_TRACKING_URI, else sqlite:///mlflow.db."""

    def check_resume(self) -> None:
        """Raises UserError if a run is to be both resumed and replaced."""
        if self.resume and self.force:
            raise UserError("--resume continues a run, --force replaces it: give one of them")

    def with_absolute_paths(self) -> Self:
        """Returns the options independent of the current folder."""
        found: dict[str, Any] = {
            name: str(Path(value).resolve())
            for name, value in (("tables", self.tables), ("cost_model", self.cost_model))
            if Path(value).exists()
        }
        return replace(
            self,
            store=None if self.store is None else self.store.resolve(),
            storage=None if self.storage is None else absolute(self.storage),
            mlflow_uri=absolute_uri(self.mlflow_uri),
            **found,
        )

    def resumed(self, given: Self, may_change: Collection[str]) -> Self:
        """Returns these options of a stored run, changed by the command that resumes it.

        Args:
            given: Options of that command.
            may_change: Names of the options that it changes, unless they have their default value.
        """
        default = type(given)()
        changed: dict[str, Any] = {
            name: getattr(given, name)
            for name in may_change
            if getattr(given, name) != getattr(default, name)
        }
        return replace(self, **changed).with_absolute_paths()

    def to_json(self) -> dict[str, Any]:
        """Returns the options as they are stored."""
        return {
            name: str(value) if isinstance(value, Path) else value
            for name, value in asdict(self).items()
        }

    @classmethod
    def from_json(cls, settings: Mapping[str, Any]) -> Self:
        """Returns the options that `to_json` stored."""
        paths = {n: Path(v) for n, v in settings.items() if n in _PATHS and v is not None}
        return cls(**{**settings, **paths})
