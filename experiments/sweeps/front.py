"""The Pareto front of a sweep: trials of which none is better in all objectives."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna

from autoshard.benchmark.plan_cost import save_picture

PICTURE = "front.png"
LABELS: Mapping[str, str] = {"step": "score", "memory": "memory MB", "planning": "planning ms"}
_RUN = "mlflow_run"


class Front:
    """The front of finished trials, with a picture.

    Args:
        trials: Finished trials as in the result of a sweep (`objectives`, `mlflow_run`); of equal
            ones, the first counts.
    """

    def __init__(self, trials: Sequence[Mapping[str, Any]]) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._names = [*trials[0]["objectives"]]
        self._study = optuna.create_study(directions=["minimize"] * len(self._names))
        self._study.add_trials(
            [
                optuna.create_trial(
                    values=[*trial["objectives"].values()], user_attrs={_RUN: trial[_RUN]}
                )
                for trial in trials
            ]
        )

    @property
    def runs(self) -> list[str]:
        """Runs in MLflow of the trials on the front, the best step first; of equal ones, one."""
        step = self._names.index("step")
        best = sorted(self._study.best_trials, key=lambda trial: (trial.values[step], trial.values))
        first = {tuple(trial.values): trial.user_attrs[_RUN] for trial in reversed(best)}
        return [*reversed(first.values())]

    def draw(self, folder: Path) -> Path:
        """Draws all trials, those on the front in another colour; returns the file."""
        from matplotlib import pyplot
        from optuna.visualization.matplotlib import plot_pareto_front

        # Optuna changes the style of all pictures that follow, and warns of a new interface.
        with pyplot.rc_context(), warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            labels = [LABELS[name] for name in self._names]
            figure: Any = plot_pareto_front(self._study, target_names=labels).figure
            figure.set_layout_engine("constrained")
            save_picture(figure, folder / PICTURE)
            pyplot.close(figure)
        return folder / PICTURE
