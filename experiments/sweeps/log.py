"""What MLflow and people hear of a sweep while it runs; and what Tune forgets when it is resumed.

Ray's own MLflowLoggerCallback begins a new run for a trial that goes on after an interruption and
knows neither curves by our steps nor policies, so the trials' runs are written here, by the same
module as all others.
"""

# ruff: noqa: ARG002 - Tune tells more than is asked

import pickle
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray.tune import Callback, Checkpoint
from ray.tune.experiment import Trial
from ray.tune.schedulers import (
    AsyncHyperBandScheduler,
    PopulationBasedTraining,
    TrialScheduler,
)

from autoshard.benchmark.devices import first_line
from autoshard.experiments.console import cli
from autoshard.experiments.sweeps.trials import CURVES, SCORE, SECONDS, STEP_SECONDS
from autoshard.experiments.tracking.runs import TrackedRun
from autoshard.experiments.training.report import curves
from autoshard.experiments.training.run_folder import COST_MODEL, RunFolder, model_files
from autoshard.workload import UserError

_OFTEN_SECONDS = 60.0


class SweepLog(Callback):
    """Each trial is a run under the sweep's, with parameters, curves and its checkpoint.

    Args:
        run: of the sweep.
        total: trials that the sweep is to have.
        scheduler: whose decisions are kept with Tune's state, for Tune itself keeps only what the
            search has learned.
        resumed: the sweep is to go on from Tune's state.
        often: called every minute.
    """

    def __init__(
        self,
        run: TrackedRun,
        total: int,
        scheduler: TrialScheduler,
        resumed: bool = False,
        often: Callable[[], None] | None = None,
    ) -> None:
        self._run, self._total, self._scheduler = run, total, scheduler
        self._resumed, self._often = resumed, often or (lambda: None)
        self._restored, self._latest = False, time.monotonic()
        self._open: dict[str, TrackedRun] = {}
        self._trials: dict[str, TrackedRun] = {}
        self._began = time.monotonic()
        self.train_seconds = 0.0  # of all trials, since this process began
        self.at_once = 0  # trials that ran at the same time, at most

    def run_of(self, trial: Trial) -> TrackedRun:
        """The trial's run in MLflow; after a resume the one that it had."""
        if trial.trial_id not in self._trials:
            self._trials[trial.trial_id] = self._run.child("trial", trial.trial_id, trial.config)
        return self._trials[trial.trial_id]

    def setup(self, **_info: Any) -> None:  # type: ignore[override]
        """Called by Tune before the first trial. What it cannot go on with it would begin anew."""
        if self._resumed and not self._restored:
            raise UserError("Tune's state in --storage cannot be read: begin anew with --force")

    def on_step_end(self, iteration: int, trials: list[Trial], **_info: Any) -> None:
        """Called by Tune many times a second."""
        if time.monotonic() - self._latest > _OFTEN_SECONDS:
            self._latest = time.monotonic()
            self._often()

    def close(self) -> None:
        """Trials that were cut short have come to an end, too."""
        for run in self._open.values():
            run.end("KILLED")
        self._open.clear()

    def on_trial_start(
        self, iteration: int, trials: list[Trial], trial: Trial, **_info: Any
    ) -> None:
        """Called by Tune."""
        self._open[trial.trial_id] = run = self.run_of(trial)
        run.go_on()
        running = {t.trial_id for t in trials if t.status == Trial.RUNNING} | {trial.trial_id}
        self.at_once = max(self.at_once, len(running))

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **_: Any
    ) -> None:
        """Called by Tune after each iteration of a trial."""
        if STEP_SECONDS not in result:  # it had nothing left to do
            return
        self.train_seconds += result[STEP_SECONDS]
        figures = curves({name: value for name, value in result.items() if name in _told(result)})
        figures[SCORE] = result[SCORE]
        if isinstance(self._scheduler, PopulationBasedTraining):  # which changes them on the way
            figures |= {f"hyper/{name}": value for name, value in trial.config.items()}
        run = self.run_of(trial)
        run.metrics(figures, step=int(result["iteration"]))
        told = dict(result.get(CURVES, {}))
        steps = told.pop("steps", [])
        for name, values in told.items():
            run.curve(name, steps, values)

    def on_trial_complete(
        self, iteration: int, trials: list[Trial], trial: Trial, **_info: Any
    ) -> None:
        """Called by Tune when a trial is done or stopped, its last checkpoint written."""
        run = self.run_of(trial)
        try:
            if trial.checkpoint is not None:
                with tempfile.TemporaryDirectory() as place:
                    log_checkpoint(run, trial.checkpoint, Path(place))
            run.end()
        except Exception as error:  # which Tune would take for the trial's own, and train it again
            cli.console.print(f"note: trial {trial.trial_id}: {first_line(error)}", markup=False)
        self._open.pop(trial.trial_id, None)
        last, done = trial.last_result, sum(t.status in ("TERMINATED", "ERROR") for t in trials) + 1
        scores = [t.last_result[SCORE] for t in trials if SCORE in (t.last_result or {})]
        cli.console.print(
            f"  {done:3} of {self._total} trials  {trial.trial_id}  score {last[SCORE]:.4f} after "
            f"{last['iteration']} iterations  best {min(scores):.4f}  "
            f"{time.monotonic() - self._began:.0f} s",
            soft_wrap=True,
        )

    def on_trial_recover(
        self, iteration: int, trials: list[Trial], trial: Trial, **_info: Any
    ) -> None:
        """Called by Tune when a trial has crashed and is tried again."""
        cli.console.print(
            f"note: trial {trial.trial_id} crashed and goes on from its checkpoint: "
            f"{_reason(trial)}", markup=False, soft_wrap=True,
        )  # fmt: skip

    def on_trial_error(
        self, iteration: int, trials: list[Trial], trial: Trial, **_info: Any
    ) -> None:
        """Called by Tune when a trial is given up."""
        run = self.run_of(trial)
        self._open.pop(trial.trial_id, None)
        run.note(f"Given up: {_reason(trial)}")
        run.end("FAILED")
        cli.console.print(
            f"note: trial {trial.trial_id} crashed too often and is given up: "
            f"{_reason(trial)}", markup=False, soft_wrap=True,
        )  # fmt: skip

    def get_state(self) -> dict[str, Any]:
        """What the scheduler has decided so far; population based training needs no memory."""
        if not isinstance(self._scheduler, AsyncHyperBandScheduler):
            return {"scheduler": None}
        with tempfile.NamedTemporaryFile() as file:
            self._scheduler.save(file.name)
            return {"scheduler": Path(file.name).read_bytes()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Called by Tune on resume, with what `get_state` gave."""
        self._restored = True
        if isinstance(self._scheduler, AsyncHyperBandScheduler):
            self._scheduler.__dict__.update(pickle.loads(state["scheduler"]))


def log_checkpoint(run: TrackedRun, checkpoint: Checkpoint, place: Path) -> None:
    """Log what a trial has kept: the model, and what training a policy goes on from."""
    checkpoint.to_directory(str(place))
    folder = RunFolder(place)
    run.model(model_files(place), "policy" if folder.exists else COST_MODEL)
    if folder.exists:
        run.artifact(folder.checkpoint(), "checkpoint")


def _told(result: dict[str, Any]) -> set[str]:
    """Names in a result that are ours, not Tune's own."""
    tunes = {"pid", "timestamp", "training_iteration", "iteration", "iterations_since_restore"}
    tunes |= {SCORE, SECONDS}
    return {
        name
        for name, value in result.items()
        if isinstance(value, int | float)
        and not isinstance(value, bool)
        and name not in tunes
        and not name.startswith(("time_", "timesteps"))
    }


def _reason(trial: Trial) -> str:
    error = trial.get_error()
    return "no reason is known" if error is None else first_line(error)
