"""Writes tables to files that `load_tables` reads."""

import os
from collections.abc import Sequence
from pathlib import Path

from autoshard.workload import documents
from autoshard.workload.errors import UserError
from autoshard.workload.tables.table import EmbeddingTable

SUFFIXES = (".json", ".parquet")  # a CSV file has no place for access curves


def save_tables(tables: Sequence[EmbeddingTable], path: Path) -> None:
    """Writes tables as JSON or Parquet, by the suffix of the path, atomically."""
    records = [table.to_json() for table in tables]
    if path.suffix == ".json":
        documents.write(path, {"tables": records})
        return
    import pyarrow
    import pyarrow.parquet

    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        names = dict.fromkeys(name for record in records for name in record)
        columns = {name: [record.get(name) for record in records] for name in names}
        pyarrow.parquet.write_table(pyarrow.table(columns), partial)
        partial.replace(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from error
