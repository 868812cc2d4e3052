#!/usr/bin/env python
"""Train a sharding policy with PPO, on estimated and measured costs."""

from contextlib import ExitStack
from dataclasses import asdict, replace

from autoshard.benchmark import MeasurementStore
from autoshard.cost_model import load_model
from autoshard.experiments.console import cli
from autoshard.experiments.console.budget import Budget
from autoshard.experiments.console.ray_cluster import ray_cluster
from autoshard.experiments.tracking import runs
from autoshard.experiments.tracking.data_sources import short_name, store_source, tables_source
from autoshard.experiments.tracking.storage import Storage
from autoshard.experiments.training.config import PPOShardConfig, TrainingSetup
from autoshard.experiments.training.loop import Training
from autoshard.experiments.training.policy_evaluation import split_tables
from autoshard.experiments.training.recipes import check_recipe, recipe_defaults
from autoshard.experiments.training.report import TrainingReport
from autoshard.experiments.training.run_folder import RunFolder, SavedRun
from autoshard.sharders import open_oracle
from autoshard.workload import UserError, documents

MAY_CHANGE = (  # when a run is resumed
    "iterations", "num_env_runners", "test_seconds", "tables", "cost_model", "store", "storage",
    "json", "mlflow_uri", "register",
)  # fmt: skip


def main(config: PPOShardConfig) -> None:
    """Begins or resumes a run, trains, and tests the policy."""
    budget = Budget(config.seconds)
    config.check_resume()
    folder = RunFolder(config.out.resolve())
    config = replace(config, out=folder.folder)

    # 1. Options: those of the command, or of the run that is resumed.
    saved: SavedRun | None = None
    if config.resume:
        config, saved = _resumed(config, folder)
    else:
        config = config.with_absolute_paths()
    check_recipe(config)
    config.check()
    storage = _storage(config)

    # 2. Tables by part: training, evaluation and test. The cost model.
    tables = config.all_tables()
    parts = split_tables(config.source, tables)
    model = config.priced_for_tasks(load_model(config.cost_model))
    config = config.priced_by(model)
    open_oracle(model, config.batch_size, tables)  # only for its warnings of unfamiliar tables

    # 3. The folder of the run, and the store of measurements.
    if saved is None:
        if storage is not None and not config.force:
            folder.check_free(storage)
        folder.begin(config.force)
    store = config.store or folder.folder / "costs.db"
    if storage is not None:
        storage.fetch_store(store)
    MeasurementStore(store).close()  # fails before the work if it cannot be used

    # 4. The run in MLflow, and the Ray cluster, which end with this command.
    with ExitStack() as stack:
        run_id = (
            (saved.progress.mlflow_run or None) if saved else None
        )  # a sweep's winner has no run
        run = stack.enter_context(
            runs.tracked_run(
                "ppo_shard", _run_name(config), asdict(config), config.mlflow_uri, run_id
            )
        )
        stack.enter_context(ray_cluster())

        # 5. Training, with a checkpoint after each iteration.
        setup = TrainingSetup(config, parts, model, store)
        training = Training(setup, folder, saved, run.run_id, budget)
        stack.callback(training.stop)
        report = TrainingReport(training, run)
        report.introduce()
        if saved is None:
            run.data(tables_source(config.source, tables))
            training.begin()
        while not training.done:
            metrics = training.step()
            report.iteration(metrics)
            if storage is not None and "check_score" in metrics:
                folder.mirror(storage)
                storage.keep_store(store)
        if training.remaining_iterations:
            cli.say(
                f"stopped by {budget} after iteration {training.progress.iteration} of "
                f"{config.max_iterations}: continue with --resume --out {config.out}"
            )

        # 6. The test of the kept policy, on tables that nothing was trained on.
        result = report.test()
        if config.measures:
            run.data(store_source(store))
        if config.json is not None:
            documents.write(config.json, result)
    cli.say(
        f"the policy is in {config.out}: compare it with compare.py --policy {config.out}, or plan "
        f"with shard.py --policy {config.out}"
    )


def _run_name(config: PPOShardConfig) -> str:
    name = config.recipe or "ppo"
    if config.families is not None:
        return f"{name} {config.families}, seed {config.seed}, {config.reward}"
    what = f"{config.num_tables} on {config.num_devices}, seed {config.seed}"
    return f"{name} {what}, {config.reward}, {short_name(config.tables)}"


def _storage(config: PPOShardConfig) -> Storage | None:
    """Returns the storage of the run, if any."""
    return None if config.storage is None else Storage(config.storage).within(config.out.name)


def _resumed(config: PPOShardConfig, folder: RunFolder) -> tuple[PPOShardConfig, SavedRun]:
    """Returns the run's own options, changed by this command, and its saved state."""
    if config.recipe is not None:
        raise UserError("--resume uses the run's own recipe: leave out --recipe")

    def read() -> tuple[PPOShardConfig, SavedRun]:
        saved = folder.read()
        with documents.naming(config.out), documents.fields_of("training"):
            before = PPOShardConfig.from_json(saved.config)
        changed = replace(
            before.resumed(config, MAY_CHANGE), out=config.out, seconds=config.seconds
        )
        return changed, saved

    if config.storage is None and folder.exists:
        config = replace(config, storage=read()[0].storage)
    storage = _storage(config)
    if storage is not None:
        folder.fetch(storage)  # it may have been continued elsewhere
    return read()


if __name__ == "__main__":
    cli.run_command(main, PPOShardConfig, recipe_defaults)
