"""Datasets of a run for MLflow: tables and stores of measurements."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from autoshard.benchmark import MeasurementStore
from autoshard.benchmark.store import COLUMNS
from autoshard.workload import EmbeddingTable
from autoshard.workload.tables import digest


@dataclass(frozen=True)
class DataSource:
    """Tables or a store of measurements.

    Args:
        name: Displayed name.
        digest: Digest of the content.
        uri: Location.
        context: Kind of data.
        profile: Summary of the content.
    """

    name: str
    digest: str
    uri: str
    context: Literal["tables", "measurements"]
    profile: Mapping[str, Any]


def tables_source(named: str, tables: Sequence[EmbeddingTable]) -> DataSource:
    """Returns the source of tables that `--tables` names."""
    content = digest([table.whole().digest for table in tables])
    profile = {
        "tables": len(tables),
        "rows": sum(table.rows for table in tables),
        "mean_dim": round(sum(table.dim for table in tables) / max(1, len(tables)), 2),
    }
    uri = str(Path(named).resolve()) if Path(named).exists() else named
    return DataSource(short_name(named), content, uri, "tables", profile)


def store_source(path: Path) -> DataSource:
    """Returns the source of a store in its current state: SQLite, or a Parquet file."""
    where = path.resolve()
    if where.suffix == ".parquet":
        stat = where.stat()
        content, profile = digest([stat.st_size, stat.st_mtime_ns]), {"bytes": stat.st_size}
    else:
        with MeasurementStore(where) as store:
            when = [row[COLUMNS.index("measured_at")] for row in store.rows()]
        content, profile = digest(sorted(when)), {"measurements": len(when)}
    return DataSource(where.name, content, str(where), "measurements", profile)


def short_name(named: str) -> str:
    """Returns the file name of a path; other names, such as `synthetic:400:1`, as they are."""
    return Path(named).name
