"""Parquet files of measurements: to publish, to train from, to merge stores of several clusters.

A row is one measurement, with its shard as a nested list and its own error, so that any tool can
read it. All-to-alls and other collectives are in a second file beside the first. Probes of machines
are in the metadata.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from autoshard.benchmark.measurement import (
    Directions,
    Exchange,
    ExchangeKey,
    Measurement,
    MeasureSettings,
    ReferenceLevel,
    Timing,
    method_of,
)
from autoshard.benchmark.probe.report import MachineProbe
from autoshard.benchmark.store.file import COLUMNS, unpack_ids
from autoshard.benchmark.store.measurements import MeasurementStore
from autoshard.workload import (
    EmbeddingTable,
    FieldError,
    OperatorOptions,
    Piece,
    Shard,
    Trace,
    UserError,
    documents,
)

PARQUET_SCHEMA = "autoshard.measurements/4"

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
    "forward_ms",
    "backward_ms",
    "iterations",
    "disturbed",
    "foreign_load",
    "operator_seconds",
)
_TYPES = {
    "batch_size": pa.int64(), "seed": pa.int64(), "iterations": pa.int64(),
    "disturbed": pa.int64(), "forward_ms": pa.float64(), "backward_ms": pa.float64(),
    "spread": pa.float64(), "foreign_load": pa.float64(), "operator_seconds": pa.float64(),
    "measured_at": pa.float64(), "quiet_forward_ms": pa.float64(),
    "quiet_backward_ms": pa.float64(), "forward_spread": pa.float64(),
    "backward_spread": pa.float64(), "forward_error": pa.float64(),
    "backward_error": pa.float64(), "error": pa.float64(),
}  # fmt: skip
_PLAIN = tuple(column for column in COLUMNS if column != "slices")


def exchanges_path(path: Path | str) -> Path:
    """Returns the path of the collectives that belong to a Parquet file of measurements."""
    whole = Path(path)
    return whole.with_name(f"{whole.stem}.exchanges.parquet")


def export_parquet(store: MeasurementStore, path: Path | str) -> int:
    """Writes all measurements and collectives; returns the number of measurements."""
    timings = [measurement.timing for measurement in store.measurements()]
    rows, pieces = store.rows()[: len(timings)], store.pieces()
    numbers = sorted(pieces)
    position = {number: index for index, number in enumerate(numbers)}
    described = pa.array([_piece_record(pieces[number]) for number in numbers], type=_SLICE)
    packed = [unpack_ids(row[COLUMNS.index("slices")]) for row in rows]
    flat = pa.array([position[number] for ids in packed for number in ids], type=pa.int64())
    offsets = [0]
    for ids in packed:
        offsets.append(offsets[-1] + len(ids))
    levels = [timing and timing.reference_level for timing in timings]
    normalized = {  # all costs of one hardware to one level
        "forward_ms": [timing and timing.forward_ms for timing in timings],
        "backward_ms": [timing and timing.backward_ms for timing in timings],
        "quiet_forward_ms": [level and level.forward_ms for level in levels],
        "quiet_backward_ms": [level and level.backward_ms for level in levels],
        "forward_error": [timing and timing.error.forward for timing in timings],
        "backward_error": [timing and timing.error.backward for timing in timings],
        "error": [timing and timing.error.both for timing in timings],
    }
    columns: dict[str, pa.Array] = {
        name: pa.array(
            [row[COLUMNS.index(name)] for row in rows], type=_TYPES.get(name, pa.string())
        )
        for name in _PLAIN
        if name not in normalized
    }
    columns |= {name: pa.array(of, type=_TYPES[name]) for name, of in normalized.items()}
    columns["shard"] = pa.ListArray.from_arrays(
        pa.array(offsets, type=pa.int32()), described.take(flat)
    )
    _write(pa.table(columns), path, store.probes())
    exchanges = store.exchanges()
    if exchanges:
        records = [_exchange_record(exchange) for exchange in exchanges]
        _write(pa.Table.from_pylist(records), exchanges_path(path))
    return len(rows)


def import_parquet(store: MeasurementStore, path: Path | str) -> int:
    """Adds the measurements of a Parquet file that the store lacks; returns their number."""
    fresh = [measurement for measurement in read_parquet(path) if not store.has(measurement)]
    store.put(fresh)
    for exchange in read_parquet_exchanges(path):
        if store.find_exchange(exchange.key, exchange.hardware, exchange.versions) is None:
            store.put_exchange(exchange)
    for probe in read_parquet_probes(path):
        if store.find_probe(probe.hardware) is None:
            store.put_probe(probe)
    return len(fresh)


def read_parquet_probes(path: Path | str) -> list[MachineProbe]:
    """Returns the probes in a Parquet file of measurements."""
    found = _metadata(path)[b"probes"]
    with documents.naming(path):
        return [MachineProbe.from_json(probe) for probe in documents.parse(found)]


def read_parquet_exchanges(path: Path | str) -> list[Exchange]:
    """Returns the collectives beside a Parquet file of measurements, if there are any."""
    beside = exchanges_path(path)
    return [_exchange(record) for record in _read(beside)] if beside.exists() else []


def read_parquet(path: Path | str) -> list[Measurement]:
    """Returns the measurements of a Parquet file; UserError names the file and its fault."""
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
        spread, error = (_directions(record, name) for name in ("spread", "error"))
        timing = Timing(**fields, spread=spread, reference_level=_level(record), error=error)
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
        device_state=record["device_state"] or "",
    )


def _directions(record: dict[str, Any], name: str) -> Directions:
    return Directions.of(record[name], record[f"forward_{name}"], record[f"backward_{name}"])


def _level(record: dict[str, Any]) -> ReferenceLevel | None:
    forward_ms, backward_ms = record["quiet_forward_ms"], record["quiet_backward_ms"]
    if forward_ms is None or backward_ms is None:
        return None
    return ReferenceLevel(forward_ms, backward_ms, method_of(record["versions"]))


def _piece_record(piece: Piece) -> dict[str, Any]:
    return {**piece.table.without_access().to_json(), "start": piece.start, "width": piece.width}


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
    key = ExchangeKey(
        tuple(fields.pop("dims")),
        fields.pop("batch_size"),
        fields.pop("devices"),
        tuple(fields.pop("nodes") or ()),
        fields.pop("collective"),
    )
    forward, backward = tuple(fields.pop("forward_ms")), tuple(fields.pop("backward_ms"))
    return Exchange(key=key, forward_ms=forward, backward_ms=backward, **fields)


def _write(table: pa.Table, path: Path | str, probes: Sequence[MachineProbe] = ()) -> None:
    target = Path(path)
    partial = target.with_name(f".{target.name}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        found = json.dumps([probe.to_json() for probe in probes])
        stamped = table.replace_schema_metadata({"schema": PARQUET_SCHEMA, "probes": found})
        pq.write_table(stamped, partial, compression="zstd")
        partial.replace(target)
    except OSError as error:
        raise UserError(f"{target}: cannot be written: {error}") from error


def _metadata(path: Path | str) -> dict[bytes, bytes]:
    """Returns the metadata of a Parquet file; UserError if it is not one of ours."""
    try:
        found = pq.read_schema(path).metadata or {}
    except FileNotFoundError as error:
        raise UserError(f"{path}: does not exist") from error
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from error
    schema = found.get(b"schema", b"").decode()
    if schema != PARQUET_SCHEMA:
        raise UserError(
            f"{path}: is not a Parquet file of {PARQUET_SCHEMA} (it says {schema or 'nothing'})"
        )
    return dict(found)


def _read(path: Path | str) -> Iterable[dict[str, Any]]:
    _metadata(path)
    try:
        records: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from error
    return records


def _unreadable(path: Path | str, error: Exception) -> UserError:
    reason = str(error).splitlines()[0][:120]
    return UserError(f"{path}: is not a Parquet file that can be read ({reason})")
