"""The file of a store: its schema, creation and checks."""

import os
import sqlite3
import struct
from pathlib import Path

from autoshard.workload import UserError

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
