"""What users find in MLflow."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from commands import PATIENCE, empty_mlflow
from mlflow import MlflowClient

from autoshard.cost_model.models.checkpoint import PRETRAINED
from autoshard.experiments.tracking import runs
from autoshard.experiments.tracking.data_sources import tables_source
from autoshard.workload import EmbeddingTable, UserError


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    return empty_mlflow(tmp_path_factory.mktemp("mlflow") / "runs.db")


def found(uri: str, filters: str) -> list[Any]:
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name(runs.EXPERIMENT)
    assert experiment is not None
    return list(client.search_runs([experiment.experiment_id], filters))


def test_runs_are_found_by_what_users_ask_for(uri: str, tables: tuple[EmbeddingTable, ...]) -> None:
    parameters = {"tables": "somewhere/my_tables.csv", "seed": 0}
    for devices, score in ((4, 0.9), (8, 0.8), (8, 0.7)):
        with runs.tracked_run("ppo_shard", f"ppo on {devices}", parameters, uri) as run:
            run.tags({"hardware": f"gpu of {devices}", "num_devices": devices})
            run.data(tables_source("somewhere/my_tables.csv", tables))
            run.metrics({"test/policy": score, "undefined": float("nan")})
    assert len(found(uri, "tags.hardware = 'gpu of 8' AND tags.tables = 'my_tables.csv'")) == 2
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name(runs.EXPERIMENT)
    assert experiment is not None
    best = client.search_runs(
        [experiment.experiment_id], "tags.num_devices = '8'", order_by=["metrics.`test/policy`"]
    )[0]
    assert best.data.metrics == {"test/policy": 0.7}
    assert best.inputs.dataset_inputs[0].dataset.name == "my_tables.csv"
    assert {
        "autoshard",
        "torch",
        "fbgemm",
        "ray",
        "host",
        "python",
        "kind",
        "git_commit",
    } <= best.data.tags.keys()
    assert len(found(uri, "dataset.name = 'my_tables.csv'")) == 3


def test_a_parent_has_children_that_go_on(uri: str) -> None:
    with runs.tracked_run("tune_shard", "sweep", {"seed": 3, "out": "x"}, uri) as sweep:
        sweep.tags({"hardware": "cpu"})
        child = sweep.child("trial", "a1", {"learning_rate": 0.1})
        child.metrics({"score": 1.0}, step=1)
        again = sweep.child("trial", "a1", {"learning_rate": 0.1})
        assert again.run_id == child.run_id
        again.end()
        other = sweep.child("trial", "b2", {"learning_rate": 0.2})
        assert other.run_id != child.run_id
        other.end("FAILED")
    children = found(uri, f"tags.`mlflow.parentRunId` = '{sweep.run_id}'")
    assert {(run.info.run_name, run.info.status) for run in children} == {
        ("trial 1", "FINISHED"),
        ("trial 2", "FAILED"),
    }
    assert {run.data.tags["hardware"] for run in children} == {"cpu"}
    params = {run.info.run_name: run.data.params for run in children}
    assert params["trial 2"] == {"seed": "3", "learning_rate": "0.2"}
    assert {run.data.tags["kind"] for run in children} == {"trial"}


def test_models_are_versions_with_an_alias(uri: str) -> None:
    files = [*(PRETRAINED / "cpu").iterdir()]
    for expected in ("1", "2"):
        with runs.tracked_run("tune_shard", "sweep", {}, uri) as run:
            assert run.register(files, "some-model@winner", {"score": "0.9"}) == expected
    version = MlflowClient(uri).get_model_version_by_alias("some-model", "winner")
    assert (version.version, version.tags) == (2, {"score": "0.9"})


def test_the_use_of_the_machine_is_logged(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each minute, and here each moment; a resumed run goes on with its curves."""
    client = MlflowClient(uri)
    with runs.tracked_run("compare", "short", {}, uri) as run:
        pass
    assert client.get_run(run.run_id).data.metrics == {}
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.05")
    resumed = None
    for _ in range(2):
        with runs.tracked_run("compare", "long", {}, uri, resumed) as run:
            time.sleep(1)
        resumed = run.run_id
    for name in ("cpu_utilization_percentage", "system_memory_usage_megabytes"):
        points = client.get_metric_history(run.run_id, f"system/{name}")
        assert [point.step for point in points] == [*range(len(points))]
        assert len(points) >= 2


@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt, "KILLED"), (UserError, "FAILED")]
)
def test_a_run_ends_as_its_command_does(uri: str, error: type[BaseException], status: str) -> None:
    with (
        pytest.raises(error),
        runs.tracked_run("compare", status, {}, uri) as run,
    ):
        raise error("stop")
    assert MlflowClient(uri).get_run(run.run_id).info.status == status


def test_a_run_that_mlflow_does_not_end_is_one_line(uri: str) -> None:
    with (
        pytest.raises(UserError, match=r"fails: .*Results so far are kept") as caught,
        runs.tracked_run("compare", "deleted", {}, uri) as run,
    ):
        MlflowClient(uri).delete_run(run.run_id)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("uri", ["http://127.0.0.1:9", "mysql+nothing://x", "sqlite:////proc/x.db"])
def test_where_mlflow_cannot_be_is_one_line(uri: str) -> None:
    with (
        pytest.raises(UserError, match="MLflow cannot be used at ") as caught,
        runs.tracked_run("compare", "x", {}, uri),
    ):
        raise AssertionError("it began")
    assert "\n" not in str(caught.value)
    assert uri in str(caught.value)


def test_parameters_are_flat_and_told_without_housekeeping(uri: str) -> None:
    given = {"hyper": {"clip": 0.2, "shape": {"hidden": 64}}, "json": "r.json", "seed": 0}
    with runs.tracked_run("ppo_shard", "flat", given, uri) as run:
        pass
    params = MlflowClient(uri).get_run(run.run_id).data.params
    assert params == {"hyper.clip": "0.2", "hyper.shape.hidden": "64", "seed": "0"}


def test_many_processes_may_begin_in_a_new_file_at_once(tmp_path: Path) -> None:
    """MLflow makes its tables without a lock: without ours most of them fail."""
    code = (
        "from experiments.tracking import runs\n"
        f"with runs.tracked_run('compare', 'x', {{}}, 'sqlite:///{tmp_path}/new.db'): pass"
    )
    begun = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    assert [process.wait(PATIENCE) for process in begun] == [0] * 3
    assert len(found(f"sqlite:///{tmp_path}/new.db", "tags.kind = 'compare'")) == 3
