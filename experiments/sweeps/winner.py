"""The winner of a sweep: tested against the defaults, stored, and registered in MLflow."""

import math
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from ray.tune.experiment import Trial

from autoshard.cost_model import EstimatedCosts
from autoshard.experiments.console import cli
from autoshard.experiments.evaluation.planners import best_of_each, steps_of
from autoshard.experiments.evaluation.ratio import relative
from autoshard.experiments.sweeps.search_space import Value, command_line
from autoshard.experiments.sweeps.tuning import TrialOutcome, finished
from autoshard.experiments.tracking import runs
from autoshard.experiments.tracking.storage import Storage
from autoshard.experiments.training.config import TrainingSetup
from autoshard.experiments.training.policy_evaluation import PolicyEvaluator, unseen_tasks
from autoshard.experiments.training.report import TEST_SEED
from autoshard.experiments.training.run_folder import RunFolder, policy_files
from autoshard.sharders import HEURISTICS, load_policy
from autoshard.workload import UserError

ALIAS = "winner"
_TEST_TASKS = 32


def keep_winner(
    setup: TrainingSetup,
    default: dict[str, Value],
    trials: Sequence[Trial],
    outcomes: Sequence[TrialOutcome],
    storage: Storage,
    run: runs.TrackedRun,
    tags: dict[str, str],
) -> dict[str, Any]:
    """Tests the best trial and that with the defaults, and stores and registers the best one."""
    ended = finished(outcomes)
    if not ended:
        raise UserError("no trial has finished: see each trial's run in MLflow for the reason")
    best, by_id = ended[0], {trial.trial_id: trial for trial in trials}
    with tempfile.TemporaryDirectory() as place:
        kept = {"winner": _fetched(by_id[best.trial_id], Path(place) / "winner")}
        for found in ended:
            if found.values == default:
                kept["defaults"] = _fetched(by_id[found.trial_id], Path(place) / "defaults")
        figures = _test(setup, kept, run)
        RunFolder(kept["winner"]).mirror(storage.within("winner"))
        tags |= {"score": f"{best.score:.4f}", "trial": best.trial_id}
        version = run.register(policy_files(kept["winner"]), f"{runs.POLICIES}@{ALIAS}", tags)
    for name, value in sorted(figures.items(), key=lambda pair: pair[1]):
        cli.say(f"  {name:<32} {value:.4f}")
    cli.say(
        f"train with its hyperparameters: ppo_shard.py {' '.join(command_line(best.values))}\n"
        f"the winner is in {storage.uri}/winner, and in MLflow as {runs.POLICIES} version "
        f"{version} with the alias {ALIAS}"
    )
    run.metrics({"score": best.score or math.nan, **figures, "finished": len(ended)})
    return {
        "best": asdict(best),
        "defaults": default,
        "test": figures,
        "registered": {"name": runs.POLICIES, "version": version, "alias": ALIAS},
    }


def _test(setup: TrainingSetup, kept: dict[str, Path], run: runs.TrackedRun) -> dict[str, float]:
    """Compares the kept policies with heuristics on test tables, and logs a plan of the winner.

    Returns the ratios to each task's best heuristic, and each policy's number of tasks without a
    plan.
    """
    model = setup.model
    tasks = list(islice(unseen_tasks(setup, "test", TEST_SEED), _TEST_TASKS))
    policies = {name: load_policy(folder) for name, folder in kept.items()}
    outcomes = PolicyEvaluator(tasks).outcomes(
        policies["winner"], model, (*HEURISTICS, "cost_fused"), policies
    )
    plan = outcomes["winner"][0].plan
    if plan is not None:
        oracle = EstimatedCosts(model, tasks[0].batch_size)
        run.plan("winner", plan, oracle.plan_cost(plan, tasks[0]))
    maxima = steps_of(outcomes)
    ratios = {n: relative(values, best_of_each(maxima)) for n, values in maxima.items()}
    figures = {f"test/{name}": ratio.value for name, ratio in ratios.items() if ratio is not None}
    return figures | {f"test/{n}_without_plan": float(maxima[n].count(None)) for n in policies}


def _fetched(trial: Trial, folder: Path) -> Path:
    """Copies a trial's run folder."""
    if trial.checkpoint is None:  # although the trial has finished
        raise UserError(f"trial {trial.trial_id} has no checkpoint: continue with --resume")
    trial.checkpoint.to_directory(str(folder))
    return folder
