"""Options that training one policy (ppo_shard.py) and many (tune_shard.py) share.

A run can be resumed, on another machine too: its options are stored with it, with absolute paths.
"""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

from autoshard.benchmark.backends import RequestedKind
from autoshard.experiments.tracking.runs import absolute_uri
from autoshard.experiments.tracking.storage import absolute
from autoshard.workload import UserError

RewardName = Literal["estimated", "mixed", "measured"]

_PATHS = ("out", "store", "json")
# Options by the names that run folders and MLflow know them by, which are those of 0.1.0.
_STORED_NAMES = {"num_envs": "games"}


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """What is trained on, and where it is kept: configurations inherit it."""

    tables: str = "synthetic:400:1"
    """A CSV, JSON, Parquet or dlrm_datasets file, criteo, mlperf:dlrm-v2, wide:N or synthetic:N."""
    num_tables: str = "60"
    """Tables of a task: a number, or a range such as 20-100."""
    num_devices: str = "4"
    """Devices of a task: a number, or a range such as 2-8."""
    memory_fill: str = "0.1-0.9"
    """Share of all devices' memory that the tables of a task take: loose to tight."""
    batch_size: int = 1024
    """Samples of a batch."""
    cost_model: str = "cpu"
    """Folder of a cost model, or the name of one that is shipped."""
    reward: RewardName = "mixed"
    """Where the costs of finished games come from; the cost model learns from measured ones."""
    devices: RequestedKind = "auto"
    """What measures: auto takes GPUs where the cluster has any; cuda waits for GPUs to join."""
    measured_share: float = 0.03
    """Share of the games that are measured, with --reward mixed."""
    num_envs: int = 128
    """Number of episodes that run side by side; an iteration is about one episode of each."""
    check_every: int = 5
    """Iterations between checks on tables that are not trained on, and between updates of the cost
    model. A sweep compares and stops its trials by these checks."""
    check_tasks: int = 16
    """Tasks in a check."""
    seed: int = 0
    """Seed of everything random."""
    resume: bool = False
    """Resume the run with the options that it was begun with. --iterations and --num-env-runners
    may differ, and files may lie elsewhere."""
    force: bool = False
    """Replace the run that is there."""
    store: Path | None = None
    """SQLite file of measurements on this machine; by default costs.db in the run's folder, or in
    runs/ where a sweep's folder is in an object store."""
    storage: str | None = None
    """A shared path or object store (s3://...) that keeps the run and its measurements as well."""
    json: Path | None = None
    """Write the result to this file."""
    mlflow_uri: str | None = None
    """Where to log; by default MLFLOW_TRACKING_URI, else sqlite:///mlflow.db."""

    def check_resume(self) -> None:
        """Raises UserError if a run is both to be resumed and to be replaced."""
        if self.resume and self.force:
            raise UserError("--resume goes on, --force begins anew: give one of them")

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
        """Returns these options of a stored run, with what the resuming command changes.

        Args:
            given: Options of the resuming command.
            may_change: Names of options that it may change; one with its default value does not.
        """
        default = type(given)()
        changed: dict[str, Any] = {
            name: getattr(given, name)
            for name in may_change
            if getattr(given, name) != getattr(default, name)
        }
        return replace(self, **changed).with_absolute_paths()

    def to_json(self) -> dict[str, Any]:
        """Returns the options as they are stored; `from_json` reads them."""
        return {
            _STORED_NAMES.get(name, name): str(value) if isinstance(value, Path) else value
            for name, value in asdict(self).items()
        }

    @classmethod
    def from_json(cls, settings: Mapping[str, Any]) -> Self:
        """Returns the options that `to_json` stored."""
        paths = {n: Path(v) for n, v in settings.items() if n in _PATHS and v is not None}
        named = {name: settings[stored] for name, stored in _STORED_NAMES.items()}
        others = {n: v for n, v in settings.items() if n not in _STORED_NAMES.values()}
        return cls(**{**others, **paths, **named})
