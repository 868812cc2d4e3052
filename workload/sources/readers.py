"""Reads tables from files, generators and published workloads."""

import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from autoshard.workload import documents
from autoshard.workload.access import traces
from autoshard.workload.errors import FieldError, UserError
from autoshard.workload.sources.families import family_tables
from autoshard.workload.sources.synthetic import synthetic_tables
from autoshard.workload.tables.row_access import RowAccess
from autoshard.workload.tables.table import NUM_REUSE_BINS, EmbeddingTable, Trace
from autoshard.workload.tasks.task import TASK_SCHEMA

SOURCES = """\
FILE.csv, FILE.json or FILE.parquet with name, rows, dim, pooling_factor and optionally zipf_alpha
or reuse_0..reuse_16 (and reuse_batch_size), features, weighted; FILE.json
of fbgemm's TBEDataConfig; FILE.pt or FILE.pt.gz[:DIM] in the format of dlrm_datasets;
synthetic:N[:SEED[:small|full]]; wide:N[:SEED], features:N[:SEED], zipf:N[:SEED], hot:N[:SEED],
cold:N[:SEED], giants:N[:SEED] or directions:N[:SEED]; or criteo or mlperf:dlrm-v2, both with
[:1/SCALE] of their rows"""

_REQUIRED = ("name", "rows", "dim", "pooling_factor")
_REUSE = tuple(f"reuse_{number}" for number in range(NUM_REUSE_BINS))
_WHOLE = ("rows", "dim", "reuse_batch_size", "features")
_BOOLEANS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
_SYNTHETIC = re.compile(r"synthetic:(\d+)(?::(\d+))?(?::(\w+))?")
_TRACE = re.compile(r"(.+\.pt(?:\.gz)?)(?::(\d+))?")

Records = Iterator[tuple[str, Mapping[str, Any]]]  # the place of each record, and its fields


def load_tables(source: str) -> tuple[EmbeddingTable, ...]:
    """Returns the tables of a source (see SOURCES); UserError names file, line, column and fix."""
    if source.startswith("synthetic"):
        return _synthetic(source)
    if (family := family_tables(source)) is not None:
        return family
    if match := _TRACE.fullmatch(source):
        with documents.fields_of(source):
            return traces.read_tables(_existing(match[1]), int(match[2] or traces.DEFAULT_DIM))
    path = _existing(source)
    if path.suffix not in _READERS:
        raise UserError(f"{source}: tables are read from " + " ".join(SOURCES.split()))
    tables: dict[str, EmbeddingTable] = {}
    places: dict[str, str] = {}
    for place, record in _READERS[path.suffix](path):
        try:
            table = _table(record)
        except FieldError as error:
            raise UserError(f"{path}, {place}, column {error.field}: {error.problem}") from error
        if table.name in tables:
            raise UserError(
                f"{path}, {place}, column name: {table.name!r} is also at "
                f"{places[table.name]}: give each table its own name"
            )
        tables[table.name], places[table.name] = table, place
    if not tables:
        raise UserError(f"{path}: holds no tables: it needs one line per table")
    return tuple(tables.values())


def _synthetic(source: str) -> tuple[EmbeddingTable, ...]:
    match = _SYNTHETIC.fullmatch(source)
    if not match:
        raise UserError(
            f"{source}: write synthetic:N[:SEED[:small|full]], for example synthetic:200:1"
        )
    with documents.naming(source):
        return synthetic_tables(int(match[1]), int(match[2] or 0), match[3])


def _existing(name: str) -> Path:
    path = Path(name).expanduser()
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise UserError(f"{name}: {what}: tables come from " + " ".join(SOURCES.split()))
    return path


def _csv_records(path: Path) -> Records:
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            header = [cell.strip() for cell in next(reader, [])]
            if not header:
                raise UserError(f"{path}: is empty: it needs a header with {', '.join(_REQUIRED)}")
            _check_columns(path, "line 1", header)
            for cells in reader:
                if not any(cell.strip() for cell in cells):
                    continue
                place = f"line {reader.line_num}"
                if len(cells) != len(header):
                    raise UserError(
                        f"{path}, {place}: has {len(cells)} cells, the header has {len(header)}"
                    )
                yield place, dict(zip(header, (cell.strip() for cell in cells), strict=True))
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not a UTF-8 text file: save it as CSV in UTF-8") from error
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: {error}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error


def _json_records(path: Path) -> Records:
    with documents.naming(path):
        document = documents.read(path)
        if isinstance(document, Mapping):
            if "schema" in document:
                TASK_SCHEMA.check(document)
            if "indices_params" in document:
                from autoshard.workload.sources.tbe_data_config import tables_of

                document = {"tables": [table.to_json() for table in tables_of(document)]}
            document = document.get("tables")
        if not isinstance(document, list):
            raise UserError('needs a list of tables, or an object with a list "tables"')
    for number, record in enumerate(document, start=1):
        if not isinstance(record, Mapping):
            raise UserError(f"{path}, table {number}: is not an object: {json.dumps(record)[:60]}")
        yield f"table {number}", record


def _parquet_records(path: Path) -> Records:
    import pyarrow
    import pyarrow.parquet

    try:
        content = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0][:120]
        raise UserError(f"{path}: is not a Parquet file that can be read ({reason})") from error
    _check_columns(path, "schema", content.column_names)
    for number, record in enumerate(content.to_pylist(), start=1):
        yield f"row {number}", record


_READERS: dict[str, Callable[[Path], Records]] = {
    ".csv": _csv_records,
    ".json": _json_records,
    ".parquet": _parquet_records,
}


def _check_columns(path: Path, place: str, columns: list[str]) -> None:
    for column in _REQUIRED:
        if column not in columns:
            raise UserError(
                f"{path}, {place}, column {column}: is missing: "
                f"the columns {', '.join(_REQUIRED)} are needed"
            )
    for column in columns:
        if columns.count(column) > 1:
            raise UserError(f"{path}, {place}, column {column}: occurs twice: keep one of them")


def _table(record: Mapping[str, Any]) -> EmbeddingTable:
    """Returns the table of one record; other columns are ignored."""
    fields: dict[str, Any] = {}
    for column in _REQUIRED:
        if _is_empty(record.get(column)):
            raise FieldError(column, "is missing: every table needs it")
    fields["name"] = str(record["name"])
    for column in (*_REQUIRED[1:], "zipf_alpha", "reuse_batch_size", "features"):
        if not _is_empty(record.get(column)):
            fields[column] = _number(column, record[column])
    if not _is_empty(record.get("weighted")):
        fields["weighted"] = _boolean("weighted", record["weighted"])
    if record.get("reuse") is not None:
        if not isinstance(record["reuse"], list | tuple):
            raise FieldError("reuse", f"must be a list of {NUM_REUSE_BINS} numbers")
        fields["reuse"] = tuple(_number("reuse", share) for share in record["reuse"])
    elif any(not _is_empty(record.get(column)) for column in _REUSE):
        for column in _REUSE:
            if _is_empty(record.get(column)):
                raise FieldError(column, "is missing: give all of reuse_0 to reuse_16 or none")
        fields["reuse"] = tuple(_number(column, record[column]) for column in _REUSE)
    return EmbeddingTable(**fields, **_nested(record))


def _nested(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that are objects, for which CSV files have no place."""
    found: dict[str, Any] = {}
    if record.get("trace") is not None:
        with documents.fields_of("trace"):
            found["trace"] = Trace(**record["trace"])
    if isinstance(record.get("access"), Mapping):
        found["access"] = RowAccess.from_json(record["access"])
    return found


def _is_empty(value: Any) -> bool:
    return value is None or value == ""


def _boolean(column: str, value: Any) -> bool:
    known = _BOOLEANS.get(str(value).strip().lower())
    if known is None:
        raise FieldError(column, f"must be true or false, got {value!r}")
    return known


def _number(column: str, value: Any) -> float | int:
    try:
        number = float(value if not isinstance(value, bool) else "")
    except (TypeError, ValueError, OverflowError):
        raise FieldError(column, f"must be a number, got {value!r}") from None
    if column not in _WHOLE:
        return number
    if number != number or abs(number) == float("inf") or number != int(number):
        raise FieldError(column, f"must be a whole number, got {value!r}")
    return int(value) if isinstance(value, int) else int(number)
