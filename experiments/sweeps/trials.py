"""What one trial of a sweep does, in a Ray actor of its own: train a policy, or a cost model."""

import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ray.tune import Trainable

from autoshard.cost_model import CostDataset, CostModel, Provenance, save_model
from autoshard.cost_model.compute_training import train_compute
from autoshard.cost_model.training import TrainOptions
from autoshard.experiments.sweeps.search_space import at_point
from autoshard.experiments.training.config import PPOShardConfig
from autoshard.experiments.training.hyperparameters import Hyperparameters
from autoshard.experiments.training.run_folder import COST_MODEL, RunFolder
from autoshard.experiments.training.training import Training
from autoshard.workload import EmbeddingTable
from autoshard.workload.parts import Part

SCORE = "score"  # what sweeps make small
SECONDS = "train_seconds"  # of a trial's iterations so far
STEP_SECONDS = "seconds"  # of this step, if it did anything: without a sweep it takes as long
CURVES = "curves"  # of a trial that trains in one go: steps, and figures at each
_WORK = "work"


@dataclass(frozen=True)
class PolicyTask:
    """What all trials of a policy sweep share.

    Args:
        config: settings of each training, but for the hyperparameters.
        parts: tables by part.
        model: the cost model that all are judged by, so that scores can be compared.
        store: of measurements, on the machine of the pool.
    """

    config: PPOShardConfig
    parts: Mapping[Part, list[EmbeddingTable]]
    model: CostModel
    store: Path


class PolicyTrial(Trainable):
    """Trains a policy; an iteration of Tune is one of PPO. Everything is in one run folder.

    The score is the mean of the slowest device's cost over the best heuristic's, on held-out
    tasks; tasks without a plan count one each. It is that of the policy as it was at the latest
    look, not of the best one so far, which is what is kept: all trials start from the same policy,
    so the best of many would often be that one.
    """

    def setup(self, config: dict[str, Any], task: PolicyTask) -> None:  # type: ignore[override]
        """Called by Tune. Training starts when it is known from where."""
        self._task = task
        self._values = config
        self._folder = Path(tempfile.mkdtemp(prefix="autoshard-trial-")) / _WORK
        self._training: Training | None = None

    def step(self) -> dict[str, Any]:
        """One iteration; the first also puts out the policy that training starts from."""
        fresh = self._training is None
        training = self._training = self._training or self._start(begun=0)
        started = time.monotonic()
        if fresh:
            training.begin()
        # Killed between its last checkpoint and Tune's note of it, a trial has nothing left to do.
        figures: dict[str, float] = {}
        if not training.done:
            figures = training.step() | {STEP_SECONDS: time.monotonic() - started}
        progress = training.progress
        return {
            **figures,
            SCORE: progress.last_check,
            SECONDS: progress.seconds,
            "iteration": progress.iteration,
            "done": training.done,
        }

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """The run folder: policy, cost model, RLlib's checkpoint."""
        shutil.copytree(self._folder, checkpoint_dir, dirs_exist_ok=True)

    def load_checkpoint(self, checkpoint_dir: Any) -> None:
        """Go on from one, maybe another trial's, with this trial's hyperparameters."""
        self._stop()
        shutil.copytree(checkpoint_dir, self._folder)
        _, progress, checkpoint, model = RunFolder(self._folder).read()
        self._training = self._start(begun=progress.iteration)
        self._training.take_up(progress, checkpoint, model)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Become another trial: its process has loaded all that is slow to load."""
        self._stop()
        self._values = new_config
        return True

    def cleanup(self) -> None:
        """Called by Tune at the end."""
        self._stop()
        shutil.rmtree(self._folder.parent, ignore_errors=True)

    def _start(self, begun: int) -> Training:
        config = replace(
            self._task.config, hyper=at_point(Hyperparameters(), self._values), out=self._folder
        )
        folder = RunFolder(self._folder)
        if not begun:
            folder.begin(force=True)
        task = self._task
        return Training(
            config, folder, task.parts, task.model, task.store, begun=begun, adapt=False
        )

    def _stop(self) -> None:
        if self._training is not None:
            self._training.stop()
            self._training = None
        shutil.rmtree(self._folder, ignore_errors=True)


@dataclass(frozen=True)
class CostModelTask:
    """What all trials of a cost-model sweep share: the data by part, and a seed."""

    parts: Mapping[Part, CostDataset]
    seed: int


class CostModelTrial(Trainable):
    """Trains a cost model, in one step. The score is its mean error on the validation tables."""

    def setup(self, config: dict[str, Any], task: CostModelTask) -> None:  # type: ignore[override]
        """Called by Tune."""
        self._task, self._values = task, config
        self._model: CostModel | None = None

    def step(self) -> dict[str, Any]:
        """All of the training."""
        options = at_point(TrainOptions(), self._values)
        parts, seed = self._task.parts, self._task.seed
        compute, curves = train_compute(parts["train"], parts["validation"], options, seed)
        self._model = CostModel(compute, Provenance.of(parts["train"]))
        return {
            SCORE: min(curves.errors),
            SECONDS: curves.seconds,
            STEP_SECONDS: curves.seconds,
            "iteration": 1,
            CURVES: {
                "steps": list(curves.steps),
                "training_loss": list(curves.losses),
                "validation_error": list(curves.errors),
            },
            "done": True,
        }

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """The model."""
        assert self._model is not None
        save_model(self._model, Path(checkpoint_dir) / COST_MODEL)

    def load_checkpoint(self, checkpoint_dir: Any) -> None:
        """A trial that has a checkpoint is done."""

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Become another trial."""
        self._values, self._model = new_config, None
        return True
