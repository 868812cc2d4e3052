"""The folder of a training run: whatever ends the process, the run can be resumed from it."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoshard.cost_model import CostModel, load_model, save_model
from autoshard.experiments.tracking.storage import Storage
from autoshard.sharders.policy_files import COST_MODEL
from autoshard.workload import UserError, documents

RUN_SCHEMA = documents.Schema("autoshard.training", 2)
_DOCUMENT, _CHECKPOINT, _ALGORITHM = "training.json", "checkpoint-", "algorithm"
_PARTIAL = ".partial-"


def policy_files(folder: Path) -> list[Path]:
    """Returns what a user of a run's policy needs: its files, and the folder of its cost model."""
    return [folder / name for name in ("policy.json", "policy.safetensors", COST_MODEL)]


@dataclass(frozen=True)
class Progress:
    """How far a run has come.

    Args:
        iteration: Iterations made.
        mlflow_run: Its run in MLflow.
        best_check: Score of the policy that is kept.
        seconds: Spent in iterations.
        last_check: Score of the latest policy that was checked.
    """

    iteration: int
    mlflow_run: str
    best_check: float
    seconds: float
    last_check: float


@dataclass(frozen=True)
class SavedRun:
    """What a run is resumed from.

    Args:
        config: Its configuration, as JSON.
        progress: How far it has come.
        checkpoint: RLlib's checkpoint.
        model: The cost model as it was then.
    """

    config: dict[str, Any]
    progress: Progress
    checkpoint: Path
    model: CostModel


class RunFolder:
    """Holds the policy, its cost model, and `training.json`, which names the last checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def exists(self) -> bool:
        """True if a run has begun here."""
        return (self.folder / _DOCUMENT).exists()

    def begin(self, force: bool) -> None:
        """Begins a run; raises UserError if the folder holds what `force` does not replace.

        A run that ended before its first checkpoint is always replaced.
        """
        if self.folder.is_file():
            raise UserError(f"{self.folder}: is a file: name a folder for --out")
        if self.exists and not force and self._document().get("checkpoint"):
            raise UserError(
                f"{self.folder}: holds a training run: go on with --resume, replace it with "
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
        """Writes a checkpoint, then lets `training.json` name it, then removes the older ones."""
        name = f"{_CHECKPOINT}{progress.iteration}"
        if self._document().get("checkpoint") == name:  # resumed from there: it is the same
            return
        partial = self.folder / f"{_PARTIAL}{name}"
        for leftover in (partial, self.folder / name):  # of a process killed before it was named
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir()
        save_algorithm(partial / _ALGORITHM)
        save_model(model, partial / COST_MODEL)
        partial.rename(self.folder / name)
        body = {"config": config, "progress": vars(progress), "checkpoint": name}
        documents.write(self.folder / _DOCUMENT, RUN_SCHEMA.stamp(body))
        self._remove_checkpoints(keep=name)

    def read(self) -> SavedRun:
        """Returns what the run is resumed from; raises UserError if it has no whole checkpoint."""
        if not self.exists:
            raise UserError(f"{self.folder}: holds no training run to go on with")
        document = self._document()
        if not document.get("checkpoint"):
            raise UserError(
                f"{self.folder}: the run there ended before its first checkpoint: start anew"
            )
        with documents.naming(self.folder / _DOCUMENT), documents.fields_of("training"):
            where = self.folder / document["checkpoint"]
            progress = Progress(**document["progress"])
            config = dict(document["config"])
        if not (where / _ALGORITHM).is_dir():
            raise UserError(f"{where}: the checkpoint is missing: start anew with --force")
        return SavedRun(config, progress, where / _ALGORITHM, load_model(where / COST_MODEL))

    def mirror(self, storage: Storage) -> None:
        """Makes a storage hold what the folder holds, but for stores, which are kept as Parquet."""
        storage.keep_folder(self.folder, last=_DOCUMENT, without="*.db*")

    def fetch(self, storage: Storage) -> None:
        """Copies the run here if it is not here, or was resumed elsewhere since."""
        there = storage.read_json(_DOCUMENT)
        if there is not None and (not self.exists or _reached(there) > _reached(self._document())):
            storage.fetch_folder(self.folder, last=_DOCUMENT)

    @staticmethod
    def check_free(storage: Storage) -> None:
        """Raises UserError if the storage has a run, which another would replace."""
        if storage.has(_DOCUMENT):
            raise UserError(
                f"{storage.uri}: holds a training run: go on with --resume, replace it with "
                "--force, or name another --out"
            )

    def checkpoint(self) -> Path:
        """Returns the folder of the last whole checkpoint."""
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
    """Returns the iteration that a run had come to."""
    with documents.fields_of("training"):
        return int((document.get("progress") or {}).get("iteration", -1))
