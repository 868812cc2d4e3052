"""A sweep: Ray Tune over trials, in a storage that it can be gone on with from."""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow.fs
from ray import tune
from ray.tune import CheckpointConfig, ResumeConfig
from ray.tune.experiment import Trial
from ray.tune.schedulers import (
    ASHAScheduler,
    FIFOScheduler,
    PopulationBasedTraining,
    TrialScheduler,
)
from ray.tune.search import (
    BasicVariantGenerator,
    ConcurrencyLimiter,
    SearchAlgorithm,
    Searcher,
)
from ray.tune.search.optuna import OptunaSearch

from autoshard.experiments.console.budget import Budget
from autoshard.experiments.sweeps.config import SchedulerName, SearchName
from autoshard.experiments.sweeps.log import SweepLog
from autoshard.experiments.sweeps.search_space import (
    Dimension,
    Value,
    default_point,
    for_tune,
    within,
)
from autoshard.experiments.sweeps.trials import SCORE, SECONDS
from autoshard.experiments.tracking.storage import Storage

CPUS_PER_TRIAL = 1.0
_FAILURES = 3  # of a trial, before it is given up
TRIALS = "trials"  # Tune's folder in the storage
_KEPT = 3  # checkpoints of a trial: others may be about to go on from one of them
_REDUCTION = 3  # of every three trials that reach a rung, ASHA lets one go on


@dataclass(frozen=True)
class TrialOutcome:
    """What became of a trial."""

    trial_id: str
    values: dict[str, Value]
    status: str
    score: float | None
    iterations: int
    train_seconds: float
    failures: int
    mlflow_run: str


def make_scheduler(
    name: SchedulerName, space: Sequence[Dimension], iterations: int, grace: int
) -> TrialScheduler:
    """ASHA stops the worse two thirds at a third of the way, and at a third of that; population
    based training lets the worse quarter go on from the better quarter's checkpoints.

    `iterations` at most; none is stopped before `grace`.
    """
    if name == "asha":
        return ASHAScheduler(
            time_attr="iteration",
            max_t=max(iterations, grace),
            grace_period=grace,
            reduction_factor=_REDUCTION,
        )
    if name == "pbt":
        return PopulationBasedTraining(
            time_attr="iteration",
            perturbation_interval=grace,
            hyperparam_mutations={d.name: d.for_mutation() for d in space if d.live},
            custom_explore_fn=partial(within, space),
        )
    return FIFOScheduler()  # type: ignore[no-untyped-call]


def make_search(
    name: SearchName, space: Sequence[Dimension], seed: int, at_once: int | None
) -> SearchAlgorithm | Searcher:
    """Both try the defaults first. At most `at_once` trials run at the same time."""
    first = [default_point(space)]
    if name == "optuna":
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        search = OptunaSearch(for_tune(space), SCORE, "min", points_to_evaluate=first, seed=seed)
        return search if at_once is None else ConcurrencyLimiter(search, at_once)
    return BasicVariantGenerator(
        points_to_evaluate=first, max_concurrent=at_once or 0, random_state=seed
    )


def run_trials(
    trainable: Any,
    space: Sequence[Dimension],
    search: SearchAlgorithm | Searcher,
    scheduler: TrialScheduler,
    log: SweepLog,
    storage: Storage,
    num_samples: int,
    checkpoint_every: int,
    resume: bool,
    budget: Budget,
) -> tuple[list[Trial], bool]:
    """All trials, and whether all of them ended, or the budget. What is in the storage can be gone
    on with.
    """
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"  # Tune is silent; what people hear is in the log
    # Loggers of Tune's own would write the same again, into every trial's folder.
    os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"
    # Trials that ended later than this before a kill would train their last iterations again.
    os.environ["TUNE_GLOBAL_CHECKPOINT_S"] = "0.5" if storage.is_local else "5"
    os.environ.setdefault("TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S", "0")
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # the log tells of crashed trials
    filesystem = None
    if not storage.is_local:
        filesystem = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(storage.filesystem))
    going_on: Any = ResumeConfig.ResumeType.RESUME
    analysis = tune.run(
        tune.with_resources(trainable, {"CPU": CPUS_PER_TRIAL}),
        name=TRIALS,
        metric=SCORE,
        mode="min",
        # A search over a space of its own wants none here.
        config=for_tune(space) if isinstance(search, BasicVariantGenerator) else None,
        num_samples=num_samples,
        time_budget_s=budget.left_s() if budget.is_limited else None,
        storage_path=storage.root,
        storage_filesystem=filesystem,
        search_alg=search,
        scheduler=scheduler,
        checkpoint_config=CheckpointConfig(
            num_to_keep=_KEPT, checkpoint_frequency=checkpoint_every, checkpoint_at_end=True
        ),
        verbose=0,
        max_failures=_FAILURES,
        resume_config=ResumeConfig(errored=going_on, unfinished=going_on) if resume else None,
        reuse_actors=True,
        raise_on_failed_trial=False,
        callbacks=[log],
    )
    # A budget that is spent leaves some that have never begun.
    trials = [
        t for t in analysis.trials if SCORE in (t.last_result or {}) or t.status == Trial.ERROR
    ]
    # After Ctrl-C Tune calls all trials terminated.
    ended = [t for t in trials if t.status == Trial.ERROR or (t.last_result or {}).get("done")]
    return trials, budget.is_spent or len(ended) >= num_samples


def outcome(trial: Trial, log: SweepLog) -> TrialOutcome:
    """What became of a trial of Tune's."""
    last = trial.last_result or {}
    return TrialOutcome(
        trial.trial_id,
        dict(trial.config),
        _status(trial),
        last.get(SCORE),
        int(last.get("iteration", 0)),
        float(last.get(SECONDS, 0.0)),
        trial.num_failures,
        log.run_of(trial).run_id,
    )


def _status(trial: Trial) -> str:
    """Finished, failed, or stopped before there was anything to keep."""
    if trial.status != Trial.TERMINATED:
        return "failed"
    return "stopped" if trial.checkpoint is None else "finished"
