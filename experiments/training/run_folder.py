"""The folder of a training run, from which it can be resumed after any kind of end."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoshard.cost_model import CostModel, load_model, save_model
from autoshard.experiments.tracking.storage import Storage
from autoshard.sharders.policy.files import COST_MODEL
from autoshard.workload import UserError, documents

RUN_SCHEMA = documents.Schema("autoshard.training", 3)
_DOCUMENT, _CHECKPOINT, _ALGORITHM = "training.json", "checkpoint-", "algorithm"
_PARTIAL = ".partial-"


def policy_files(folder: Path) -> list[Path]:
    """Returns a policy's files and the folder of its cost model."""
    return [folder / name for name in ("policy.json", "policy.safetensors", COST_MODEL)]


@dataclass(frozen=True)
class Progress:
    """The progress of a run."""

    iteration: int  # number of iterations
    mlflow_run: str  # run in MLflow
    best_check: float  # score of the kept policy
    seconds: float  # time of all iterations
    last_check: float  # score of the latest evaluation
    last_memory_mb: float = 0.0  # its memory_mb
    last_planning_ms: float = 0.0  # its planning_ms


@dataclass(frozen=True)
class SavedRun:
    """The state from which a run is resumed."""

    config: dict[str, Any]  # its configuration, as JSON
    progress: Progress  # its progress
    checkpoint: Path  # RLlib's checkpoint
    model: CostModel  # cost model at that time


class RunFolder:
    """A folder with the policy, its cost model, and `training.json`, which names the checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def exists(self) -> bool:
        """Whether the folder has a run."""
        return (self.folder / _DOCUMENT).exists()

    def begin(self, force: bool) -> None:
        """Begins a run; UserError if the folder is not empty.

        Runs are replaced with `force`, or if they ended before their first checkpoint.
        """
        if self.folder.is_file():
            raise UserError(f"{self.folder}: is a file: name a folder for --out")
        if self.exists and not force and self._document().get("checkpoint"):
            raise UserError(
                f"{self.folder}: holds a training run: continue with --resume, replace it with "
                "--force, or name another folder"
            )
        if not self.exists and self.folder.exists() and any(self.folder.iterdir()):
            raise UserError(f"{self.folder}: is a folder of other things: name another one")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            documents.write(self.folder / _DOCUMENT, RUN_SCHEMA.stamp({"checkpoint": None}))
            self._remove_checkpoints(keep=None)
        except OSError as error:
            raise UserError(f"{self.folder}: cannot be written: {error.strerror}") from error

    def save(
        self,
        config: dict[str, Any],
        progress: Progress,
        save_algorithm: Callable[[Path], Any],
        model: CostModel,
    ) -> None:
        """Writes a checkpoint, then `training.json`, which names it, and removes older ones."""
        name = f"{_CHECKPOINT}{progress.iteration}"
        if self._document().get("checkpoint") == name:  # the run was resumed from it
            return
        partial = self.folder / f"{_PARTIAL}{name}"
        # A process that was killed may have left either behind.
        for leftover in (partial, self.folder / name):
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir()
        save_algorithm(partial / _ALGORITHM)
        save_model(model, partial / COST_MODEL)
        partial.rename(self.folder / name)
        body = {"config": config, "progress": vars(progress), "checkpoint": name}
        documents.write(self.folder / _DOCUMENT, RUN_SCHEMA.stamp(body))
        self._remove_checkpoints(keep=name)

    def read(self) -> SavedRun:
        """Returns the state of the run; UserError without a complete checkpoint."""
        if not self.exists:
            raise UserError(f"{self.folder}: holds no training run to resume")
        document = self._document()
        if not document.get("checkpoint"):
            raise UserError(
                f"{self.folder}: the run ended before its first checkpoint: begin a new one"
            )
        with documents.naming(self.folder / _DOCUMENT), documents.fields_of("training"):
            where = self.folder / document["checkpoint"]
            progress = Progress(**document["progress"])
            config = dict(document["config"])
        if not (where / _ALGORITHM).is_dir():
            raise UserError(f"{where}: the checkpoint is missing: begin a new run with --force")
        return SavedRun(config, progress, where / _ALGORITHM, load_model(where / COST_MODEL))

    def mirror(self, storage: Storage) -> None:
        """Copies the folder to a storage, except for stores, which are kept as Parquet."""
        storage.keep_folder(self.folder, last=_DOCUMENT, without="*.db*")

    def fetch(self, storage: Storage) -> None:
        """Copies the run from a storage if it is missing here, or continued elsewhere."""
        there = storage.read_json(_DOCUMENT)
        if there is not None and (not self.exists or _reached(there) > _reached(self._document())):
            storage.fetch_folder(self.folder, last=_DOCUMENT)

    @staticmethod
    def check_free(storage: Storage) -> None:
        """Raises UserError if the storage has a run."""
        if storage.has(_DOCUMENT):
            raise UserError(
                f"{storage.uri}: holds a training run: continue with --resume, replace it with "
                "--force, or name another --out"
            )

    def checkpoint(self) -> Path:
        """Returns the folder of the last complete checkpoint."""
        return self.folder / str(self._document()["checkpoint"])

    def _document(self) -> dict[str, Any]:
        with documents.naming(self.folder / _DOCUMENT):
            document: dict[str, Any] = documents.read(self.folder / _DOCUMENT)
            RUN_SCHEMA.check(document)
        return document

    def _remove_checkpoints(self, keep: str | None) -> None:
        for pattern in (f"{_CHECKPOINT}*", f"{_PARTIAL}*"):
            for path in self.folder.glob(pattern):
                if path.name != keep:
                    shutil.rmtree(path, ignore_errors=True)


def _reached(document: Any) -> int:
    """Returns the last iteration of a run; -1 without any."""
    with documents.fields_of("training"):
        return int((document.get("progress") or {}).get("iteration", -1))
