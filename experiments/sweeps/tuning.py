"""Ray Tune over trials, in a storage from which a sweep can be resumed."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow.fs
import ray
from ray import tune
from ray.tune import (
    CheckpointConfig,
    CLIReporter,
    FailureConfig,
    ResumeConfig,
    RunConfig,
    TuneConfig,
)
from ray.tune.experiment import Trial
from ray.tune.schedulers import (
    ASHAScheduler,
    FIFOScheduler,
    PopulationBasedTraining,
    TrialScheduler,
)
from ray.tune.search import BasicVariantGenerator, ConcurrencyLimiter, SearchAlgorithm, Searcher
from ray.tune.search.optuna import OptunaSearch
from ray.tune.search.sample import Float
from ray.tune.search.search_generator import SearchGenerator
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from autoshard.experiments.console.budget import Budget
from autoshard.experiments.sweeps.config import SCORE, TuneShardConfig
from autoshard.experiments.sweeps.mlflow_trials import MLflowTrials
from autoshard.experiments.sweeps.search_space import Space, Value, default_point, mutations, within
from autoshard.experiments.sweeps.trial import SECONDS, PolicyTrial
from autoshard.experiments.tracking.storage import Storage
from autoshard.experiments.training.config import TrainingSetup
from autoshard.workload import UserError

TRIALS = "trials"  # Tune's folder in the storage
_CPUS_PER_TRIAL = 1.0
_FAILURES = 3  # failures of a trial before it is given up
_KEPT = 3  # checkpoints of a trial, because others may be about to resume from one of them
_REDUCTION = 3  # ASHA continues one of three trials at each rung
_REPORT_SECONDS = 30  # between two tables of all trials
_COLUMNS = {"iteration": "iterations", SECONDS: "seconds"}


@dataclass(frozen=True)
class TrialOutcome:
    """The result of a trial: finished, failed, or stopped before its first checkpoint."""

    trial_id: str
    values: dict[str, Value]
    status: str
    score: float | None
    objectives: dict[str, float]
    iterations: int
    train_seconds: float
    failures: int
    mlflow_run: str

    @staticmethod
    def of(trial: Trial, metrics: Mapping[str, str], mlflow_run: str) -> "TrialOutcome":
        """Returns the result of a trial of Tune, with its objectives by these names."""
        last, status = trial.last_result or {}, "failed"
        if trial.status == Trial.TERMINATED:
            status = "stopped" if trial.checkpoint is None else "finished"
        return TrialOutcome(
            trial.trial_id,
            dict(trial.config),
            status,
            last.get(SCORE),
            {name: float(last[metric]) for name, metric in metrics.items() if metric in last},
            int(last.get("iteration", 0)),
            float(last.get(SECONDS, 0.0)),
            trial.num_failures,
            mlflow_run,
        )


def finished(outcomes: Sequence[TrialOutcome]) -> list[TrialOutcome]:
    """Returns finished trials by score, of equal ones by further objectives, then training time.

    The first one is thus on the Pareto front of the objectives.
    """
    ended = [o for o in outcomes if o.status == "finished" and o.score is not None]
    return sorted(ended, key=lambda o: (o.score, *o.objectives.values(), o.train_seconds))


def make_scheduler(config: TuneShardConfig, space: Space) -> TrialScheduler:
    """Returns the scheduler, which does not act on a trial before its first evaluation.

    ASHA stops the worse two thirds at one third of the iterations, at one ninth, and so on.
    Population based training continues the worst quarter from checkpoints of the best one. PB2
    draws numbers on a linear scale there, and takes categories from the trial that it copies.
    """
    grace = min(config.check_every, config.max_iterations)
    if config.scheduler_name == "asha":
        return ASHAScheduler(
            time_attr="iteration",
            max_t=config.max_iterations,
            grace_period=grace,
            reduction_factor=_REDUCTION,
        )
    if config.scheduler == "pbt":
        return PopulationBasedTraining(
            time_attr="iteration",
            perturbation_interval=grace,
            hyperparam_mutations=mutations(space),
            custom_explore_fn=partial(within, space),
        )
    if config.scheduler == "pb2":
        from ray.tune.schedulers.pb2 import PB2  # loads scikit-learn

        return PB2(
            time_attr="iteration",
            perturbation_interval=grace,
            hyperparam_bounds={
                n: [d.lower, d.upper] for n, d in space.items() if isinstance(d, Float)
            },
            custom_explore_fn=partial(within, space),
        )
    return FIFOScheduler()  # type: ignore[no-untyped-call]


class ResumableSearch(OptunaSearch):
    """Optuna's search, which counts trials that it does not know, and learns nothing from them.

    Tune copies the states of trials and of the search one after the other: a command that is killed
    in between leaves such a trial.

    Args:
        num_trials: Number of trials, of both kinds.
        options: Arguments of OptunaSearch.
    """

    def __init__(self, num_trials: int, **options: Any) -> None:
        super().__init__(**options)
        self._num_trials, self._unknown = num_trials, set[str]()

    def suggest(self, trial_id: str) -> Any:
        """Returns the values of a trial; what ends the search if there are all trials."""
        if len(self._ot_trials) + len(self._unknown) >= self._num_trials:
            return Searcher.FINISHED
        return super().suggest(trial_id)

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Takes a result of a trial."""
        if trial_id in self._ot_trials:
            super().on_trial_result(trial_id, result)
        else:
            self._unknown.add(trial_id)

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Takes the end of a trial."""
        if trial_id in self._ot_trials:
            super().on_trial_complete(trial_id, result, error)
        else:
            self._unknown.add(trial_id)


def make_search(config: TuneShardConfig, space: Space) -> SearchAlgorithm | Searcher:
    """Returns the search algorithm, which tries the default hyperparameters first."""
    first, seed, at_once = [default_point(space)], config.seed, config.at_once
    if config.search_name == "optuna":
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        searched: Any = dict(space)
        goals: Any = (SCORE, "min")  # a list of one would be several to it, with other rules
        if len(config.metrics) > 1:
            goals = ([*config.metrics.values()], ["min"] * len(config.metrics))
        search = ResumableSearch(
            config.num_samples,
            space=searched,
            metric=goals[0],
            mode=goals[1],
            points_to_evaluate=first,
            seed=seed,
        )
        return search if at_once is None else ConcurrencyLimiter(search, at_once)
    return BasicVariantGenerator(
        points_to_evaluate=first, max_concurrent=at_once or 0, random_state=seed
    )


def trainable(setup: TrainingSetup) -> Any:
    """Returns the trainable of a sweep, which `Tuner.restore` requires."""
    return tune.with_resources(
        tune.with_parameters(PolicyTrial, setup=setup), {"CPU": _CPUS_PER_TRIAL}
    )


def run_trials(
    setup: TrainingSetup,
    config: TuneShardConfig,
    space: Space,
    scheduler: TrialScheduler,
    callback: MLflowTrials,
    storage: Storage,
    resume: bool,
    budget: Budget,
) -> tuple[list[Trial], bool]:
    """Runs all trials; returns those that began, and whether all ended or the time is over.

    Otherwise, the sweep can be resumed from the storage.
    """
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"  # reporters are of the older output
    # Tune's own loggers would write the metrics into every trial's folder, too.
    os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"
    # After a kill, trials repeat iterations that are more recent than this.
    os.environ["TUNE_GLOBAL_CHECKPOINT_S"] = "0.5" if storage.is_local else "5"
    os.environ.setdefault("TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S", "0")
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # its table lists crashed trials
    filesystem = None
    if not storage.is_local:
        filesystem = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(storage.filesystem))
    search = make_search(config, space)
    if isinstance(search, Searcher):
        search = SearchGenerator(search)  # as Tune does
    one = len(config.metrics) == 1  # of several, Tune leaves all to the search
    # Written to the storage as tuner.pkl, from which `Tuner.restore` of Tune's users goes on.
    tuner = tune.Tuner(
        trainable(setup),
        # Optuna has the space already.
        param_space=dict(space) if isinstance(search, BasicVariantGenerator) else None,
        tune_config=TuneConfig(
            metric=SCORE if one else None,
            mode="min" if one else None,
            num_samples=config.num_samples,
            time_budget_s=budget.left_s() if budget.is_limited else None,
            search_alg=search,
            scheduler=scheduler,
            reuse_actors=True,
        ),
        run_config=RunConfig(
            name=TRIALS,
            storage_path=storage.root,
            storage_filesystem=filesystem,
            checkpoint_config=CheckpointConfig(
                num_to_keep=_KEPT, checkpoint_frequency=config.check_every, checkpoint_at_end=True
            ),
            failure_config=FailureConfig(max_failures=_FAILURES),
            callbacks=[callback],
            verbose=1,
            progress_reporter=CLIReporter(
                metric_columns={m: m for m in config.metrics.values()} | _COLUMNS,
                parameter_columns=list(space),
                max_report_frequency=_REPORT_SECONDS,
                print_intermediate_tables=True,
            ),
        ),
    )
    if resume:
        # `Tuner.restore` would take the time limit and a copy of the callback from tuner.pkl.
        again: Any = ResumeConfig.ResumeType.RESUME
        local: Any = tuner._local_tuner
        local._tuner_kwargs["resume_config"] = ResumeConfig(unfinished=again, errored=again)
    tuner.fit()
    # At the time limit, some trials have not begun.
    trials = [
        t for t in callback.trials if SCORE in (t.last_result or {}) or t.status == Trial.ERROR
    ]
    # After Ctrl-C, Tune reports all trials as terminated.
    ended = [t for t in trials if t.status == Trial.ERROR or (t.last_result or {}).get("done")]
    # After a kill while Tune copied its files, there may be fewer trials than the search knows.
    every = search.is_finished() and len(ended) == len(callback.trials)
    return trials, every or budget.is_spent or len(ended) >= config.num_samples


def check_nodes(storage: Storage, file: str) -> None:
    """Raises UserError if there is no CPU for a trial, or if a node cannot access the storage.

    Args:
        storage: Storage of the sweep.
        file: Name of a file in it, which all nodes must see.
    """
    cpus = ray.cluster_resources().get("CPU", 0.0)  # type: ignore[no-untyped-call]
    if cpus < _CPUS_PER_TRIAL:
        raise UserError(f"a trial needs a CPU, the Ray cluster has {cpus:g}: add nodes")
    if not storage.is_local:
        return
    without = []
    for node in ray.nodes():  # type: ignore[no-untyped-call]
        if node["Alive"] and node["Resources"].get("CPU", 0) >= _CPUS_PER_TRIAL:
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            look = ray.remote(num_cpus=0)(os.path.exists).options(scheduling_strategy=there)
            if not ray.get(look.remote(f"{storage.root}/{file}")):
                without.append(node["NodeManagerHostname"])
    if without:
        raise UserError(
            f"--storage {storage.uri}: {', '.join(without)} cannot access it: name a path that "
            "all nodes share, or an object store"
        )
