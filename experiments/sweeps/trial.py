"""A trial of a sweep: a training in its own Ray actor."""

import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray.tune import Trainable

from autoshard.experiments.sweeps.config import OBJECTIVES
from autoshard.experiments.sweeps.search_space import hyperparameters
from autoshard.experiments.training.config import TrainingSetup
from autoshard.experiments.training.loop import Training
from autoshard.experiments.training.run_folder import RunFolder, SavedRun

# Names in the results of trials, beside the objectives: seconds of all iterations, and seconds of
# this step, if it made an iteration.
SECONDS, STEP_SECONDS = "train_seconds", "seconds"


class PolicyTrial(Trainable):
    """A training whose steps are PPO iterations. All of its state is in one run folder.

    The score is that of the latest evaluation (`PolicyEvaluator.score`), although the policy of the
    best one is kept. All trials start from the same policy, whose score would often be the best of
    many.
    """

    def setup(self, config: dict[str, Any], setup: TrainingSetup) -> None:  # type: ignore[override]
        """Prepares the folder. Training starts in `step` or `load_checkpoint`."""
        self._setup, self._values = setup, config
        self._folder = RunFolder(Path(tempfile.mkdtemp(prefix="autoshard-trial-")) / "work")
        self._training: Training | None = None

    def step(self) -> dict[str, Any]:
        """Makes one iteration; before the first one, also evaluates the initial policy."""
        fresh = self._training is None
        training = self._training = self._training or self._start()
        started = time.monotonic()
        if fresh:
            training.begin()
        # A trial that was killed between its last checkpoint and Tune's record of it is done.
        figures: dict[str, float] = {}
        if not training.done:
            figures = training.step() | {STEP_SECONDS: time.monotonic() - started}
        progress = training.progress
        return {
            **figures,
            OBJECTIVES["step"]: progress.last_check,
            OBJECTIVES["memory"]: progress.last_memory_mb,
            OBJECTIVES["planning"]: progress.last_planning_ms,
            SECONDS: progress.seconds,
            "iteration": progress.iteration,
            "done": training.done,
        }

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Copies the run folder."""
        shutil.copytree(self._folder.folder, checkpoint_dir, dirs_exist_ok=True)

    def load_checkpoint(self, checkpoint_dir: Any) -> None:
        """Resumes from a run folder, perhaps another trial's, with this trial's hyperparameters."""
        self._stop()
        shutil.copytree(checkpoint_dir, self._folder.folder)
        self._training = self._start(self._folder.read())

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Becomes another trial, so that the process need not be started again."""
        self._stop()
        self._values = new_config
        return True

    def cleanup(self) -> None:
        """Ends the training and removes its folder."""
        self._stop()
        shutil.rmtree(self._folder.folder.parent, ignore_errors=True)

    def _start(self, saved: SavedRun | None = None) -> Training:
        if saved is None:
            self._folder.begin(force=True)
        setup, hyper = self._setup, hyperparameters(self._values)
        config = replace(setup.config, hyper=hyper, out=self._folder.folder)
        return Training(replace(setup, config=config), self._folder, saved, adapt=False)

    def _stop(self) -> None:
        if self._training is not None:
            self._training.stop()
            self._training = None
        shutil.rmtree(self._folder.folder, ignore_errors=True)
