"""Runs come whole to MLflow: many trainings at once on a server with PostgreSQL; a plain file."""

from pathlib import Path

import pytest
from mlflow import MlflowClient
from servers import mlflow_server
from trainings import TINY, Training, check_complete, check_tested, train_at_once

pytestmark = pytest.mark.timeout(600)  # a fifth of it, unless others use the machine too


def test_four_trainings_at_once_on_a_server_with_postgres(
    cluster: object, postgres: str, tmp_path: Path
) -> None:
    artifacts = tmp_path / "artifacts"
    options = ("--backend-store-uri", postgres, "--artifacts-destination", artifacts.as_uri())
    # A sweep of tune_shard.py with four trials at once belongs here too.
    with mlflow_server(tmp_path / "server.log", *options) as uri:
        given = [f"{TINY} --games 8 --seed {seed}" for seed in range(4)]
        trainings = train_at_once(tmp_path, uri, given)
        check_all(uri, trainings, tmp_path)
    # Through the server, that is: no training wrote into its folder, or to one of its own.
    assert {path.name for path in artifacts.rglob("*.safetensors")} >= {"policy.safetensors"}
    assert not list(tmp_path.glob("ml*"))


def test_trainings_with_a_plain_file(
    sqlite_trainings: tuple[str, list[Training]], tmp_path: Path
) -> None:
    check_all(*sqlite_trainings, tmp_path)


def check_all(uri: str, trainings: list[Training], folder: Path) -> None:
    """Those trainings, and no others, are complete."""
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("autoshard")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    assert {run.info.run_id for run in runs} == {training.run_id for training in trainings}
    for training in trainings:
        run = next(run for run in runs if run.info.run_id == training.run_id)
        iterations = int(training.given["iterations"])
        check_complete(client, run, training.given, iterations, folder / training.run_id)
        check_tested(client, run, folder / training.run_id)
