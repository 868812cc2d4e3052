"""Stores as Parquet files: to publish, to train from, to merge what several clusters measured.

One row a visit, with its shard as a nested list and with its error, what it is worth by itself, so
that any tool reads it without ours.
All-to-alls go into a second file beside the first.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from autoshard.benchmark.measurement import (
    Exchange,
    ExchangeKey,
    Measurement,
    MeasureSettings,
    ReferenceLevel,
    Timing,
    method_of,
)
from autoshard.benchmark.statistics import standard_error
from autoshard.benchmark.store import COLUMNS, MeasurementStore, unpack_ids
from autoshard.workload import (
    EmbeddingTable,
    FieldError,
    OperatorOptions,
    Piece,
    Shard,
    Trace,
    UserError,
)

PARQUET_SCHEMA = "autoshard.measurements/4"
_READABLE = (*(f"autoshard.measurements/{version}" for version in (2, 3)), PARQUET_SCHEMA)

_TRACE = pa.struct(
    [("path", pa.string()), ("position", pa.int64()), ("batch_size", pa.int64()),
     ("digest", pa.string())]
)  # fmt: skip
_SLICE = pa.struct(
    [("name", pa.string()), ("rows", pa.int64()), ("dim", pa.int64()),
     ("pooling_factor", pa.float64()), ("zipf_alpha", pa.float64()),
     ("reuse", pa.list_(pa.float64())), ("reuse_batch_size", pa.int64()), ("trace", _TRACE),
     ("features", pa.int64()), ("weighted", pa.bool_()),
     ("start", pa.int64()), ("width", pa.int64())]
)  # fmt: skip
_TIMED = (
    "forward_ms", "backward_ms", "spread", "iterations", "disturbed", "foreign_load",
    "operator_seconds",
)  # fmt: skip
_TYPES = {
    "batch_size": pa.int64(), "seed": pa.int64(), "iterations": pa.int64(),
    "disturbed": pa.int64(), "forward_ms": pa.float64(), "backward_ms": pa.float64(),
    "spread": pa.float64(), "foreign_load": pa.float64(), "operator_seconds": pa.float64(),
    "measured_at": pa.float64(), "quiet_forward_ms": pa.float64(),
    "quiet_backward_ms": pa.float64(), "error": pa.float64(),
}  # fmt: skip
_PLAIN = tuple(column for column in COLUMNS if column != "slices")
# Costs are written as they are told, all of one hardware at one level.
_TOLD: dict[str, Callable[[Timing], float | None]] = {
    "forward_ms": lambda timing: timing.forward_ms,
    "backward_ms": lambda timing: timing.backward_ms,
    "quiet_forward_ms": lambda timing: (
        None if timing.reference_level is None else timing.reference_level.forward_ms
    ),
    "quiet_backward_ms": lambda timing: (
        None if timing.reference_level is None else timing.reference_level.backward_ms
    ),
    "error": lambda timing: timing.error,
}


def exchanges_path(path: Path | str) -> Path:
    """Where the all-to-alls that belong to a Parquet file of measurements lie."""
    whole = Path(path)
    return whole.with_name(f"{whole.stem}.exchanges.parquet")


def export_parquet(store: MeasurementStore, path: Path | str) -> int:
    """Write all visits (and all-to-alls, if there are any); returns how many visits."""
    timings = [visit.timing for visit in store.measurements()]
    rows, pieces = store.rows()[: len(timings)], store.pieces()
    numbers = sorted(pieces)
    position = {number: index for index, number in enumerate(numbers)}
    described = pa.array([_piece_record(pieces[number]) for number in numbers], type=_SLICE)
    packed = [unpack_ids(row[COLUMNS.index("slices")]) for row in rows]
    flat = pa.array([position[number] for ids in packed for number in ids], type=pa.int64())
    offsets = [0]
    for ids in packed:
        offsets.append(offsets[-1] + len(ids))
    columns: dict[str, pa.Array] = {
        name: pa.array(
            [row[COLUMNS.index(name)] for row in rows], type=_TYPES.get(name, pa.string())
        )
        for name in _PLAIN
        if name not in _TOLD
    }
    for name, told in _TOLD.items():
        values = [None if timing is None else told(timing) for timing in timings]
        columns[name] = pa.array(values, type=_TYPES[name])
    columns["shard"] = pa.ListArray.from_arrays(
        pa.array(offsets, type=pa.int32()), described.take(flat)
    )
    _write(pa.table(columns), path)
    exchanges = store.exchanges()
    if exchanges:
        _write(pa.Table.from_pylist([_exchange_record(e) for e in exchanges]), exchanges_path(path))
    return len(rows)


def import_parquet(store: MeasurementStore, path: Path | str) -> int:
    """Add the visits of a Parquet file; what the store already has stays as it is."""
    fresh = [visit for visit in read_parquet(path) if not store.has(visit)]
    store.put(fresh)
    for exchange in read_parquet_exchanges(path):
        if store.find_exchange(exchange.key, exchange.hardware, exchange.versions) is None:
            store.put_exchange(exchange)
    return len(fresh)


def read_parquet_exchanges(path: Path | str) -> list[Exchange]:
    """The all-to-alls that lie beside a Parquet file of measurements, if any do."""
    beside = exchanges_path(path)
    return [_exchange(record) for record in _read(beside)] if beside.exists() else []


def read_parquet(path: Path | str) -> list[Measurement]:
    """The measurements of a Parquet file; UserError names the file and what is wrong with it."""
    try:
        return [_measurement(record) for record in _read(path)]
    except FieldError as error:
        raise UserError(f"{path}: {error}") from error
    except (KeyError, TypeError) as error:
        raise UserError(f"{path}: is damaged: {error}") from error


def _measurement(record: dict[str, Any]) -> Measurement:
    operator = OperatorOptions(record["weights"], record["optimizer"])
    timing = None
    if record["status"] == "ok":
        fields = {name: record[name] for name in _TIMED}
        error = record.get("error")
        if error is None:  # an older file: what its iterations tell
            error = standard_error(fields["spread"], fields["iterations"])
        timing = Timing(**fields, reference_level=_level(record), error=error)
    return Measurement(
        shard=Shard(tuple(_piece(piece) for piece in record["shard"])),
        settings=MeasureSettings(record["batch_size"], operator, record["seed"]),
        hardware=record["hardware"],
        versions=record["versions"],
        status=record["status"],
        device=record["device"],
        node=record["node"],
        measured_at=record["measured_at"],
        timing=timing,
        reason=record["reason"],
        reused=True,
    )


def _level(record: dict[str, Any]) -> ReferenceLevel | None:
    """Where a cost is told; files before the third kept one number, and only ratios matter."""
    old = record.get("quiet_ms")
    forward_ms, backward_ms = (record.get(f"quiet_{n}_ms", old) for n in ("forward", "backward"))
    if forward_ms is None or backward_ms is None:
        return None
    return ReferenceLevel(forward_ms, backward_ms, method_of(record["versions"]))


def _piece_record(piece: Piece) -> dict[str, Any]:
    return {**piece.table.to_json(), "start": piece.start, "width": piece.width}


def _piece(record: dict[str, Any]) -> Piece:
    fields = {
        name: value
        for name, value in record.items()
        if name not in ("start", "width") and value is not None
    }
    if "trace" in fields:
        fields["trace"] = vars(Trace(**fields["trace"]))
    return Piece(EmbeddingTable.from_json(fields), record["start"], record["width"])


def _exchange_record(exchange: Exchange) -> dict[str, Any]:
    record = vars(exchange).copy()
    record.pop("key")
    return {**vars(exchange.key), **record}


def _exchange(record: dict[str, Any]) -> Exchange:
    fields = dict(record)
    key = ExchangeKey(tuple(fields.pop("dims")), fields.pop("batch_size"), fields.pop("devices"))
    forward, backward = tuple(fields.pop("forward_ms")), tuple(fields.pop("backward_ms"))
    return Exchange(key=key, forward_ms=forward, backward_ms=backward, **fields)


def _write(table: pa.Table, path: Path | str) -> None:
    target = Path(path)
    partial = target.with_name(f".{target.name}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        stamped = table.replace_schema_metadata({"schema": PARQUET_SCHEMA})
        pq.write_table(stamped, partial, compression="zstd")
        partial.replace(target)
    except OSError as error:
        raise UserError(f"{target}: cannot be written: {error}") from error


def _read(path: Path | str) -> Iterable[dict[str, Any]]:
    try:
        table = pq.read_table(path)
    except FileNotFoundError as error:
        raise UserError(f"{path}: does not exist") from error
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0][:120]
        raise UserError(f"{path}: is not a Parquet file that can be read ({reason})") from error
    schema = (table.schema.metadata or {}).get(b"schema", b"").decode()
    if schema not in _READABLE:
        raise UserError(
            f"{path}: is not a Parquet file of {PARQUET_SCHEMA} (it says {schema or 'nothing'})"
        )
    records: list[dict[str, Any]] = table.to_pylist()
    return records
