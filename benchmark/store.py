"""The store of measurements: one SQLite file, the heart of the platform.

A row is written the moment it is measured, so a killed process loses at most the measurement in
flight. Readers may read while it is written (WAL). Table slices are kept once and shards as lists
of their ids, which keeps the file small and reading fast.
"""

import json
import os
import sqlite3
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmark.garbage import collector_paused
from benchmark.measurement import (
    Exchange,
    ExchangeKey,
    Measurement,
    MeasureSettings,
    Timing,
)
from workload import EmbeddingTable, OperatorOptions, Shard, TableSlice, UserError
from workload.operators import Optimizer, Weights

SCHEMA_VERSION = 2
_APPLICATION_ID = 0x61753073  # marks the file as ours
_BUSY_SECONDS = 60.0

_SCHEMA = """
CREATE TABLE slices (
    id INTEGER PRIMARY KEY,
    table_json TEXT NOT NULL,
    start INTEGER NOT NULL,
    width INTEGER NOT NULL,
    UNIQUE (table_json, start, width)
);
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
    quiet_ms REAL,
    UNIQUE (shard, batch_size, weights, optimizer, seed, hardware, versions)
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
"""

_LEVELS = (
    "CREATE INDEX levels ON measurements (hardware, versions, quiet_ms) WHERE quiet_ms IS NOT NULL"
)

COLUMNS = (
    "batch_size", "weights", "optimizer", "seed", "hardware", "versions", "slices", "status",
    "reason", "forward_ms", "backward_ms", "spread", "iterations", "disturbed", "foreign_load",
    "operator_seconds", "device", "node", "measured_at", "quiet_ms",
)  # fmt: skip
_KEY = ("shard", "batch_size", "weights", "optimizer", "seed", "hardware", "versions")
_EXCHANGE_KEY = ("dims", "batch_size", "devices", "hardware", "versions")


class StoreError(UserError):
    """A store that cannot be read or written."""


class MeasurementStore:
    """Measurements by shard, settings, hardware and library versions.

    Args:
        path: the SQLite file; made if it does not exist, unless `must_exist`.
    """

    def __init__(self, path: Path | str, must_exist: bool = False) -> None:
        self.path = Path(path)
        if must_exist and not self.path.is_file():
            raise StoreError(f"{self.path}: does not exist: collect_costs.py makes a store")
        with self._telling():
            if _is_fresh(self.path):
                _make(self.path)
            _check_ours(self.path)
            self._db = sqlite3.connect(self.path, timeout=_BUSY_SECONDS, isolation_level=None)
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._upgrade()
        self._slice_ids: dict[tuple[str, str, int, int], int] = {}
        self._slices: dict[int, TableSlice] = {}
        self._quiet_ms: dict[tuple[str, str], float] = {}

    def close(self) -> None:
        """Fold the log into the file and let go of it."""
        self._db.close()

    def __enter__(self) -> "MeasurementStore":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _upgrade(self) -> None:
        """Bring a store of an older schema up to this one."""
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version < SCHEMA_VERSION:
            with self._writing():
                (version,) = self._db.execute("PRAGMA user_version").fetchone()
                if version < SCHEMA_VERSION:  # and nobody was faster
                    self._db.execute("ALTER TABLE measurements ADD COLUMN quiet_ms REAL")
                    self._db.execute(_LEVELS)
                    self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def __len__(self) -> int:
        return int(self._db.execute("SELECT COUNT(*) FROM measurements").fetchone()[0])

    # --- measurements ---------------------------------------------------------------------------

    def put(self, measurements: Iterable[Measurement]) -> None:
        """Keep measurements; a later one of the same key takes the place of the earlier.

        All of one hardware are told at one quiet level: that of the first.
        """
        with self._telling(), self._writing():
            for given in measurements:
                measurement = given.told_at(self.quiet_ms(given.hardware, given.versions))
                row = (measurement.shard.digest, *self._row(measurement))
                marks = ", ".join("?" * len(row))
                self._db.execute(
                    f"INSERT OR REPLACE INTO measurements (shard, {', '.join(COLUMNS)}) "  # noqa: S608
                    f"VALUES ({marks})",
                    row,
                )

    def find(
        self, shard: Shard, settings: MeasureSettings, hardware: str, versions: str
    ) -> Measurement | None:
        """What was measured for a shard, or None."""
        key = (
            shard.digest, settings.batch_size, settings.operator.weights,
            settings.operator.optimizer, settings.seed, hardware, versions,
        )  # fmt: skip
        with self._telling():
            row = self._db.execute(
                f"SELECT {', '.join(COLUMNS)} FROM measurements "  # noqa: S608
                f"WHERE {' AND '.join(f'{column} = ?' for column in _KEY)}",
                key,
            ).fetchone()
            return self._measurement(row, shard) if row else None

    def quiet_ms(self, hardware: str, versions: str) -> float | None:
        """What the reference takes where costs of this hardware are told; None if none are yet."""
        key = (hardware, versions)
        if key not in self._quiet_ms:
            with self._telling():
                found = self._db.execute(
                    "SELECT quiet_ms FROM measurements "
                    "WHERE hardware = ? AND versions = ? AND quiet_ms IS NOT NULL LIMIT 1",
                    key,
                ).fetchone()
            if found is None:
                return None
            self._quiet_ms[key] = found[0]
        return self._quiet_ms[key]

    def rows(self) -> list[tuple[Any, ...]]:
        """All measurements as plain rows in the order of COLUMNS; `slices` holds packed ids.

        This is the fast way to read many: shards are only built by those who need them.
        """
        with self._telling():
            return self._db.execute(
                f"SELECT {', '.join(COLUMNS)} FROM measurements ORDER BY id"  # noqa: S608
            ).fetchall()

    def measurements(self) -> list[Measurement]:
        """All measurements, in the order they were made."""
        with collector_paused():
            rows = self.rows()
            self.slices()
            return [self._measurement(row) for row in rows]

    def slices(self) -> dict[int, TableSlice]:
        """Every table slice in the store by its id."""
        with self._telling():
            last = max(self._slices, default=0)
            found = self._db.execute(
                "SELECT id, table_json, start, width FROM slices WHERE id > ?", (last,)
            )
            for number, text, start, width in found:
                table = EmbeddingTable.from_json(json.loads(text))
                self._slices[number] = TableSlice(table, start, width)
        return self._slices

    def _row(self, measurement: Measurement) -> tuple[Any, ...]:
        settings, timing = measurement.settings, measurement.timing
        timed = (
            (timing.forward_ms, timing.backward_ms, timing.spread, timing.iterations,
             timing.disturbed, timing.foreign_load, timing.operator_seconds)
            if timing else (None,) * 7
        )  # fmt: skip
        ids = [self._slice_id(piece) for piece in measurement.shard.slices]
        return (
            settings.batch_size, settings.operator.weights, settings.operator.optimizer,
            settings.seed, measurement.hardware, measurement.versions, pack_ids(ids),
            measurement.status, measurement.reason, *timed, measurement.device, measurement.node,
            measurement.measured_at, None if timing is None else timing.quiet_ms,
        )  # fmt: skip

    def _slice_id(self, piece: TableSlice) -> int:
        key = (piece.digest, piece.table.name, piece.table.dim, piece.start)
        if key not in self._slice_ids:
            text = json.dumps(piece.table.to_json(), separators=(",", ":"), sort_keys=True)
            row = (text, piece.start, piece.width)
            self._db.execute(
                "INSERT OR IGNORE INTO slices (table_json, start, width) VALUES (?, ?, ?)", row
            )
            (self._slice_ids[key],) = self._db.execute(
                "SELECT id FROM slices WHERE table_json = ? AND start = ? AND width = ?", row
            ).fetchone()
        return self._slice_ids[key]

    def _measurement(self, row: Sequence[Any], shard: Shard | None = None) -> Measurement:
        (batch_size, weights, optimizer, seed, hardware, versions, slices, status, reason, *timed,
         device, node, measured_at, quiet_ms) = row  # fmt: skip
        if shard is None:
            known = self._slices
            shard = Shard.in_order(tuple([known[number] for number in unpack_ids(slices)]))
        return Measurement(
            shard, _settings(batch_size, weights, optimizer, seed), hardware, versions, status,
            device, node, measured_at, Timing(*[*timed, quiet_ms]) if status == "ok" else None,
            reason, True,
        )  # fmt: skip

    # --- all-to-all -----------------------------------------------------------------------------

    def put_exchange(self, exchange: Exchange) -> None:
        """Keep an all-to-all."""
        row = (
            json.dumps(exchange.key.dims), exchange.key.batch_size, exchange.key.devices,
            exchange.hardware, exchange.versions, json.dumps(exchange.forward_ms),
            json.dumps(exchange.backward_ms), exchange.spread, exchange.iterations,
            exchange.measured_at,
        )  # fmt: skip
        with self._telling(), self._writing():
            self._db.execute(
                "INSERT OR REPLACE INTO exchanges (dims, batch_size, devices, hardware, versions, "
                "forward_ms, backward_ms, spread, iterations, measured_at) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                row,
            )

    def find_exchange(self, key: ExchangeKey, hardware: str, versions: str) -> Exchange | None:
        """What was measured for an all-to-all, or None."""
        found = self._exchanges(
            f"WHERE {' AND '.join(f'{column} = ?' for column in _EXCHANGE_KEY)}",
            (json.dumps(key.dims), key.batch_size, key.devices, hardware, versions),
        )
        return found[0] if found else None

    def exchanges(self) -> list[Exchange]:
        """All all-to-alls, in the order they were made."""
        return self._exchanges("ORDER BY id", ())

    def _exchanges(self, clause: str, values: tuple[Any, ...]) -> list[Exchange]:
        with self._telling():
            found = self._db.execute(
                "SELECT dims, batch_size, devices, hardware, versions, forward_ms, backward_ms, "  # noqa: S608
                f"spread, iterations, measured_at FROM exchanges {clause}",
                values,
            ).fetchall()
        return [
            Exchange(
                ExchangeKey(tuple(json.loads(dims)), batch_size, devices),
                hardware, versions, tuple(json.loads(forward)), tuple(json.loads(backward)), *rest,
            )
            for dims, batch_size, devices, hardware, versions, forward, backward, *rest in found
        ]  # fmt: skip

    # --- files ----------------------------------------------------------------------------------

    def copy_to(self, path: Path | str) -> None:
        """A consistent copy in one file, also while others write."""
        Path(path).unlink(missing_ok=True)
        with self._telling(), sqlite3.connect(path) as target:
            self._db.backup(target)
        target.close()

    @contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.DatabaseError, json.JSONDecodeError, struct.error) as error:
            raise StoreError(
                f"{self.path}: cannot be used as a store ({error}): move it away or name another"
            ) from error
        except OSError as error:
            raise StoreError(f"{self.path}: cannot be opened: {error.strerror}") from error

    @contextmanager
    def _writing(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            self._slice_ids.clear()
            self._quiet_ms.clear()
            raise
        self._db.execute("COMMIT")


@lru_cache(maxsize=256)
def _settings(
    batch_size: int, weights: Weights, optimizer: Optimizer, seed: int
) -> MeasureSettings:
    return MeasureSettings(batch_size, OperatorOptions(weights, optimizer), seed)


def pack_ids(ids: Sequence[int]) -> bytes:
    """Slice ids as the store keeps them: 32-bit, little-endian."""
    return struct.pack(f"<{len(ids)}i", *ids)


def unpack_ids(packed: bytes) -> tuple[int, ...]:
    """The ids that `pack_ids` packed."""
    return struct.unpack(f"<{len(packed) // 4}i", packed)


def _is_fresh(path: Path) -> bool:
    """True if there is nothing yet, or an empty file."""
    if path.is_dir():
        raise StoreError(f"{path}: is a folder: name a file")
    return not path.exists() or path.stat().st_size == 0


def _make(path: Path) -> None:
    """Put an empty store at `path`, whole from its first moment for whoever else opens it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)
    db = sqlite3.connect(partial)
    db.executescript(_SCHEMA)
    db.execute(_LEVELS)
    db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    db.execute("PRAGMA journal_mode = WAL")
    db.close()
    try:
        if path.exists():
            partial.replace(path)
        else:
            os.link(partial, path)  # fails if another process was faster: then its store is ours
    except FileExistsError:
        pass
    finally:
        partial.unlink(missing_ok=True)


def _check_ours(path: Path) -> None:
    """StoreError if the file is not ours, newer or damaged; it stays as it is, to the byte."""
    with open(path, "rb") as file:
        header = file.read(100)
    if len(header) < 100 or not header.startswith(b"SQLite format 3\0"):
        raise StoreError(f"{path}: is not a store of measurements: name another file")
    (version,) = struct.unpack_from(">i", header, 60)
    (application,) = struct.unpack_from(">i", header, 68)
    if application != _APPLICATION_ID:
        raise StoreError(f"{path}: is an SQLite file of another program: name another file")
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"{path}: was written by a newer autoshard (schema {version}, this one reads up "
            f"to {SCHEMA_VERSION}): upgrade autoshard or name another file"
        )
    # Where there is no log nobody has it open, and SQLite need not put its own files beside it.
    mode = "mode=ro" if Path(f"{path}-wal").exists() else "immutable=1"
    db = sqlite3.connect(f"{path.resolve().as_uri()}?{mode}", uri=True, timeout=_BUSY_SECONDS)
    try:
        (verdict,) = db.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.DatabaseError as error:
        verdict = str(error)
    finally:
        db.close()
    if verdict != "ok":
        reason = " ".join(verdict.split())[:160]
        raise StoreError(f"{path}: is damaged ({reason}): restore it from a copy")
