"""The file of a store: its schema, creation and checks, and measurements as rows of its table."""

import os
import sqlite3
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from autoshard.benchmark.measurement import (
    Directions,
    Measurement,
    MeasureSettings,
    ReferenceLevel,
    Timing,
    method_of,
)
from autoshard.benchmark.operator.repeats import own_error
from autoshard.workload import OperatorOptions, Piece, Shard, UserError
from autoshard.workload.tables.operators import Optimizer, Weights

SCHEMA_VERSION = 3
_APPLICATION_ID = 0x61753073  # marks the file as ours
BUSY_SECONDS = 60.0

_SCHEMA = """
CREATE TABLE slices (
    id INTEGER PRIMARY KEY,
    table_json TEXT NOT NULL,
    start INTEGER NOT NULL,
    width INTEGER NOT NULL,
    UNIQUE (table_json, start, width)
);
CREATE TABLE exchanges (
    id INTEGER PRIMARY KEY,
    dims TEXT NOT NULL,
    batch_size INTEGER NOT NULL,
    devices INTEGER NOT NULL,
    hardware TEXT NOT NULL,
    versions TEXT NOT NULL,
    forward_ms TEXT NOT NULL,
    backward_ms TEXT NOT NULL,
    spread REAL NOT NULL,
    iterations INTEGER NOT NULL,
    measured_at REAL NOT NULL,
    UNIQUE (dims, batch_size, devices, hardware, versions)
);
-- One row per measurement. A shard that failed or was refused has one row until it is measured.
CREATE TABLE measurements (
    id INTEGER PRIMARY KEY,
    shard TEXT NOT NULL,
    batch_size INTEGER NOT NULL,
    weights TEXT NOT NULL,
    optimizer TEXT NOT NULL,
    seed INTEGER NOT NULL,
    hardware TEXT NOT NULL,
    versions TEXT NOT NULL,
    slices BLOB NOT NULL,
    status TEXT NOT NULL,
    reason TEXT NOT NULL,
    forward_ms REAL,
    backward_ms REAL,
    spread REAL,
    iterations INTEGER,
    disturbed INTEGER,
    foreign_load REAL,
    operator_seconds REAL,
    device TEXT NOT NULL,
    node TEXT NOT NULL,
    measured_at REAL NOT NULL,
    quiet_forward_ms REAL,
    quiet_backward_ms REAL,
    forward_spread REAL,
    backward_spread REAL,
    device_state TEXT,
    UNIQUE (shard, batch_size, weights, optimizer, seed, hardware, versions, device, measured_at)
);
CREATE INDEX levels ON measurements (hardware, versions) WHERE quiet_forward_ms IS NOT NULL;
"""
COLUMNS = (
    "batch_size", "weights", "optimizer", "seed", "hardware", "versions", "slices", "status",
    "reason", "forward_ms", "backward_ms", "spread", "iterations", "disturbed", "foreign_load",
    "operator_seconds", "device", "node", "measured_at", "quiet_forward_ms", "quiet_backward_ms",
    "forward_spread", "backward_spread", "device_state",
)  # fmt: skip
KEY = ("shard", "batch_size", "weights", "optimizer", "seed", "hardware", "versions")


class StoreError(UserError):
    """A store that cannot be read or written."""


def problem_of(error: Exception) -> str:
    """Returns what an error of SQLite says of a store, and what to do."""
    code = getattr(error, "sqlite_errorcode", None)
    if code == sqlite3.SQLITE_FULL:
        return "cannot be written, because the disk is full: free some space and run again"
    if code == sqlite3.SQLITE_BUSY:
        return f"has been locked by another program for {BUSY_SECONDS:.0f} s: end it and run again"
    return f"cannot be used as a store ({error}): move it away or name another"


def is_fresh(path: Path) -> bool:
    """Returns whether there is no file yet, or an empty one."""
    if path.is_dir():
        raise StoreError(f"{path}: is a folder: name a file")
    if path.exists() and not path.is_file():
        raise StoreError(f"{path}: is a device: name a file")
    return not path.exists() or path.stat().st_size == 0


def make(path: Path) -> None:
    """Creates an empty store atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)
    db = sqlite3.connect(partial)
    db.executescript(_SCHEMA)
    db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    db.execute("PRAGMA journal_mode = WAL")
    db.close()
    try:
        if path.exists():
            partial.replace(path)
        else:
            os.link(partial, path)  # fails if another process was faster: its store is used then
    except FileExistsError:
        pass
    finally:
        partial.unlink(missing_ok=True)


def check_ours(path: Path) -> None:
    """Raises StoreError if the file is not a store, of another version, or damaged."""
    with open(path, "rb") as file:
        header = file.read(100)
    if len(header) < 100 or not header.startswith(b"SQLite format 3\0"):
        raise StoreError(f"{path}: is not a store of measurements: name another file")
    (version,) = struct.unpack_from(">i", header, 60)
    (application,) = struct.unpack_from(">i", header, 68)
    if application != _APPLICATION_ID:
        raise StoreError(f"{path}: is an SQLite file of another program: name another file")
    if version != SCHEMA_VERSION:
        raise StoreError(
            f"{path}: has schema {version} of stores, this autoshard reads {SCHEMA_VERSION}: name "
            "another file"
        )
    # Without a log nobody has it open, and SQLite need not create its own files beside it.
    mode = "mode=ro" if Path(f"{path}-wal").exists() else "immutable=1"
    db = sqlite3.connect(f"{path.resolve().as_uri()}?{mode}", uri=True, timeout=BUSY_SECONDS)
    try:
        (verdict,) = db.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.DatabaseError as error:
        verdict = str(error)
    finally:
        db.close()
    if verdict != "ok":
        reason = " ".join(verdict.split())[:160]
        raise StoreError(f"{path}: is damaged ({reason}): restore it from a copy")


def row_of(measurement: Measurement, piece_ids: Sequence[int]) -> tuple[Any, ...]:
    """Returns a measurement as a row in the order of COLUMNS."""
    settings, timing = measurement.settings, measurement.timing
    timed = (
        (timing.forward_ms, timing.backward_ms, timing.spread.both, timing.iterations,
         timing.disturbed, timing.foreign_load, timing.operator_seconds)
        if timing else (None,) * 7
    )  # fmt: skip
    level = None if timing is None else timing.reference_level
    reference_level = (None, None) if level is None else (level.forward_ms, level.backward_ms)
    spreads = (None, None) if timing is None else timing.spread[:2]
    return (
        settings.batch_size, settings.operator.weights, settings.operator.optimizer,
        settings.seed, measurement.hardware, measurement.versions, pack_ids(piece_ids),
        measurement.status, measurement.reason, *timed, measurement.device, measurement.node,
        measurement.measured_at, *reference_level, *spreads, measurement.device_state,
    )  # fmt: skip


def measurement_of(
    row: Sequence[Any],
    known: Mapping[int, Piece],
    level_of: Callable[[str, str], ReferenceLevel | None],
    shard: Shard | None = None,
) -> Measurement:
    """Returns the measurement that `row_of` wrote, at the store's reference level.

    Args:
        row: Values in the order of COLUMNS.
        known: Pieces by id.
        level_of: Returns the reference level of hardware and versions.
        shard: Its shard, if the caller has it.
    """
    (batch_size, weights, optimizer, seed, hardware, versions, ids, status, reason,
     forward_ms, backward_ms, both_spread, *timed, device, node, measured_at, quiet_forward_ms,
     quiet_backward_ms, forward_spread, backward_spread, state) = row  # fmt: skip
    if shard is None:
        shard = Shard.in_order(tuple([known[number] for number in unpack_ids(ids)]))
    timing = None
    if status == "ok":
        level = None
        if quiet_forward_ms is not None:
            level = ReferenceLevel(quiet_forward_ms, quiet_backward_ms, method_of(versions))
        spread = Directions.of(both_spread, forward_spread, backward_spread)
        own = Timing(forward_ms, backward_ms, spread, *[*timed, level])
        common = level_of(hardware, versions)
        timing = replace(own.normalized_to(common), error=own_error(own, common))
    return Measurement(
        shard, _settings(batch_size, weights, optimizer, seed), hardware, versions, status,
        device, node, measured_at, timing, reason, True, device_state=state or "",
    )  # fmt: skip


@lru_cache(maxsize=256)
def _settings(
    batch_size: int, weights: Weights, optimizer: Optimizer, seed: int
) -> MeasureSettings:
    return MeasureSettings(batch_size, OperatorOptions(weights, optimizer), seed)


def key_of(
    shard: Shard, settings: MeasureSettings, hardware: str, versions: str
) -> tuple[Any, ...]:
    """Returns the values of KEY."""
    return (
        shard.digest, settings.batch_size, settings.operator.weights, settings.operator.optimizer,
        settings.seed, hardware, versions,
    )  # fmt: skip


def pack_ids(ids: Sequence[int]) -> bytes:
    """Packs piece ids for the store: 32-bit, little-endian."""
    return struct.pack(f"<{len(ids)}i", *ids)


def unpack_ids(packed: bytes) -> tuple[int, ...]:
    """Returns the ids that `pack_ids` packed."""
    return struct.unpack(f"<{len(packed) // 4}i", packed)
