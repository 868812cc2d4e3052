"""Logging to MLflow: how runs are named, tagged and stored.

All runs are in the experiment `autoshard`. They can be found by:

- tags `kind` (ppo_shard, tune_shard, trial, collect_costs, train_cost_model, compare), `tables`,
  `hardware`, `num_devices`, `git_commit`, `host`, `autoshard`, `torch`, `fbgemm`, `ray`;
- datasets: tables (context `tables`) and stores (context `measurements`) that were used;
- `mlflow.parentRunId`: the sweep that a trial belongs to.
"""

import fcntl
import getpass
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from autoshard.experiments.console.checkout import git_commit
from autoshard.experiments.console.mlflow_uris import absolute_uri, check_reachable, sqlite_file
from autoshard.experiments.tracking.data_sources import short_name
from autoshard.workload import ShardingPlan, UserError
from autoshard.workload.errors import reason_of

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput

    from autoshard.benchmark import PlanCost

EXPERIMENT = "autoshard"
POLICIES, COST_MODELS = "autoshard-policy", "autoshard-cost-model"  # in the registry
# Options about where results go, which would be noise where runs are compared.
_HOUSEKEEPING = frozenset(
    ("out", "json", "store", "storage", "resume", "force", "mlflow_uri", "register")
)
_REGISTERED = re.compile(r"[^/:@%.\s][^/:@%]*(@(?!latest$|[vV]\d+$)[\w-]+)?")
_SAMPLE_SECONDS, _SAMPLES = 20, 3  # the use of the machine: a mean each minute
_OWN_TAGS = ("mlflow.runName", "mlflow.note.content", "mlflow.parentRunId")  # not inherited
VIEW = "results"  # the UI's saved view: ...#/experiments/ID/runs?viewStateShareKey=results
_COLUMNS = {
    "tags.`kind`": 100,
    "metrics.`test/policy`": 100,
    "metrics.`test/autoshard`": 120,
    "metrics.`score`": 80,
    "params.`num_tables`": 100,
    "params.`num_devices`": 105,
    "params.`reward`": 90,
    "params.`seed`": 60,
    "attributes.`Dataset`": 230,
}  # widths of columns
_VERSIONS = {
    "autoshard": "autoshard",
    "torch": "torch",
    "ray": "ray",
    "fbgemm": "fbgemm-gpu",
    "fbgemm_cpu": "fbgemm-gpu-cpu",
}


def check_registered(named: str | None) -> None:
    """Raises UserError unless a model can be registered as `NAME` or `NAME@ALIAS`."""
    if named is not None and not _REGISTERED.fullmatch(named):
        raise UserError(f"--register {named}: write NAME or NAME@ALIAS, as in my-model@champion")


class TrackedRun:
    """A run in MLflow that is being written. It has no global state: many may be open at once."""

    def __init__(self, client: Any, run_id: str, experiment: str) -> None:
        self._client, self.run_id, self._experiment = client, run_id, experiment

    @classmethod
    def at(cls, uri: str, run_id: str, experiment: str) -> "TrackedRun":
        """Returns the run at a tracking URI, on any machine that can reach it."""
        from mlflow import MlflowClient

        return cls(MlflowClient(uri), run_id, experiment)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.at, (self._client.tracking_uri, self.run_id, self._experiment)

    def metrics(self, values: Mapping[str, float], step: int | None = None) -> None:
        """Logs finite metrics, as points of curves if a step is given."""
        self._log_points([(name, step or 0, value) for name, value in values.items()])

    def curve(self, name: str, steps: Sequence[int], values: Sequence[float]) -> None:
        """Logs a metric at many steps."""
        self._log_points([(name, s, v) for s, v in zip(steps, values, strict=True)])

    def _log_points(self, points: Sequence[tuple[str, int, float]]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, float(v), now, s) for name, s, v in points if math.isfinite(v)]
        self._client.log_batch(self.run_id, metrics=metrics)

    def tags(self, values: Mapping[str, Any]) -> None:
        """Adds tags."""
        from mlflow.entities import RunTag

        self._client.log_batch(self.run_id, tags=[RunTag(n, str(v)) for n, v in values.items()])

    def data(self, *inputs: "DatasetInput") -> None:
        """Logs the datasets that were used."""
        from mlflow.exceptions import MlflowException

        try:
            self._client.log_inputs(self.run_id, list(inputs))
        except MlflowException:  # another run has just written the same dataset
            self._client.log_inputs(self.run_id, list(inputs))

    def artifact(self, path: Path, folder: str | None = None) -> None:
        """Logs a file, or a folder with all its files."""
        import requests

        log = self._client.log_artifacts if path.is_dir() else self._client.log_artifact
        try:
            log(self.run_id, str(path), folder)
        except (requests.RequestException, OSError) as error:  # a server, or a full disk
            raise UserError(f"MLflow cannot store {path.name}: {reason_of(error)}") from error

    def model(self, files: Iterable[Path], name: str) -> None:
        """Logs the files of a cost model or a policy as a model of MLflow."""
        from autoshard.experiments.tracking.mlflow_models import save_for_mlflow

        with tempfile.TemporaryDirectory() as place:
            save_for_mlflow(files, Path(place) / name)
            self.artifact(Path(place) / name, name)

    def plan(self, name: str, plan: ShardingPlan, cost: "PlanCost") -> None:
        """Logs a plan as JSON and as a picture of its devices' costs, under `plans/`."""
        with tempfile.TemporaryDirectory() as place:
            picture, document = Path(place) / f"{name}.png", Path(place) / f"{name}.plan.json"
            cost.picture(picture, name)
            plan.save(document)
            self.artifact(Path(place), "plans")

    def register(
        self, files: Iterable[Path], named: str, tags: Mapping[str, str], folder: str | None = None
    ) -> str:
        """Logs a model and registers it as the next version of `NAME`, or `NAME@ALIAS`.

        Args:
            files: Files of a cost model or a policy.
            named: Name in the registry, and the alias that the version gets.
            tags: Tags of the version.
            folder: Folder among the artifacts of the run. Default: the name.

        Returns:
            The version.
        """
        from mlflow.exceptions import MlflowException

        name, _, alias = named.partition("@")
        self.model(files, folder or name)
        with suppress(MlflowException):  # it is registered already
            self._client.create_registered_model(name)
        source = f"{self._client.get_run(self.run_id).info.artifact_uri}/{folder or name}"
        version = self._client.create_model_version(name, source, self.run_id, tags=dict(tags))
        if alias:
            self._client.set_registered_model_alias(name, alias, version.version)
        return str(version.version)

    def child(self, kind: str, key: str, parameters: Mapping[str, Any]) -> "TrackedRun":
        """Returns the child run of a kind and key; creates one with the tags of this run."""
        mine = f"tags.`mlflow.parentRunId` = '{self.run_id}' AND tags.kind = '{kind}'"
        siblings = self._client.search_runs([self._experiment], mine)
        for run in siblings:
            if run.data.tags.get("key") == key:
                return TrackedRun(self._client, run.info.run_id, self._experiment)
        parent = self._client.get_run(self.run_id)
        inherited = {n: tag for n, tag in parent.data.tags.items() if n not in _OWN_TAGS}
        tags = {**inherited, "kind": kind, "key": key, "mlflow.parentRunId": self.run_id}
        name = f"{kind} {len(siblings) + 1}"
        run = self._client.create_run(self._experiment, run_name=name, tags=tags)
        child = TrackedRun(self._client, run.info.run_id, self._experiment)
        child.parameters({**parent.data.params, **parameters})
        if parent.inputs.dataset_inputs:
            self._client.log_inputs(child.run_id, parent.inputs.dataset_inputs)
        return child

    def parameters(self, values: Mapping[str, Any]) -> None:
        """Logs parameters, which cannot be changed later."""
        from mlflow.entities import Param

        logged = {name: v for name, v in flat(values).items() if name not in _HOUSEKEEPING}
        self._client.log_batch(self.run_id, params=[Param(n, str(v)) for n, v in logged.items()])

    def note(self, markdown: str) -> None:
        """Sets the text at the top of the run's page."""
        self.tags({"mlflow.note.content": markdown})

    def go_on(self) -> None:
        """Marks the run as running again."""
        self._client.update_run(self.run_id, "RUNNING")

    def link(self, runs: Sequence["TrackedRun"]) -> str:
        """Returns the link to the page that compares runs."""
        ids = quote(json.dumps([run.run_id for run in runs]))
        return f"#/compare-runs?runs={ids}&experiments={quote(json.dumps([self._experiment]))}"

    def end(self, status: str = "FINISHED") -> None:
        """Ends the run as FINISHED, FAILED or KILLED."""
        self._client.set_terminated(self.run_id, status)


@contextmanager
def tracked_run(
    kind: str,
    name: str,
    parameters: Mapping[str, Any],
    uri: str | None = None,
    run_id: str | None = None,
) -> Iterator[TrackedRun]:
    """Provides a run, and ends it as FINISHED, FAILED or KILLED.

    Args:
        kind: Tag `kind`.
        name: Name of the run.
        parameters: Parameters of the run.
        uri: Tracking URI.
        run_id: Earlier run to continue.

    Raises:
        UserError: MLflow cannot be used at the URI, or fails later.
    """
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    where = absolute_uri(uri)
    try:
        run = _begun(kind, name, parameters, where, run_id)
    except (
        MlflowException, SQLAlchemyError, OSError, ValueError, ImportError, UserError,
    ) as error:  # fmt: skip
        raise UserError(f"MLflow cannot be used at {where}: {reason_of(error)}") from error
    try:
        with _system_metrics(run.run_id, where, run_id is not None):
            yield run
        run.end()
    except BaseException as error:
        with suppress(Exception):  # MLflow may not answer
            run.end("KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
        if isinstance(error, MlflowException):
            reason = reason_of(error)
            raise UserError(f"MLflow at {where} fails: {reason} Results so far are kept") from error
        raise


def _begun(
    kind: str, name: str, parameters: Mapping[str, Any], where: str, run_id: str | None
) -> TrackedRun:
    check_reachable(where)
    from mlflow import MlflowClient

    with _alone(where):
        client = MlflowClient(where)
        experiment = _experiment(client, where)
    if run_id is not None and _is_there(client, run_id):
        earlier = TrackedRun(client, run_id, experiment)
        earlier.go_on()
        return earlier
    tags = _tags(kind)
    if "tables" in parameters:
        tags["tables"] = short_name(str(parameters["tables"]))
    if parameters.get("out") is not None:
        tags["out"] = str(parameters["out"])
    made = client.create_run(experiment, run_name=name, tags=tags)
    run = TrackedRun(client, made.info.run_id, experiment)
    run.parameters(parameters)
    return run


@contextmanager
def _system_metrics(run_id: str, uri: str, resumed: bool) -> Iterator[None]:
    """Logs the use of CPUs, memory, GPUs, disk and network each minute, as `system/...`."""
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

    make: Any = SystemMetricsMonitor  # it has no types
    monitor = make(run_id, _SAMPLE_SECONDS, _SAMPLES, resumed, tracking_uri=uri)
    monitor.start()
    try:
        yield
    finally:
        monitor.finish()


def _is_there(client: Any, run_id: str) -> bool:
    """Returns whether a run exists; it may be in the file of a machine that is lost."""
    from mlflow.exceptions import MlflowException

    try:
        client.get_run(run_id)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return False
        raise
    return True


@contextmanager
def _alone(uri: str) -> Iterator[None]:
    """Holds a lock, because MLflow creates the tables of a new SQLite file without one."""
    if sqlite_file(uri) is None:
        yield
        return
    name = hashlib.sha256(uri.encode()).hexdigest()[:16]
    with open(Path(tempfile.gettempdir()) / f"autoshard-mlflow-{os.getuid()}-{name}", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _experiment(client: Any, uri: str) -> str:
    """Returns the experiment. Artifacts of a local SQLite file are in a folder next to it."""
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(EXPERIMENT)
    if found is None:
        file = sqlite_file(uri)
        location = None if file is None else (file.parent / "mlartifacts").as_uri()
        # By default, the UI's table of runs shows no metrics.
        names = [*_COLUMNS]
        state = {"selectedColumns": names, "columnOrder": names, "columnWidths": _COLUMNS}
        view = {"name": "Results", "createdAt": 0, "updatedAt": 0, "state": json.dumps(state)}
        try:
            created = str(client.create_experiment(EXPERIMENT, artifact_location=location))
            client.set_experiment_tag(created, f"mlflow.sharedViewState.{VIEW}", json.dumps(view))
        except MlflowException:
            found = client.get_experiment_by_name(EXPERIMENT)  # another process may have created it
            if found is None:
                raise
        else:
            return created
    return str(found.experiment_id)


def _tags(kind: str) -> dict[str, str]:
    tags = {
        "kind": kind,
        "host": platform.node(),
        "python": platform.python_version(),
        "mlflow.source.name": Path(sys.argv[0]).name,
        "mlflow.source.type": "LOCAL",
        "mlflow.user": str(os.getuid()),
    }
    with suppress(KeyError, OSError):  # a container's user may have no name
        tags["mlflow.user"] = getpass.getuser()
    for tag, package in _VERSIONS.items():
        with suppress(importlib.metadata.PackageNotFoundError):
            tags[tag.partition("_")[0]] = importlib.metadata.version(package)
    commit = git_commit()
    return {**tags, "git_commit": commit, "mlflow.source.git.commit": commit} if commit else tags


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns `{"hyper.clip": 0.2}` for `{"hyper": {"clip": 0.2}}`."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found
