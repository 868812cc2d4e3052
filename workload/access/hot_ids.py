"""Files of hot ids: the most used rows of tables, in the order of use."""

import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from autoshard.workload import documents
from autoshard.workload.arrays import Ints
from autoshard.workload.errors import UserError
from autoshard.workload.tables.table import EmbeddingTable


def save_hot_ids(ids: Mapping[str, Any], path: Path | str) -> None:
    """Writes ids of the most used rows of tables, in the order of use, as a .npz file.

    Args:
        ids: Ids by table, each [count].
        path: The file.
    """
    arrays = [np.asarray(some, np.int64) for some in ids.values()]
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial")
    with documents.naming(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                np.savez_compressed(
                    file,
                    tables=np.array(list(ids), dtype=np.str_),
                    counts=np.array([len(some) for some in arrays], np.int64),
                    ids=np.concatenate([np.zeros(0, np.int64), *arrays]),
                )
            partial.replace(path)
        except OSError as error:
            raise UserError(f"cannot be written: {error.strerror}") from error


def load_hot_ids(path: Path | str) -> dict[str, Ints]:
    """Reads ids that `save_hot_ids`, or profile_tables.py --hot-ids, wrote."""
    with documents.naming(path):
        try:
            with np.load(path, allow_pickle=False) as found:
                ends = np.cumsum(found["counts"])
                parts = np.split(found["ids"].astype(np.int64), ends)[:-1]
                return dict(zip(found["tables"].tolist(), parts, strict=True))
        except OSError as error:
            raise UserError(f"cannot be read: {error.strerror or error}") from error
        except (ValueError, TypeError, LookupError, EOFError, zipfile.BadZipFile):
            what = "is no file of hot ids, which profile_tables.py --hot-ids writes"
            raise UserError(what) from None


def hottest_ids(counts: Mapping[str, int], known: Mapping[str, Ints]) -> dict[str, Ints]:
    """Returns the ids of so many of the most used rows of tables.

    Args:
        counts: Number of rows of each table of a plan that has hot rows.
        known: Ids by table, in the order of use.
    """
    if missing := sorted(set(counts) - set(known)):
        raise UserError(f"no ids of table {missing[0]}, of which the plan copies hot rows")
    return {name: known[name][:count] for name, count in counts.items()}


def check_hot_ids(ids: Mapping[str, Ints], tables: Iterable[EmbeddingTable]) -> None:
    """Raises UserError unless ids are different rows of these tables."""
    for table in tables:
        if table.name in ids:
            check_rows(table.name, table.rows, ids[table.name])


def check_rows(table: str, rows: int, ids: Ints) -> None:
    """Raises UserError unless ids are different rows of a table with so many rows."""
    if not len(ids):
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= rows:
        wrong = low if low < 0 else high
        raise UserError(
            f"hot id {wrong} of table {table} is none of its {rows} rows: profile this table"
        )
    if len(np.unique(ids)) < len(ids):
        raise UserError(f"hot ids of table {table} name a row twice: profile this table")
