"""Datasets of a run for MLflow: tables and stores of measurements."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoshard.benchmark import MeasurementStore
from autoshard.benchmark.store.file import COLUMNS
from autoshard.workload import EmbeddingTable
from autoshard.workload.tables.table import digest

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput


def tables_source(named: str, tables: Sequence[EmbeddingTable]) -> "DatasetInput":
    """Returns the dataset of tables that `--tables` names."""
    profile = {
        "tables": len(tables),
        "rows": sum(table.rows for table in tables),
        "mean_dim": round(sum(table.dim for table in tables) / max(1, len(tables)), 2),
    }
    uri = str(Path(named).resolve()) if Path(named).exists() else named
    return _dataset("tables", uri, digest([table.whole().digest for table in tables]), profile)


def store_source(path: Path) -> "DatasetInput":
    """Returns the dataset of a store in its current state: SQLite, or a Parquet file."""
    file = path.resolve()
    if file.suffix == ".parquet":
        stat = file.stat()
        content, profile = digest([stat.st_size, stat.st_mtime_ns]), {"bytes": stat.st_size}
    else:
        with MeasurementStore(file) as store:
            when = [row[COLUMNS.index("measured_at")] for row in store.rows()]
        content, profile = digest(sorted(when)), {"measurements": len(when)}
    return _dataset("measurements", str(file), content, profile)


def short_name(named: str) -> str:
    """Returns the file name of a path; other names, such as `synthetic:400:1`, as they are."""
    return Path(named).name


def _dataset(context: str, uri: str, content: str, profile: dict[str, Any]) -> "DatasetInput":
    from mlflow.entities import Dataset, DatasetInput, InputTag

    source, described = json.dumps({"uri": uri}), json.dumps(profile)
    dataset = Dataset(short_name(uri), content[:36], "local", source, profile=described)
    return DatasetInput(dataset, [InputTag("mlflow.data.context", context)])
