#!/usr/bin/env python
"""Show which hyperparameters mattered in a finished sweep, and its Pareto front."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.importance import FanovaImportanceEvaluator, get_param_importances
from optuna.visualization.matplotlib import plot_param_importances, plot_slice
from ray.tune.search.optuna import OptunaSearch
from rich.console import RenderableType

from autoshard.benchmark.plan_cost import save_picture
from autoshard.experiments.console import cli
from autoshard.experiments.console.inputs import check_file, check_folder
from autoshard.experiments.sweeps.config import SWEEP, TuneShardConfig, read_sweep
from autoshard.experiments.sweeps.front import LABELS
from autoshard.experiments.sweeps.search_space import search_space
from autoshard.experiments.tracking import runs
from autoshard.experiments.tracking.storage import Storage, absolute
from autoshard.sharders.explaining.summary import new_table
from autoshard.workload import UserError, documents

_MIN_TRIALS = 10
_RESAMPLES = 20
_TREES = 16  # of a resample's forest; that of all trials has Optuna's 64


@dataclass(frozen=True)
class AnalyzeSweepConfig:
    """Show which hyperparameters mattered in a finished sweep of tune_shard.py.

    Importance is the share of the scores' variance that single hyperparameters explain (fANOVA).
    Its interval is over resampled trials. Both are logged to the sweep's run in MLflow. A sweep
    with several --objectives also has a Pareto front: trials of which none is better in all.
    """

    storage: str = "runs/sweep"
    """Folder of the sweep: a path or s3://..."""
    out: Path = Path("sweep-analysis")
    """Folder for the pictures importance.png and slices.png."""
    json: Path | None = None
    """JSON file for the importances."""
    mlflow_uri: str | None = None
    """MLflow tracking URI. Default: the sweep's."""


def main(config: AnalyzeSweepConfig) -> None:
    """Reads the trials, computes importances, prints, draws and logs them."""
    check_folder(config.out, "--out")
    check_file(config.json, "--json")
    storage = Storage(absolute(config.storage))
    sweep, run_id, result = read_sweep(storage)
    if result is None:
        raise UserError(
            f"{storage.uri}: the sweep is not finished: continue with tune_shard.py --resume "
            f"--storage {storage.uri}"
        )
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    with documents.naming(f"{storage.uri}/{SWEEP}"), documents.fields_of("sweep"):
        if len(sweep.metrics) > 1:
            cli.show(_front(sweep, result))
        trials = _trials(sweep, result["trials"])
    scores = {trial.value for trial in trials}
    if len(scores) < _MIN_TRIALS:
        raise UserError(
            f"{storage.uri}: {len(trials)} finished trials, {len(scores)} different scores: "
            f"importances need {_MIN_TRIALS}: sweep with more --num-samples"
        )
    forest = FanovaImportanceEvaluator(seed=0)
    study = _study(trials)
    importances = {n: float(v) for n, v in get_param_importances(study, evaluator=forest).items()}
    ranges = _ranges(trials)

    shown = new_table(("hyperparameter", "importance", "90% interval"))
    for name, value in importances.items():
        low, high = ranges[name]
        shown.add_row(name, f"{value:.3f}", f"{low:.3f} to {high:.3f}")
    cli.show([f"importances for the score, {len(trials)} trials:", shown])

    config.out.mkdir(parents=True, exist_ok=True)
    slices: Any = plot_slice(study, target_name="score")  # an axis for each hyperparameter
    pictures = {
        config.out / "importance.png": plot_param_importances(
            study, evaluator=forest, target_name="score"
        ),
        config.out / "slices.png": slices[0],
    }
    uri = config.mlflow_uri or sweep.mlflow_uri
    with runs.tracked_run("tune_shard", f"analysis of {storage.uri}", {}, uri, run_id) as run:
        run.metrics({f"importance/{name}": value for name, value in importances.items()})
        for path, axes in pictures.items():
            axes.figure.set_layout_engine("constrained")
            save_picture(axes.figure, path)
            run.artifact(path, "importance")
    cli.say(f"pictures are in {config.out}, and in the sweep's run in MLflow under importance")
    if config.json is not None:
        found = {n: {"importance": importances[n], "interval": ranges[n]} for n in importances}
        documents.write(config.json, {"trials": len(trials), "hyperparameters": found})


def _front(sweep: TuneShardConfig, result: dict[str, Any]) -> list[RenderableType]:
    """Returns a table of the trials on the Pareto front, the best step first."""
    shown = new_table(("run in MLflow", *(LABELS[name] for name in sweep.metrics)))
    by_run = {found["mlflow_run"]: found for found in result["trials"]}
    for run in result["front"]:
        values = (f"{by_run[run]['objectives'][name]:,.4g}" for name in sweep.metrics)
        shown.add_row(run, *values)
    title = f"Pareto front, {len(result['front'])} of {result['finished']} trials:"
    others = "the winner is the first, by its step; for another: --policy runs:/RUN/policy"
    return [title, shown, others]


def _trials(
    sweep: TuneShardConfig, outcomes: Sequence[dict[str, Any]]
) -> list[optuna.trial.FrozenTrial]:
    """Returns the finished trials as Optuna's."""
    space: Any = dict(search_space(sweep.is_population_based))
    distributions = OptunaSearch.convert_search_space(space)
    return [
        optuna.create_trial(
            params=found["values"], distributions=distributions, value=found["score"]
        )
        for found in outcomes
        if found["status"] == "finished"
        and found["score"] is not None
        and math.isfinite(found["score"])
    ]


def _study(trials: Sequence[optuna.trial.FrozenTrial]) -> optuna.Study:
    study = optuna.create_study(direction="minimize")
    study.add_trials(trials)
    return study


def _ranges(trials: Sequence[optuna.trial.FrozenTrial]) -> dict[str, tuple[float, float]]:
    """Returns the 5th and 95th percentile of each importance over resampled trials."""
    draw, forest = np.random.default_rng(0), FanovaImportanceEvaluator(n_trees=_TREES, seed=0)
    drawn = draw.integers(len(trials), size=(_RESAMPLES, len(trials)))
    studies = [_study([trials[place] for place in places]) for places in drawn]
    found = [get_param_importances(study, evaluator=forest) for study in studies]
    return {
        name: tuple(np.percentile([each[name] for each in found], (5, 95)).tolist())
        for name in found[0]
    }


if __name__ == "__main__":
    cli.run_command(main, AnalyzeSweepConfig)
