"""The store of measurements: an SQLite file.

A row is one measurement, written when it is made, so a killed process loses at most those in
progress. The file can be read while it is written (WAL). Pieces are stored once and shards as lists
of piece ids, which keeps the file small and reading fast.
"""

import json
import sqlite3
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, cast

from autoshard.benchmark.machine.process import collector_paused
from autoshard.benchmark.measurement import (
    Directions,
    Exchange,
    ExchangeKey,
    MeasuredCollective,
    Measurement,
    MeasureSettings,
    ReferenceLevel,
    Timing,
    method_of,
)
from autoshard.benchmark.operator.repeats import deviation_of_repeats, merged
from autoshard.benchmark.probe.report import MachineProbe
from autoshard.benchmark.store import file as store_file
from autoshard.benchmark.store.file import (
    COLUMNS,
    KEY,
    StoreError,
    key_of,
    measurement_of,
    row_of,
)
from autoshard.workload import EmbeddingTable, Piece, Shard, documents

_OF_KEY = f"WHERE {' AND '.join(f'{column} = ?' for column in KEY)}"
_ROW = f"SELECT {', '.join(COLUMNS)} FROM measurements"  # noqa: S608
# The reference level is that of a store's first measurements: it must not move once costs are
# published.
_LEVEL_REPEATS = 64
_MAX_REPEATS = 4096  # for the deviation of repeats: more would hardly change it
DocumentKind = Literal["probes", "rehearsals"]
_DOCUMENTS = {"probes": "hardware", "rehearsals": "key"}  # tables of documents, by their key
_EXCHANGE_KEY = ("dims", "batch_size", "devices", "hardware", "versions")
_EXCHANGE_COLUMNS = ", ".join(
    (*_EXCHANGE_KEY, "forward_ms", "backward_ms", "spread", "iterations", "measured_at")
)


class MeasurementStore:
    """Measurements by shard, settings, hardware and library versions.

    Args:
        path: SQLite file; created if it does not exist, unless `must_exist`.
    """

    def __init__(self, path: Path | str, must_exist: bool = False) -> None:
        self.path = Path(path)
        if must_exist and not self.path.is_file():
            raise StoreError(f"{self.path}: does not exist: collect_costs.py makes a store")
        with self._reporting():
            if store_file.is_fresh(self.path):
                store_file.make(self.path)
            store_file.check_ours(self.path)
            self._db = sqlite3.connect(
                self.path, timeout=store_file.BUSY_SECONDS, isolation_level=None
            )
            self._db.execute("PRAGMA synchronous = NORMAL")
        self._piece_ids: dict[tuple[str, str, int, int], int] = {}
        self._pieces: dict[int, Piece] = {}
        self._levels: dict[tuple[str, str], ReferenceLevel] = {}  # settled ones
        self._deviations: dict[tuple[str, str], tuple[int, Directions]] = {}

    def close(self) -> None:
        """Closes the store; its log is folded into the file."""
        self._db.close()

    def __enter__(self) -> "MeasurementStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return int(self._db.execute("SELECT COUNT(*) FROM measurements").fetchone()[0])

    def revision(self) -> tuple[int, int]:
        """Returns a value that changes whenever something is added."""
        with self._reporting():
            last = "SELECT COALESCE(MAX(id), 0) FROM "
            (measured,) = self._db.execute(f"{last} measurements").fetchone()
            (exchanged,) = self._db.execute(f"{last} exchanges").fetchone()
        return int(measured), int(exchanged)

    # --- measurements ---------------------------------------------------------------------------

    def put(self, measurements: Iterable[Measurement]) -> None:
        """Stores measurements. Failed or refused ones are kept only while a shard has no cost."""
        with self._reporting(), self._writing():
            for new in measurements:
                key = key_of(new.shard, new.settings, new.hardware, new.versions)
                self._db.execute(f"DELETE FROM measurements {_OF_KEY} AND status != 'ok'", key)  # noqa: S608
                if not new.ok and self._holds(_OF_KEY, key):
                    continue
                ids = [self._piece_id(piece) for piece in new.shard.pieces]
                row = (new.shard.digest, *row_of(new, ids))
                marks = ", ".join("?" * len(row))
                self._db.execute(
                    f"INSERT OR REPLACE INTO measurements (shard, {', '.join(COLUMNS)}) "  # noqa: S608
                    f"VALUES ({marks})",
                    row,
                )

    def has(self, measurement: Measurement) -> bool:
        """Returns whether this measurement is stored; without a cost, whether its shard is."""
        key = key_of(
            measurement.shard, measurement.settings, measurement.hardware, measurement.versions
        )
        where = _OF_KEY
        if measurement.ok:
            where += " AND status = 'ok' AND device = ? AND measured_at = ?"
            key += (measurement.device, measurement.measured_at)
        with self._reporting():
            return self._holds(where, key)

    def _holds(self, where: str, values: tuple[Any, ...]) -> bool:
        found = self._db.execute(f"SELECT 1 FROM measurements {where} LIMIT 1", values)  # noqa: S608
        return found.fetchone() is not None

    def find(
        self, shard: Shard, settings: MeasureSettings, hardware: str, versions: str
    ) -> Measurement | None:
        """Returns the merged repeat measurements of a shard, or None."""
        key = key_of(shard, settings, hardware, versions)
        with self._reporting():
            rows = self._db.execute(f"{_ROW} {_OF_KEY} ORDER BY id", key).fetchall()
        if not rows:
            return None
        return merged(
            [measurement_of(row, {}, self.level, shard) for row in rows],
            self.deviation(hardware, versions),
        )

    def level(self, hardware: str, versions: str) -> ReferenceLevel | None:
        """Returns the reference level of this hardware's costs; None without any.

        It settles with the first measurements; all costs are normalised to it when read.
        """
        key = (hardware, versions)
        if key in self._levels:
            return self._levels[key]
        with self._reporting():
            found = self._db.execute(
                "SELECT quiet_forward_ms, quiet_backward_ms FROM measurements WHERE hardware = ? "
                "AND versions = ? AND quiet_forward_ms IS NOT NULL ORDER BY id LIMIT ?",
                (*key, _LEVEL_REPEATS),
            ).fetchall()
        if not found:
            return None
        level = ReferenceLevel.typical(
            [ReferenceLevel(forward, backward, method_of(versions)) for forward, backward in found]
        )
        if len(found) == _LEVEL_REPEATS:
            self._levels[key] = level
        return level

    def makes(self) -> list[tuple[str, str]]:
        """Returns hardware and versions of all measurements, the latest last."""
        with self._reporting():
            return self._db.execute(
                "SELECT hardware, versions FROM measurements GROUP BY hardware, versions "
                "ORDER BY MAX(id)"
            ).fetchall()

    def deviation(self, hardware: str, versions: str) -> Directions:
        """Returns the relative deviation of repeat measurements beyond that of their own errors."""
        last, _ = self.revision()
        known_at, known = self._deviations.get((hardware, versions), (-1, None))
        if known is None or not 0 <= known_at <= last <= known_at + _LEVEL_REPEATS:
            known = deviation_of_repeats(self.repeats(hardware, versions))
            self._deviations[hardware, versions] = (last, known)
        return known

    def repeats(self, hardware: str, versions: str) -> list[list[Timing]]:
        """Returns the timings of each shard that was measured several times."""
        names = ", ".join(KEY[:5])
        with self._reporting():
            rows = self._db.execute(
                f"{_ROW} JOIN (SELECT {names} FROM measurements WHERE hardware = ? AND "  # noqa: S608
                f"versions = ? AND status = 'ok' GROUP BY {names} HAVING COUNT(*) > 1 "
                f"ORDER BY MAX(id) DESC) USING ({names}) WHERE hardware = ? AND versions = ? "
                "AND status = 'ok' LIMIT ?",
                (hardware, versions, hardware, versions, _MAX_REPEATS),
            ).fetchall()
        self.pieces()
        repeats: dict[tuple[str, MeasureSettings], list[Timing]] = {}
        for row in rows:
            found = measurement_of(row, self._pieces, self.level)
            if found.timing is not None:
                repeats.setdefault((found.shard.digest, found.settings), []).append(found.timing)
        return list(repeats.values())

    def rows(self) -> list[tuple[Any, ...]]:
        """Returns all measurements as rows in the order of COLUMNS; `slices` holds packed ids.

        This is the fast way to read many. Costs are as written, each at its own reference level.
        """
        with self._reporting():
            return self._db.execute(f"{_ROW} ORDER BY id").fetchall()

    def measurements(self) -> list[Measurement]:
        """Returns all measurements, in order of insertion, each with its own error."""
        with collector_paused():
            rows = self.rows()
            self.pieces()
            deviations: dict[tuple[str, str], Directions] = {}
            found = []
            for row in rows:
                measurement = measurement_of(row, self._pieces, self.level)
                make = (measurement.hardware, measurement.versions)
                if make not in deviations:
                    deviations[make] = self.deviation(*make)
                found.append(merged([measurement], deviations[make]))
            return found

    def pieces(self) -> dict[int, Piece]:
        """Returns all pieces of the store by id."""
        with self._reporting():
            last = max(self._pieces, default=0)
            found = self._db.execute(
                "SELECT id, table_json, start, width FROM slices WHERE id > ?", (last,)
            )
            for number, text, start, width in found:
                table = EmbeddingTable.from_json(json.loads(text))
                self._pieces[number] = Piece(table, start, width)
        return self._pieces

    def _piece_id(self, piece: Piece) -> int:
        key = (piece.digest, piece.table.name, piece.table.dim, piece.start)
        if key not in self._piece_ids:
            text = json.dumps(
                piece.table.without_access().to_json(), separators=(",", ":"), sort_keys=True
            )
            row = (text, piece.start, piece.width)
            self._db.execute(
                "INSERT OR IGNORE INTO slices (table_json, start, width) VALUES (?, ?, ?)", row
            )
            (self._piece_ids[key],) = self._db.execute(
                "SELECT id FROM slices WHERE table_json = ? AND start = ? AND width = ?", row
            ).fetchone()
        return self._piece_ids[key]

    # --- collectives ----------------------------------------------------------------------------

    def put_exchange(self, exchange: Exchange) -> None:
        """Stores an all-to-all, or another collective."""
        row = (
            _ranks_text(exchange.key), exchange.key.batch_size, exchange.key.devices,
            exchange.hardware, exchange.versions, json.dumps(exchange.forward_ms),
            json.dumps(exchange.backward_ms), exchange.spread, exchange.iterations,
            exchange.measured_at,
        )  # fmt: skip
        with self._reporting(), self._writing():
            self._db.execute(
                f"INSERT OR REPLACE INTO exchanges ({_EXCHANGE_COLUMNS}) "  # noqa: S608
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                row,
            )

    def find_exchange(self, key: ExchangeKey, hardware: str, versions: str) -> Exchange | None:
        """Returns the measurement of a collective, or None."""
        found = self._exchanges(
            f"WHERE {' AND '.join(f'{column} = ?' for column in _EXCHANGE_KEY)}",
            (_ranks_text(key), key.batch_size, key.devices, hardware, versions),
        )
        return found[0] if found else None

    def exchanges(self) -> list[Exchange]:
        """Returns all collectives, in order of insertion."""
        return self._exchanges("ORDER BY id", ())

    def _exchanges(self, clause: str, values: tuple[Any, ...]) -> list[Exchange]:
        with self._reporting():
            query = f"SELECT {_EXCHANGE_COLUMNS} FROM exchanges {clause}"  # noqa: S608
            found = self._db.execute(query, values).fetchall()
        return [
            Exchange(
                _ranks_in(dims, batch_size, devices),
                hardware, versions, tuple(json.loads(forward)), tuple(json.loads(backward)), *rest,
            )
            for dims, batch_size, devices, hardware, versions, forward, backward, *rest in found
        ]  # fmt: skip

    # --- documents ------------------------------------------------------------------------------

    def put_document(self, kind: DocumentKind, key: str, document: Any) -> None:
        """Stores a JSON document, in place of an earlier one with the same key."""
        create = (
            f"CREATE TABLE IF NOT EXISTS {kind} ({_DOCUMENTS[kind]} TEXT PRIMARY KEY, document)"
        )
        with self._reporting(), self._writing():
            self._db.execute(create)  # most stores have no documents
            row = (key, json.dumps(document))
            self._db.execute(f"INSERT OR REPLACE INTO {kind} VALUES (?, ?)", row)  # noqa: S608

    def find_documents(self, kind: DocumentKind, key: str = "%") -> list[Any]:
        """Returns the documents of a kind with a key, by default all in the order of keys."""
        column = _DOCUMENTS[kind]
        with self._reporting():
            if not self._db.execute(f"PRAGMA table_info({kind})").fetchall():
                return []
            found = self._db.execute(
                f"SELECT document FROM {kind} WHERE {column} LIKE ? ORDER BY {column}",  # noqa: S608
                (key,),
            ).fetchall()
        with documents.naming(self.path):
            return [documents.parse(text.encode()) for (text,) in found]

    def put_probe(self, probe: MachineProbe) -> None:
        """Stores the probe of a kind of hardware, in place of an earlier one."""
        self.put_document("probes", probe.hardware, probe.to_json())

    def probes(self) -> list[MachineProbe]:
        """Returns all probes."""
        found = self.find_documents("probes")
        with documents.naming(self.path):
            return [MachineProbe.from_json(document) for document in found]

    def find_probe(self, hardware: str) -> MachineProbe | None:
        """Returns the probe of a kind of hardware, or None."""
        return next((probe for probe in self.probes() if probe.hardware == hardware), None)

    # --- files ----------------------------------------------------------------------------------

    def copy_to(self, path: Path | str) -> None:
        """Writes a consistent copy to one file, also while others write."""
        Path(path).unlink(missing_ok=True)
        with self._reporting(), sqlite3.connect(path) as target:
            self._db.backup(target)
        target.close()

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.DatabaseError, json.JSONDecodeError, struct.error) as error:
            raise StoreError(f"{self.path}: {store_file.problem_of(error)}") from error
        except OSError as error:
            raise StoreError(f"{self.path}: cannot be opened: {error.strerror}") from error

    @contextmanager
    def _writing(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")  # where a full disk is noticed
        except BaseException:
            if self._db.in_transaction:  # SQLite may have rolled back by itself
                self._db.execute("ROLLBACK")
            self._piece_ids.clear()  # of pieces that are not stored: others will get these ids
            self._levels.clear()
            raise


def _ranks_text(key: ExchangeKey) -> str:
    """Returns the columns of each rank, with its node where there are several, by the collective's
    name unless it is an all-to-all.
    """
    ranks: Any = list(zip(key.dims, key.nodes, strict=True)) if key.nodes else key.dims
    return json.dumps(ranks if key.collective == "all_to_all" else {key.collective: ranks})


def _ranks_in(text: str, batch_size: int, devices: int) -> ExchangeKey:
    """Returns the key that `_ranks_text` wrote."""
    ranks, collective = json.loads(text), "all_to_all"
    if isinstance(ranks, dict):
        ((collective, ranks),) = ranks.items()
    dims, nodes = zip(*ranks, strict=True) if isinstance(ranks[0], list) else (tuple(ranks), ())
    return ExchangeKey(dims, batch_size, devices, nodes, cast("MeasuredCollective", collective))
