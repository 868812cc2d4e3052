"""The folder of a training run: whatever happens to the process, it can be gone on with."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cost_model import CostModel, load_model, save_model
from workload import UserError, documents

RUN_SCHEMA = documents.Schema("autoshard.training", 1)
COST_MODEL = "cost_model"  # the folder of the cost model that a policy goes with
_DOCUMENT, _CHECKPOINT, _ALGORITHM = "training.json", "checkpoint-", "algorithm"


@dataclass(frozen=True)
class Progress:
    """How far a run has come: what `--resume` needs besides the checkpoint."""

    iteration: int
    mlflow_run: str
    best_check: float
    seconds: float


class RunFolder:
    """Holds `training.json`, which names the last whole checkpoint, and what training puts out."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def exists(self) -> bool:
        """True if a run has begun here."""
        return (self.folder / _DOCUMENT).exists()

    def begin(self, force: bool) -> None:
        """Make the folder; UserError if it holds something that `force` does not replace."""
        if self.folder.is_file():
            raise UserError(f"{self.folder}: is a file: name a folder for --out")
        if self.exists and not force:
            raise UserError(
                f"{self.folder}: holds a training run: go on with --resume, replace it with "
                "--force, or name another folder"
            )
        if not self.exists and self.folder.exists() and any(self.folder.iterdir()):
            raise UserError(f"{self.folder}: is a folder of other things: name another one")
        try:
            if self.exists:
                (self.folder / _DOCUMENT).unlink()
                self._remove_checkpoints(keep=None)
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{self.folder}: cannot be written: {error.strerror}") from error

    def save(
        self,
        config: dict[str, Any],
        progress: Progress,
        save_algorithm: Callable[[Path], Any],
        model: CostModel,
    ) -> None:
        """Write a checkpoint, then let `training.json` name it, then remove the older ones."""
        name = f"{_CHECKPOINT}{progress.iteration}"
        where = self.folder / name
        shutil.rmtree(where, ignore_errors=True)
        where.mkdir()
        save_algorithm(where / _ALGORITHM)
        save_model(model, where / COST_MODEL)
        body = {"config": config, "progress": vars(progress), "checkpoint": name}
        documents.write(self.folder / _DOCUMENT, RUN_SCHEMA.stamp(body))
        self._remove_checkpoints(keep=name)

    def read(self) -> tuple[dict[str, Any], Progress, Path, CostModel]:
        """The configuration, the progress, the algorithm's checkpoint and the cost model."""
        if not self.exists:
            raise UserError(f"{self.folder}: holds no training run to go on with")
        with documents.naming(self.folder / _DOCUMENT):
            document = documents.read(self.folder / _DOCUMENT)
            RUN_SCHEMA.check(document)
            with documents.fields_of("training"):
                where = self.folder / document["checkpoint"]
                progress = Progress(**document["progress"])
                config = dict(document["config"])
        if not (where / _ALGORITHM).is_dir():
            raise UserError(f"{where}: the checkpoint is missing: start anew with --force")
        return config, progress, where / _ALGORITHM, load_model(where / COST_MODEL)

    def _remove_checkpoints(self, keep: str | None) -> None:
        for path in self.folder.glob(f"{_CHECKPOINT}*"):
            if path.name != keep:
                shutil.rmtree(path, ignore_errors=True)
