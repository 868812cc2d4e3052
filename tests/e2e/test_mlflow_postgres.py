"""Runs come whole to MLflow, on a server with PostgreSQL: a sweep's, and one beside it."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from servers import mlflow_server
from trainings import (
    SWEPT,
    TINY,
    check_all,
    check_complete,
    check_tested,
    run_sweep,
    train_at_once,
)

_ITERATIONS = 80


def test_four_trials_at_once_and_a_training_on_a_server_with_postgres(
    cluster: Any, postgres: str, tmp_path: Path
) -> None:
    artifacts = tmp_path / "artifacts"
    server = ("--backend-store-uri", postgres, "--artifacts-destination", artifacts.as_uri())
    more = cluster.add_node(num_cpus=2)
    try:
        with mlflow_server(tmp_path / "server.log", *server) as uri:
            swept = SWEPT.replace("--check-every 1", "--check-every 40")
            # Long enough for all four to have started when the first one ends.
            options = f"{swept} --search random --num-samples 4 --max-iterations {_ITERATIONS}"
            with ThreadPoolExecutor() as beside:  # other users log at the same time
                training = beside.submit(train_at_once, tmp_path, uri, [f"{TINY} --num-envs 8"])
                told = run_sweep(options, tmp_path, uri)
                check_all(uri, training.result(), tmp_path)
            check_trials(MlflowClient(uri), told, tmp_path)
    finally:
        cluster.remove_node(more)
    # Through the server, that is: no trial wrote into its folder, or to one of its own.
    assert {path.name for path in artifacts.rglob("*.safetensors")} >= {"policy.safetensors"}
    assert not list(tmp_path.glob("ml*"))


def check_trials(client: MlflowClient, told: dict[str, Any], folder: Path) -> None:
    """All trials of a sweep are complete, and the sweep is."""
    assert told["at_once"] == len(told["trials"]) == 4
    for trial in told["trials"]:
        run = client.get_run(trial["mlflow_run"])
        given = {"learning_rate": str(trial["values"]["learning_rate"]), "num_tables": "6"}
        check_complete(client, run, given, _ITERATIONS, folder / run.info.run_id)
        assert run.data.tags["mlflow.parentRunId"] == told["mlflow_run"]
    sweep = client.get_run(told["mlflow_run"])
    assert sweep.info.status == "FINISHED"
    assert sweep.data.metrics["score"] == told["best"]["score"]
    check_tested(client, sweep, folder / "sweep", "winner")
    version = client.get_model_version_by_alias("autoshard-policy", "winner")
    assert version.run_id == told["mlflow_run"]
