"""Logging to MLflow: the one place that knows how runs are named, tagged and stored."""

import logging
import os
import platform
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from workload import UserError

DEFAULT_URI = "sqlite:///mlflow.db"
EXPERIMENT = "autoshard"


def tracking_uri(asked: str | None) -> str:
    """The URI asked for, else MLFLOW_TRACKING_URI, else a SQLite file in the current folder."""
    return asked or os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_URI


def absolute_uri(asked: str | None) -> str:
    """The same, whatever the current folder will be."""
    uri = tracking_uri(asked)
    prefix = "sqlite:///"
    return prefix + str(Path(uri.removeprefix(prefix)).resolve()) if uri.startswith(prefix) else uri


class TrackedRun:
    """A run in MLflow that is being written."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id

    def metrics(self, values: Mapping[str, float], step: int | None = None) -> None:
        """Log figures; with `step` as points of curves."""
        import mlflow

        mlflow.log_metrics(dict(values), step=step)

    def curve(self, name: str, steps: Sequence[int], values: Sequence[float]) -> None:
        """Log a figure as it went, step by step."""
        import mlflow
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        points = [Metric(name, v, now, s) for s, v in zip(steps, values, strict=True)]
        mlflow.MlflowClient().log_batch(self.run_id, metrics=points)

    def register(self, folder: Path, name: str, tags: Mapping[str, str]) -> str:
        """Log a folder and register it as the next version of a model; returns the version."""
        import mlflow
        from mlflow.exceptions import MlflowException

        mlflow.log_artifacts(str(folder), name)
        client = mlflow.MlflowClient()
        with suppress(MlflowException):  # it is registered already
            client.create_registered_model(name)
        source = mlflow.get_artifact_uri(name)
        version = client.create_model_version(name, source, self.run_id, tags=dict(tags))
        return str(version.version)

    def artifact(self, path: Path, folder: str | None = None) -> None:
        """Log a file."""
        import mlflow

        mlflow.log_artifact(str(path), folder)

    def tags(self, values: Mapping[str, str]) -> None:
        """Add tags."""
        import mlflow

        mlflow.set_tags(dict(values))


@contextmanager
def tracked_run(
    kind: str, parameters: Mapping[str, Any], uri: str | None = None, run_id: str | None = None
) -> Iterator[TrackedRun]:
    """A run of that kind with its parameters, hardware and versions; UserError if it cannot be.

    With `run_id` an earlier run goes on.
    """
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # not two minutes in silence
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    import mlflow
    from mlflow.exceptions import MlflowException

    for name in ("alembic", "mlflow"):
        logging.getLogger(name).setLevel(logging.WARNING)
    where = tracking_uri(uri)
    try:
        mlflow.set_tracking_uri(where)
        _choose_experiment(where)
        run = mlflow.start_run(run_id, run_name=kind, tags=_tags(kind))
    except (MlflowException, OSError, ValueError) as error:
        reason = str(error).splitlines()[0][:200]
        raise UserError(f"MLflow cannot be used at {where}: {reason}") from error
    try:
        if run_id is None:  # parameters of a run never change
            mlflow.log_params({name: str(value) for name, value in parameters.items()})
        yield TrackedRun(run.info.run_id)
    except KeyboardInterrupt:
        mlflow.end_run("KILLED")
        raise
    except BaseException:
        mlflow.end_run("FAILED")
        raise
    mlflow.end_run()


def _choose_experiment(uri: str) -> None:
    """Use our experiment; beside a local SQLite file its artifacts lie in a folder next to it."""
    import mlflow

    if mlflow.get_experiment_by_name(EXPERIMENT) is None:
        location = None
        if uri.startswith("sqlite:///"):
            location = (
                Path(uri.removeprefix("sqlite:///")).resolve().parent / "mlartifacts"
            ).as_uri()
        try:
            mlflow.create_experiment(EXPERIMENT, artifact_location=location)
        except mlflow.exceptions.MlflowException:
            if mlflow.get_experiment_by_name(EXPERIMENT) is None:  # not made by another meanwhile
                raise
    mlflow.set_experiment(EXPERIMENT)


def _tags(kind: str) -> dict[str, str]:
    tags = {"kind": kind, "host": platform.node(), "python": platform.python_version()}
    commit = _git_commit()
    return {**tags, "git_commit": commit} if commit else tags


def _git_commit() -> str | None:
    """The commit of the code that runs, if it runs from a checkout."""
    try:
        answer = subprocess.run(
            ["git", "rev-parse", "HEAD"],  # noqa: S607 - whichever git the user has
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
            timeout=5,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()
