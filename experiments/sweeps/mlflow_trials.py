"""Logging of a sweep's trials to MLflow, and scheduler state that Tune itself does not keep."""

import pickle
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray.tune.experiment import Trial
from ray.tune.logger import LoggerCallback
from ray.tune.schedulers import AsyncHyperBandScheduler, PopulationBasedTraining, TrialScheduler

from autoshard.benchmark.pool.devices import first_line
from autoshard.experiments.console import cli
from autoshard.experiments.sweeps.config import SCORE
from autoshard.experiments.sweeps.trial import STEP_SECONDS
from autoshard.experiments.tracking.runs import TrackedRun
from autoshard.experiments.training.report import curves
from autoshard.experiments.training.run_folder import RunFolder, policy_files
from autoshard.workload import UserError

_OFTEN_SECONDS = 60.0


class MLflowTrials(LoggerCallback):
    """Logs each trial to a run under the sweep's: hyperparameters, curves, policy, checkpoint.

    Ray's MLflowLoggerCallback is not used: it begins a new run for a resumed trial, fails where
    population based training changes a parameter, and logs metrics one by one.

    Args:
        run: Run of the sweep.
        scheduler: Scheduler whose state is kept with Tune's, which has only that of the search.
        resumed: Whether the sweep is resumed from Tune's state.
        often: Function that is called every minute.
    """

    def __init__(
        self,
        run: TrackedRun,
        scheduler: TrialScheduler,
        resumed: bool = False,
        often: Callable[[], None] = lambda: None,
    ) -> None:
        self._run, self._scheduler, self._resumed, self._often = run, scheduler, resumed, often
        self._restored, self._latest = False, time.monotonic()
        self._trials: dict[str, TrackedRun] = {}
        self._open: dict[str, TrackedRun] = {}
        self.train_seconds = 0.0  # seconds of all trials, in this process
        self.at_once = 0  # maximum number of concurrent trials
        self.trials: list[Trial] = []  # all trials, when the sweep has ended

    def __reduce__(self) -> tuple[Any, ...]:
        """Returns what `Tuner.restore` makes the callback of: without calls every minute."""
        return MLflowTrials, (self._run, self._scheduler)

    def run_of(self, trial: Trial) -> TrackedRun:
        """Returns the trial's run in MLflow, which stays the same after a resume."""
        if trial.trial_id not in self._trials:
            self._trials[trial.trial_id] = self._run.child("trial", trial.trial_id, trial.config)
        return self._trials[trial.trial_id]

    def setup(self, *_args: Any, **_info: Any) -> None:
        """Raises UserError if Tune could not resume and would begin anew. Called before trials."""
        if self._resumed and not self._restored:
            raise UserError("Tune's state in --storage cannot be read: begin anew with --force")

    def on_step_end(self, iteration: int, trials: list[Trial], **_info: Any) -> None:  # noqa: ARG002
        """Counts concurrent trials. Called many times per second."""
        self.at_once = max(self.at_once, sum(t.status == Trial.RUNNING for t in trials))
        if time.monotonic() - self._latest > _OFTEN_SECONDS:
            self._latest = time.monotonic()
            self._often()

    def on_experiment_end(self, trials: list[Trial], **_info: Any) -> None:
        """Keeps the trials. Called also after Ctrl-C."""
        self.trials = trials

    def log_trial_start(self, trial: Trial) -> None:
        """Marks the trial's run as running. Called when it starts or restarts."""
        self._open[trial.trial_id] = self.run_of(trial)
        self.run_of(trial).go_on()

    def log_trial_result(self, iteration: int, trial: Trial, result: dict[str, Any]) -> None:  # noqa: ARG002
        """Logs an iteration of a trial."""
        if STEP_SECONDS not in result:  # it was done already
            return
        self.train_seconds += result[STEP_SECONDS]
        figures = curves(result) | {SCORE: result[SCORE]}
        if isinstance(self._scheduler, PopulationBasedTraining):  # it changes them meanwhile
            figures |= {f"hyper/{name}": value for name, value in trial.config.items()}
        self.run_of(trial).metrics(figures, step=int(result["iteration"]))

    def log_trial_end(self, trial: Trial, failed: bool = False) -> None:
        """Logs the policy and ends the run. Called when a trial is done, stopped or given up."""
        run = self.run_of(trial)
        self._open.pop(trial.trial_id, None)
        try:
            if failed:
                run.note(f"Given up: {_reason(trial)}")
            elif trial.checkpoint is not None:
                with tempfile.TemporaryDirectory() as place:
                    folder = RunFolder(Path(place))
                    trial.checkpoint.to_directory(place)
                    run.model(policy_files(folder.folder), "policy")
                    run.artifact(folder.checkpoint(), "checkpoint")
            run.end("FAILED" if failed else "FINISHED")
        except Exception as error:  # Tune would blame the trial, and train it again
            cli.note(f"trial {trial.trial_id}: {first_line(error)}")

    def on_trial_recover(self, trial: Trial, **_info: Any) -> None:  # type: ignore[override]
        """Reports a crash. Called when the trial is tried again."""
        cli.note(f"trial {trial.trial_id} crashed and continues from its checkpoint: "
            f"{_reason(trial)}")  # fmt: skip

    def close(self) -> None:
        """Ends the runs of trials that were interrupted."""
        for run in self._open.values():
            run.end("KILLED")
        self._open.clear()

    def get_state(self) -> dict[str, Any]:
        """Returns the state of ASHA; population based training needs none."""
        if not isinstance(self._scheduler, AsyncHyperBandScheduler):
            return {"scheduler": None}
        with tempfile.NamedTemporaryFile() as file:
            self._scheduler.save(file.name)
            return {"scheduler": Path(file.name).read_bytes()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned. Called on resume."""
        self._restored = True
        if isinstance(self._scheduler, AsyncHyperBandScheduler):
            self._scheduler.__dict__.update(pickle.loads(state["scheduler"]))


def _reason(trial: Trial) -> str:
    error = trial.get_error()
    return "no reason is known" if error is None else first_line(error)
