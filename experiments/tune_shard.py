#!/usr/bin/env python
"""Search hyperparameters of policies with Ray Tune."""

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from autoshard.benchmark import BenchmarkPool, MeasurementStore
from autoshard.cost_model import load_model
from autoshard.experiments.console import cli
from autoshard.experiments.console.budget import Budget
from autoshard.experiments.console.ray_cluster import Notices, ray_cluster
from autoshard.experiments.sweeps.config import SWEEP, SWEEP_SCHEMA, TuneShardConfig, read_sweep
from autoshard.experiments.sweeps.mlflow_trials import MLflowTrials
from autoshard.experiments.sweeps.search_space import default_point, search_space
from autoshard.experiments.sweeps.tuning import (
    TRIALS,
    TrialOutcome,
    check_nodes,
    finished,
    make_scheduler,
    run_trials,
    trainable,
)
from autoshard.experiments.sweeps.winner import keep_winner
from autoshard.experiments.tracking import runs
from autoshard.experiments.tracking.data_sources import short_name, store_source, tables_source
from autoshard.experiments.tracking.storage import Storage, absolute
from autoshard.experiments.training.config import TrainingSetup
from autoshard.experiments.training.measuring import check_hardware
from autoshard.experiments.training.policy_evaluation import split_tables
from autoshard.sharders import open_oracle
from autoshard.workload import EmbeddingTable, UserError, documents, load_tables

_MAY_CHANGE = ("tables", "cost_model", "store", "json", "mlflow_uri")  # when it is resumed


def main(config: TuneShardConfig) -> None:
    """Begins or resumes a sweep, runs its trials, tests and registers the winner."""
    budget = Budget(config.seconds)
    config.check_resume()

    # 1. Options: of the command, or of the sweep that is resumed. A finished one has a result.
    if config.resume:
        storage = Storage(absolute(config.storage))
        config, run_id, result = _resumed(config, storage)
    else:
        config = config.with_absolute_paths()
        config.check()
        storage, run_id, result = Storage(config.storage), None, None
        if storage.has(SWEEP) and not config.force:
            raise UserError(
                f"{config.storage}: holds a sweep: continue with --resume, replace it with "
                "--force, or name another folder"
            )
    if result is None:
        result = _swept(config, run_id, storage, budget)
    else:
        cli.say(f"the sweep in {config.storage} is finished")
    if config.json is not None:
        documents.write(config.json, result)


def _swept(
    config: TuneShardConfig, run_id: str | None, storage: Storage, budget: Budget
) -> dict[str, Any]:
    """Runs the sweep, and returns its result."""
    # 2. Shared by all trials: tables by part, the cost model, the store of measurements.
    tables, setup = _shared(config, storage)
    model, store = setup.model, setup.store
    space = search_space(config.is_population_based)
    tags = {
        "tables": short_name(config.tables),
        "hardware": model.provenance.hardware,
        "num_devices": config.num_devices,
    }
    name = f"sweep {tags['tables']} {config.num_tables} on {config.num_devices}"

    with ExitStack() as stack:
        # 3. The run in MLflow, the Ray cluster, and the pool, which must be on the machine of the
        # store and is therefore started before the trials.
        run = stack.enter_context(
            runs.tracked_run(
                "tune_shard",
                f"{name}, {config.num_samples} trials",
                asdict(config),
                config.mlflow_uri,
                run_id,
            )
        )
        kept = {"settings": config.to_json(), "mlflow_run": run.run_id}
        if run_id is None:
            run.tags(tags)
            run.data(tables_source(config.tables, tables))
            for old in (TRIALS, "winner"):  # a sweep that is replaced has left them
                storage.remove(old)
            _keep_document(storage, kept)
        stack.enter_context(ray_cluster())
        started = time.monotonic()
        check_nodes(storage, SWEEP)
        look_at_pool = _pool_started(stack, setup, storage)

        # 4. All trials.
        cli.say(
            f"{config.num_samples} trials: {name}, {config.scheduler_name}, {config.search_name} "
            f"search for {config.objectives}; results are in {config.storage}"
        )
        scheduler = make_scheduler(config, space)
        resumed = run_id is not None and storage.has_any(f"{TRIALS}/experiment_state-*")
        logged = MLflowTrials(run, scheduler, resumed, look_at_pool)
        stack.callback(logged.close)
        trials, ended = run_trials(
            setup, config, space, scheduler, logged, storage, resumed, budget
        )
        if not ended:
            raise KeyboardInterrupt(f"continue with --resume --storage {config.storage}")
        outcomes = [
            TrialOutcome.of(trial, config.metrics, logged.run_of(trial).run_id) for trial in trials
        ]
        left_out = config.num_samples - len(finished(outcomes))
        if budget.is_spent and left_out:
            cli.say(f"stopped by {budget}: {left_out} of {config.num_samples} trials have no score")

        # 5. The winner is tested against the defaults, stored and, when all else is, registered.
        front = _front(outcomes, config, run)
        winner = keep_winner(setup, default_point(space), trials, outcomes, storage, run, tags)
        trial_runs = [logged.run_of(trial) for trial in trials]
        run.note(
            f"The best of {len(trial_runs)} trials has the score {winner['best']['score']:.4f}: "
            "step time over that of each task's best heuristic. "
            f"[Compare the trials]({run.link(trial_runs)})"
        )
        if setup.config.measures:
            run.data(store_source(store))

        # 6. The result.
        seconds, busy = time.monotonic() - started, logged.train_seconds
        result = {
            "what": "policy",
            "trials": [asdict(found) for found in outcomes],
            "finished": len(finished(outcomes)),
            "front": front,
            "mlflow_run": run.run_id,
            **winner,
            "at_once": logged.at_once,
            "seconds": seconds,
            "train_seconds": busy,
            # Time of the sweep over that of training with this number of concurrent trials.
            "overhead": seconds * logged.at_once / busy if busy else None,
        }
        _keep_document(storage, {**kept, "result": result})
        return result


def _front(
    outcomes: Sequence[TrialOutcome], config: TuneShardConfig, run: runs.TrackedRun
) -> list[str]:
    """Draws the Pareto front of several objectives; returns the runs on it in MLflow."""
    ended = finished(outcomes)
    if len(config.metrics) == 1 or not ended:
        return []
    from autoshard.experiments.sweeps.front import Front

    front = Front([asdict(found) for found in ended])
    with tempfile.TemporaryDirectory() as place:
        run.artifact(front.draw(Path(place)), "front")
    cli.say(
        f"{len(front.runs)} trials are on the Pareto front of {config.objectives}, the winner by "
        "its step: analyze_sweep.py lists them"
    )
    return front.runs


def _shared(
    config: TuneShardConfig, storage: Storage
) -> tuple[tuple[EmbeddingTable, ...], TrainingSetup]:
    """Returns the tables, and the parts of a training that all trials share."""
    store = _store(config, storage)
    tables = load_tables(config.tables)
    parts = split_tables(config.tables, tables)
    training = replace(config, store=store).training()
    model = training.priced_for_tasks(load_model(config.cost_model))
    open_oracle(model, config.batch_size, tables)  # warns of tables out of distribution
    return tables, TrainingSetup(training.priced_by(model), parts, model, store)


def trainable_of(storage: str) -> Any:
    """Returns the trainable of the sweep in a storage, as `ray.tune.Tuner.restore` requires it."""
    folder = Storage(absolute(storage))
    config, _, _ = _resumed(TuneShardConfig(resume=True, storage=folder.uri), folder)
    return trainable(_shared(config, folder)[1])


def _pool_started(stack: ExitStack, setup: TrainingSetup, storage: Storage) -> Callable[[], None]:
    """Starts the pool if trials measure; returns a function to keep its store and print notices."""
    if not setup.config.measures:
        return lambda: None
    pool, notices = BenchmarkPool(setup.store, kind=setup.config.devices), Notices()
    stack.callback(pool.close)
    check_hardware(setup.model, pool, setup.config.cost_model)
    pool.check_store_is_here()

    def look() -> None:
        storage.keep_store(pool.store)
        notices.print_new(pool)

    stack.callback(look)  # also after Ctrl-C
    return look


def _store(config: TuneShardConfig, storage: Storage) -> Path:
    """Returns the store on this machine, merged with that in the storage."""
    where = Path(storage.root) if storage.is_local else Path("runs").resolve()
    store = config.store or where / "costs.db"
    if config.reward != "estimated":
        storage.fetch_store(store)
        MeasurementStore(store).close()  # fails before the work if it cannot be used
    return store


def _resumed(
    config: TuneShardConfig, storage: Storage
) -> tuple[TuneShardConfig, str, dict[str, Any] | None]:
    """Returns the sweep's own options, its run in MLflow, and its result once it is finished."""
    before, run_id, result = read_sweep(storage)
    resumed = replace(
        before.resumed(config, _MAY_CHANGE), storage=storage.uri, seconds=config.seconds
    )
    resumed.check()
    return resumed, run_id, result


def _keep_document(storage: Storage, body: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / SWEEP
        documents.write(file, SWEEP_SCHEMA.stamp(body))
        storage.keep(file)


if __name__ == "__main__":
    cli.run_command(main, TuneShardConfig)
