"""URIs of MLflow: its server, and models, which options name in place of folders and files.

What `models:/NAME/VERSION`, `models:/NAME@ALIAS` and `runs:/ID/PATH` name is copied into the user's
cache, and commands read the copies. Only then is MLflow loaded.
"""

import hashlib
import logging
import os
import re
import shutil
import socket
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from autoshard.experiments.console.inputs import check_file
from autoshard.workload import UserError
from autoshard.workload.errors import reason_of

Config = TypeVar("Config")

DEFAULT_URI = "sqlite:///mlflow.db"
_SQLITE = "sqlite:///"
_ANSWER_SECONDS = 5.0
_PORTS = {"http": 80, "https": 443, "postgresql": 5432, "mysql": 3306}
_NAMED = re.compile(r"(?<![^=,])(?:models|runs):/[^,]+")  # alone, or as in NAME=URI,NAME=URI


def absolute_uri(requested: str | None) -> str:
    """Returns the requested URI, else MLFLOW_TRACKING_URI, else a SQLite file in this folder.

    The result does not depend on the current folder.
    """
    uri = requested or os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_URI
    file = sqlite_file(uri)
    return uri if file is None else f"{_SQLITE}{file}"


def sqlite_file(uri: str) -> Path | None:
    """Returns the absolute path of the SQLite file at a tracking URI; None if it is a server's."""
    return Path(uri.removeprefix(_SQLITE)).resolve() if uri.startswith(_SQLITE) else None


def check_reachable(uri: str) -> None:
    """Raises OSError or UserError where MLflow would retry for minutes without output."""
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    for logger in ("alembic", "mlflow"):
        logging.getLogger(logger).setLevel(logging.WARNING)
    check_file(sqlite_file(uri), "MLflow")
    parts = urlsplit(uri)
    port = parts.port or _PORTS.get(parts.scheme.partition("+")[0])
    if parts.hostname and port:
        socket.create_connection((parts.hostname, port), _ANSWER_SECONDS).close()


def with_copies(options: Config) -> Config:
    """Returns the options of a command with copies in place of models and files in MLflow.

    Raises:
        UserError: MLflow cannot be used, or has no such model.
    """
    uri = absolute_uri(getattr(options, "mlflow_uri", None))

    def local(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(local(each) for each in value)
        if not isinstance(value, str | Path):
            return value
        return type(value)(_NAMED.sub(lambda found: str(_copy(found[0], uri)), str(value)))

    changed = {name: local(value) for name, value in vars(options).items()}
    return replace(options, **{n: v for n, v in changed.items() if v != getattr(options, n)})  # type: ignore[type-var]


def _copy(named: str, uri: str) -> Path:
    """Returns the copy of a model, or of a file or folder of a run, in the user's cache."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    if (file := sqlite_file(uri)) is not None and not file.exists():
        raise UserError(f"{named}: {file} does not exist: set MLFLOW_TRACKING_URI")
    try:
        check_reachable(uri)
        return _downloaded(named, uri)
    except (MlflowException, SQLAlchemyError, OSError, ValueError, ImportError, UserError) as error:
        raise UserError(f"{named}: MLflow at {uri} cannot give it: {reason_of(error)}") from error


def _downloaded(named: str, uri: str) -> Path:
    from mlflow import MlflowClient
    from mlflow.artifacts import download_artifacts
    from mlflow.store.artifact.models_artifact_repo import ModelsArtifactRepository
    from mlflow.store.artifact.runs_artifact_repo import RunsArtifactRepository
    from mlflow.store.artifact.utils.models import get_model_name_and_version

    from autoshard.integration.planning.stores import probe_store

    of_run = named.startswith("runs")
    if of_run:
        name, source = named, RunsArtifactRepository.get_underlying_uri(named, uri)
    else:
        client = MlflowClient(uri, uri)
        model, path = ModelsArtifactRepository.split_models_uri(named)  # type: ignore[no-untyped-call]
        version = get_model_name_and_version(client, model)  # type: ignore[no-untyped-call]
        if len(version) < 2:
            raise UserError("name a version or an alias")
        name = "-".join((*map(str, version), path))
        source = f"{client.get_model_version_download_uri(*version)}/{path}".rstrip("/")
    key = hashlib.sha256(f"{uri} {source}".encode()).hexdigest()[:8]
    target = probe_store().with_name("models") / key / re.sub(r"[^\w.@]+", "-", name).strip("-")
    if of_run or not target.exists():  # a version does not change, a run may
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as place:
            found = download_artifacts(source, dst_path=f"{place}/copy", tracking_uri=uri)
            shutil.rmtree(target, ignore_errors=True)
            Path(found).rename(target)
    return target
