#!/usr/bin/env python
"""AutoShard: train a sharding policy with PPO, on estimated and measured costs."""

from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

from autoshard.benchmark import MeasurementStore
from autoshard.cost_model import CostModel, load_model
from autoshard.experiments import tracking
from autoshard.experiments.console import cli
from autoshard.experiments.console.budget import Budget
from autoshard.experiments.console.ray_cluster import ray_cluster
from autoshard.experiments.tracking.data_sources import short_name, store_source, tables_source
from autoshard.experiments.tracking.storage import Storage
from autoshard.experiments.training.config import PPOShardConfig
from autoshard.experiments.training.loading import oracle_for
from autoshard.experiments.training.recipes import begun_with, check_recipe
from autoshard.experiments.training.report import TrainingReport
from autoshard.experiments.training.run_folder import Progress, RunFolder
from autoshard.experiments.training.settings import check_once, settled, taken_up
from autoshard.experiments.training.training import Training, parts_of
from autoshard.workload import UserError, documents

Stood = tuple[Progress, Path, CostModel]  # how far a run had come: with its checkpoint and model

# Of a run that is gone on with.
MAY_CHANGE = (
    "iterations", "num_env_runners", "test_seconds", "tables", "cost_model", "store", "storage",
    "json", "mlflow_uri",
)  # fmt: skip


def main(config: PPOShardConfig) -> None:
    """Set up or take up a run, train it to the end, test the policy."""
    budget = Budget(config.seconds)
    check_once(config)
    config = replace(config, out=config.out.resolve())
    folder = RunFolder(config.out)
    resumed: Stood | None = None
    if config.resume:
        config, resumed = _resumed(config, folder)
    else:
        config = settled(config)
    check_recipe(config)
    config.check()
    storage = _storage(config)
    tables = config.all_tables()
    parts = parts_of(config.source, tables)
    base = load_model(config.cost_model)
    oracle_for(base, config.batch_size, tables)  # which tells of tables that it knows little of
    if resumed is None:
        if storage is not None and not config.force:
            folder.check_free(storage)
        folder.begin(config.force)
    store = config.store or folder.folder / "costs.db"
    if storage is not None:
        storage.fetch_store(store)
    MeasurementStore(store).close()  # a store that cannot be used is told before work starts
    run_id = (resumed[0].mlflow_run or None) if resumed else None  # a sweep's winner has none
    with ExitStack() as stack:
        run = stack.enter_context(
            tracking.tracked_run(
                "ppo_shard", _run_name(config), asdict(config), config.mlflow_uri, run_id
            )
        )
        stack.enter_context(ray_cluster())
        begun = resumed[0].iteration if resumed else 0
        training = Training(config, folder, parts, base, store, run.run_id, begun, budget)
        stack.callback(training.stop)
        report = TrainingReport(training, run)
        if resumed is not None:
            training.take_up(*resumed)
        report.introduce(len(parts["train"]))
        if resumed is None:
            run.data(tables_source(config.source, tables))
            training.begin()
        while not training.done:
            figures = training.step()
            report.tell(figures)
            if storage is not None and "check_score" in figures:
                folder.mirror(storage)
                storage.keep_store(store)
        if training.left_out:
            cli.console.print(
                f"stopped by {budget} after iteration {training.progress.iteration} of "
                f"{config.most_iterations}: go on with --resume --out {config.out}",
                soft_wrap=True,
            )
        result = report.test()
        if config.measures:
            run.data(store_source(store))
        if config.json is not None:
            documents.write(config.json, result)
    cli.console.print(
        f"the policy is in {config.out}: compare it with compare.py --policy {config.out}, use it "
        f"with shard.py --policy {config.out}",
        soft_wrap=True,
    )


def _run_name(config: PPOShardConfig) -> str:
    name = config.recipe or "ppo"
    if config.families is not None:
        return f"{name} {config.families}, seed {config.seed}, {config.reward}"
    what = f"{config.num_tables} on {config.num_devices}, seed {config.seed}"
    return f"{name} {what}, {config.reward}, {short_name(config.tables)}"


def _storage(config: PPOShardConfig) -> Storage | None:
    """Where the run is kept beside its folder, if anywhere."""
    return None if config.storage is None else Storage(config.storage).within(config.out.name)


def _resumed(config: PPOShardConfig, folder: RunFolder) -> tuple[PPOShardConfig, Stood]:
    """The run's own settings, with what may change; and where it stood."""
    if config.recipe is not None:
        raise UserError("--resume goes on with the run's own recipe: leave out --recipe")

    def read() -> tuple[PPOShardConfig, Stood]:
        settings, *_ = found = folder.read()
        with documents.naming(config.out), documents.fields_of("training"):
            before = PPOShardConfig.from_json(settings)
        # Seconds are those of a command, not of the run.
        changed = replace(
            taken_up(before, config, MAY_CHANGE), out=config.out, seconds=config.seconds
        )
        return changed, found[1:]

    if config.storage is None and folder.exists:
        config = replace(config, storage=read()[0].storage)
    storage = _storage(config)
    if storage is not None:
        folder.fetch(storage)  # it may have gone on elsewhere since
    return read()


if __name__ == "__main__":
    cli.run_command(main, PPOShardConfig, begun_with)
