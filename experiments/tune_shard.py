#!/usr/bin/env python
"""Sweep the hyperparameters of the policy or of the cost model, with Ray Tune."""

import math
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import ray
from ray.tune.experiment import Trial
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from autoshard.benchmark import BenchmarkPool, MeasurementStore
from autoshard.experiments import tracking
from autoshard.experiments.console import cli
from autoshard.experiments.console.budget import Budget
from autoshard.experiments.console.notices import Notices
from autoshard.experiments.console.ray_cluster import ray_cluster
from autoshard.experiments.sweeps.config import TuneShardConfig
from autoshard.experiments.sweeps.log import SweepLog
from autoshard.experiments.sweeps.report import draw_trials, finished, print_best
from autoshard.experiments.sweeps.search_space import command_line, default_point
from autoshard.experiments.sweeps.subjects import Subject, subject_of
from autoshard.experiments.sweeps.sweep import (
    CPUS_PER_TRIAL,
    TRIALS,
    TrialOutcome,
    make_scheduler,
    make_search,
    outcome,
    run_trials,
)
from autoshard.experiments.tracking.data_sources import store_source
from autoshard.experiments.tracking.storage import Storage, absolute
from autoshard.experiments.training.run_folder import RunFolder, model_files
from autoshard.experiments.training.settings import as_json, check_once, settled, taken_up
from autoshard.workload import UserError, documents

SWEEP_SCHEMA = documents.Schema("autoshard.sweep", 1)
ALIAS = "winner"
_DOCUMENT = "sweep.json"
_MAY_CHANGE = ("tables", "cost_model", "store", "json", "mlflow_uri")  # of one gone on with


def main(config: TuneShardConfig) -> None:
    """Begin a sweep or take one up, run its trials, test and register the winner."""
    budget = Budget(config.seconds)
    check_once(config)
    config = replace(config, storage=absolute(config.storage))
    if not config.resume:
        config = settled(config)
        config.check()
    storage = Storage(config.storage)
    run_id = None
    if config.resume:
        config, run_id, result = _resumed(config, storage)
        if result is not None:
            cli.console.print(f"the sweep in {config.storage} is finished")
            if config.json is not None:
                documents.write(config.json, result)
            return
    elif storage.has(_DOCUMENT) and not config.force:
        raise UserError(
            f"{config.storage}: holds a sweep: go on with --resume, replace it with --force, or "
            "name another folder"
        )
    store = _store(config, storage)
    subject = subject_of(config, store)
    name = f"sweep {subject.name}, {config.num_samples} trials"
    with ExitStack() as stack:
        run = stack.enter_context(
            tracking.tracked_run("tune_shard", name, subject.parameters, config.mlflow_uri, run_id)
        )
        if run_id is None:
            run.tags(subject.tags)
            run.data(*subject.data)
            for old in (TRIALS, "winner", "trials.png"):  # of a sweep that is replaced
                storage.remove(old)
            _keep_document(storage, {"settings": as_json(config), "mlflow_run": run.run_id})
        stack.enter_context(ray_cluster())
        started = time.monotonic()
        _check_room(storage)
        watch = _Watch(subject.start_pool(), storage)
        stack.callback(watch.close)  # also after Ctrl-C
        resumed = run_id is not None and storage.has_any(f"{TRIALS}/experiment_state-*")
        grace = min(config.check_every, config.max_iterations)
        scheduler = make_scheduler(config.scheduler, subject.space, config.max_iterations, grace)
        log = SweepLog(run, config.num_samples, scheduler, resumed, watch.look)
        stack.callback(log.close)
        cli.console.print(
            f"{config.num_samples} trials: {subject.name}, {config.scheduler}, "
            f"{config.search_name} search; all is in {config.storage}",
            soft_wrap=True,
        )
        trials, ended = run_trials(
            subject.trainable(),
            subject.space,
            make_search(config.search_name, subject.space, config.seed, config.at_once),
            scheduler,
            log,
            storage,
            config.num_samples,
            checkpoint_every=config.check_every,
            resume=resumed,
            budget=budget,
        )
        if not ended:
            raise KeyboardInterrupt(f"go on with --resume --storage {config.storage}")
        outcomes = [outcome(trial, log) for trial in trials]
        left_out = config.num_samples - len(finished(outcomes))
        if budget.is_spent and left_out:
            cli.console.print(
                f"stopped by {budget}: {left_out} of {config.num_samples} trials have no score"
            )
        result = {
            "what": config.what,
            "trials": [asdict(found) for found in outcomes],
            "finished": len(finished(outcomes)),
            "mlflow_run": run.run_id,
            **_winner(subject, trials, outcomes, storage, run),
        }
        runs = [log.run_of(trial) for trial in trials]
        run.note(
            f"The best of {len(runs)} trials has the score {result['best']['score']:.4f} "
            f"({subject.score}). [Compare the trials]({run.link(runs)})"
        )
        seconds = time.monotonic() - started
        result |= {
            "at_once": log.at_once,
            "seconds": seconds,
            "train_seconds": log.train_seconds,
            # How much longer the sweep took than training needs with so many at once.
            "overhead": seconds * log.at_once / log.train_seconds if log.train_seconds else None,
        }
        if watch.pool is not None:
            run.data(store_source(store))
        _keep_document(
            storage,
            {"settings": as_json(config), "mlflow_run": run.run_id, "result": result},
        )
        if config.json is not None:
            documents.write(config.json, result)


class _Watch:
    """Keeps what the pool measures, and says what it has noticed, while the sweep goes on."""

    def __init__(self, pool: BenchmarkPool | None, storage: Storage) -> None:
        self.pool, self._storage = pool, storage
        self._notices = Notices()

    def look(self) -> None:
        """Now and then."""
        if self.pool is not None:
            self._storage.keep_store(self.pool.store)
            self._notices.tell(self.pool)

    def close(self) -> None:
        """At the end."""
        self.look()
        if self.pool is not None:
            self.pool.close()


def _winner(
    subject: Subject,
    trials: Sequence[Trial],
    outcomes: Sequence[TrialOutcome],
    storage: Storage,
    run: tracking.TrackedRun,
) -> dict[str, Any]:
    """Test it beside the defaults, register it, draw all trials, say what was found."""
    ended = finished(outcomes)
    if not ended:
        raise UserError("no trial has finished: each trial's run in MLflow tells why")
    best = ended[0]
    by_id = {trial.trial_id: trial for trial in trials}
    default = default_point(subject.space)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        kept = {"winner": place / "winner"}
        for found in outcomes:
            if found.values == default and found.status == "finished":
                kept["defaults"] = place / "defaults"
                _fetch(by_id[found.trial_id], kept["defaults"])
        _fetch(by_id[best.trial_id], kept["winner"])
        subject.complete(kept["winner"], best.values)
        figures = subject.test(kept, run)
        picture = place / "trials.png"
        draw_trials(outcomes, subject.space, subject.score, picture)
        run.artifact(picture)
        storage.keep(picture)
        RunFolder(kept["winner"]).mirror(storage.within("winner"))
        registered = {**subject.tags, "score": f"{best.score:.4f}", "trial": best.trial_id}
        model = place / "model"
        model.mkdir()
        for path in model_files(kept["winner"]):
            path.rename(model / path.name)
        version = run.register(model, subject.registered_as, registered, ALIAS)
    print_best(outcomes, subject.space)
    for name, value in sorted(figures.items(), key=lambda pair: pair[1]):
        cli.console.print(f"  {name:<32} {value:.4f}")
    options = " ".join(command_line(subject.space, best.values))
    cli.console.print(f"train with them: {subject.script} {options}", soft_wrap=True)
    cli.console.print(
        f"the winner is in {storage.uri}/winner, and in MLflow as {subject.registered_as} version "
        f"{version} with the alias {ALIAS}",
        soft_wrap=True,
    )
    run.metrics({"score": best.score or math.nan, **figures, "finished": len(ended)})
    return {
        "best": asdict(best),
        "defaults": default,
        "test": figures,
        "registered": {"name": subject.registered_as, "version": version, "alias": ALIAS},
    }


def _fetch(trial: Trial, folder: Path) -> None:
    checkpoint = trial.checkpoint
    if checkpoint is None:  # a finished trial ended with one
        raise UserError(f"trial {trial.trial_id} has no checkpoint: go on with --resume")
    checkpoint.to_directory(str(folder))


def _check_room(storage: Storage) -> None:
    """UserError if Tune would wait for ever, or if a node cannot keep its trials' checkpoints."""
    cpus = ray.cluster_resources().get("CPU", 0.0)  # type: ignore[no-untyped-call]
    if cpus < CPUS_PER_TRIAL:
        raise UserError(f"a trial takes a CPU, the Ray cluster has {cpus:g}: add nodes")
    if not storage.is_local:
        return
    document = f"{storage.root}/{_DOCUMENT}"
    without = []
    for node in ray.nodes():  # type: ignore[no-untyped-call]
        if node["Alive"] and node["Resources"].get("CPU", 0) >= CPUS_PER_TRIAL:
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            look = ray.remote(num_cpus=0)(os.path.exists)
            if not ray.get(look.options(scheduling_strategy=there).remote(document)):
                without.append(node["NodeManagerHostname"])
    if without:
        raise UserError(
            f"--storage {storage.uri}: {', '.join(without)} cannot see it: name a path that all "
            "nodes share, or an object store"
        )


def _store(config: TuneShardConfig, storage: Storage) -> Path:
    """The store on this machine, with what the storage has of it."""
    if config.what == "cost-model":
        assert config.store is not None
        return config.store
    where = Path(storage.root) if storage.is_local else Path("runs").resolve()
    store = config.store or where / "costs.db"
    if config.reward != "estimated":
        storage.fetch_store(store)
        MeasurementStore(store).close()  # one that cannot be used is told before work starts
    return store


def _resumed(
    config: TuneShardConfig, storage: Storage
) -> tuple[TuneShardConfig, str, dict[str, Any] | None]:
    """The sweep's own settings, its run in MLflow, and its result if it has come to an end."""
    document = storage.read_json(_DOCUMENT)
    if document is None:
        raise UserError(f"{config.storage}: holds no sweep to go on with")
    with documents.naming(f"{config.storage}/{_DOCUMENT}"), documents.fields_of("sweep"):
        SWEEP_SCHEMA.check(document)
        before = TuneShardConfig.from_json(document["settings"])
        run_id = str(document["mlflow_run"])
    changed = replace(
        taken_up(before, config, _MAY_CHANGE), storage=config.storage, seconds=config.seconds
    )
    changed.check()
    return changed, run_id, document.get("result")


def _keep_document(storage: Storage, body: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / _DOCUMENT
        documents.write(file, SWEEP_SCHEMA.stamp(body))
        storage.keep(file)


if __name__ == "__main__":
    cli.run_command(main, TuneShardConfig)
