"""Sharding tasks: tables, devices, batch size, operator, rules and objective."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from autoshard.workload import documents
from autoshard.workload.bounds import MAX_BATCH_SIZE, MAX_DEVICES, MAX_GB
from autoshard.workload.errors import FieldError, UserError
from autoshard.workload.objective import Objective
from autoshard.workload.operators import MemoryParts, OperatorOptions
from autoshard.workload.rules import Rule
from autoshard.workload.tables import EmbeddingTable, Piece, check_whole, row_blocks

TASK_SCHEMA = documents.Schema("autoshard.task", 1)
_HOT_ID_BYTES = 4  # on each device for each row of a table, to tell whether it is hot


@dataclass(frozen=True)
class Device:
    """A device and its memory, part of which may be reserved for other uses.

    `hardware` is its fingerprint, by which its cost model is found; empty where all are equal.
    """

    name: str
    memory_bytes: int
    reserved_bytes: int = 0
    hardware: str = ""

    def __post_init__(self) -> None:
        check_whole("memory_bytes", self.memory_bytes, 1, 2**30 * MAX_GB)
        if not 0 <= self.reserved_bytes < self.memory_bytes:
            raise FieldError(
                "reserved_bytes",
                f"must lie between 0 and memory_bytes={self.memory_bytes}, "
                f"got {self.reserved_bytes}",
            )

    @property
    def usable_bytes(self) -> int:
        """Returns the bytes for weights, optimizer state, inputs and outputs."""
        return self.memory_bytes - self.reserved_bytes

    def to_json(self) -> dict[str, Any]:
        """Returns the device as a JSON object; without its hardware if that is not named."""
        fields = dict(vars(self))
        if not self.hardware:
            del fields["hardware"]
        return fields

    @staticmethod
    def uniform(count: int, memory_bytes: int) -> tuple["Device", ...]:
        """Returns `count` equal devices."""
        check_devices(count)
        return tuple(Device(f"device{number}", memory_bytes) for number in range(count))


@dataclass(frozen=True)
class ShardingTask:
    """A sharding problem.

    Args:
        tables: Tables with unique names.
        devices: Devices to place them on.
        batch_size: Samples of a batch, over all devices.
        operator: Options of the fused operator.
        rules: Rules that plans must keep.
        objective: Cost that plans minimise.
        beside: Names of tables that are no tables of this task, since each device has a copy
            (`without`), or a block of rows (`with_row_blocks`).
    """

    tables: tuple[EmbeddingTable, ...]
    devices: tuple[Device, ...]
    batch_size: int
    operator: OperatorOptions = field(default_factory=OperatorOptions)
    rules: tuple[Rule, ...] = ()
    objective: Objective = field(default_factory=Objective)
    beside: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.tables and not self.beside:
            raise FieldError("tables", "a task needs at least one table")
        check_devices(len(self.devices))
        check_whole("batch_size", self.batch_size, 1, MAX_BATCH_SIZE)
        check_unique_names(self.tables)
        names = {table.name for table in self.tables} if self.rules else set()
        for rule in self.rules:
            for table in rule.tables:
                if table not in names:
                    raise FieldError("rules", f"{rule.name}: {table} is no table of the task")
            if rule.of_devices and max(rule.numbers) >= len(self.devices):
                raise FieldError("rules", f"{rule.name}: there are {len(self.devices)} devices")

    @property
    def usable_bytes(self) -> npt.NDArray[np.int64]:
        """Returns the usable bytes of each device."""
        return np.array([device.usable_bytes for device in self.devices], np.int64)

    @property
    def hardware(self) -> tuple[str, ...]:
        """Returns the hardware of each device; empty if none is named, as all are equal."""
        named = tuple(device.hardware for device in self.devices)
        return named if any(named) else ()

    @property
    def nodes(self) -> int:
        """Returns the number of nodes, by the objective's network; 1 if it has none.

        Each node has as many devices, with consecutive numbers.
        """
        link = self.objective.link
        return 1 if link is None else link.nodes(len(self.devices))

    @property
    def columns(self) -> int:
        """Returns the columns of all pooled outputs together."""
        return sum(table.dim * table.features for table in self.tables)

    @property
    def exchanged_columns(self) -> float:
        """Returns the columns that exchanges of all pooled outputs together count for."""
        return sum(table.whole().exchanged_columns for table in self.tables)

    @property
    def columns_in_order(self) -> int:
        """Returns the columns that the first split of a table puts in order anew: all, unless they
        are put in order anew in any case.
        """
        return 0 if self.beside else self.columns

    def without(self, copied: Collection[str], reserve: bool = True) -> "ShardingTask":
        """Returns the task of the other tables if each device has a copy of these.

        Rules keep to the other tables, of which there may be none.

        Args:
            copied: Names of tables.
            reserve: Whether the memory of copies is reserved; plans are priced without.

        Raises:
            FieldError: A device has no memory for the copies and more.
        """
        if not copied:
            return self
        names, size = frozenset(copied), self.copies_memory(copied).total if reserve else 0
        devices = tuple(replace(d, reserved_bytes=d.reserved_bytes + size) for d in self.devices)
        tables = tuple(table for table in self.tables if table.name not in names)
        kept = [rule.without(names) for rule in self.rules]
        rules = tuple(rule for rule in kept if rule is not None)
        beside = (*self.beside, *sorted(names))
        return replace(self, tables=tables, devices=devices, rules=rules, beside=beside)

    def with_row_blocks(
        self, counts: Mapping[str, int], nodes: Mapping[str, int] | None = None
    ) -> "ShardingTask":
        """Returns the task in which blocks of rows take the place of these tables.

        Each block is a table of its own, which is whole and on one device. Other rules keep to the
        other tables.

        Args:
            counts: Number of blocks of each table that is sharded by rows.
            nodes: First device of tables whose blocks are on the devices of one node; by default
                any.
        """
        if not counts:
            return self
        firsts = nodes or {}
        blocks = {t: self.row_blocks(t, counts[t.name]) for t in self.tables if t.name in counts}
        tables = (part for table in self.tables for part in blocks.get(table, (table,)))
        kept = [rule.without(counts) for rule in self.rules]
        pinned, whole = list[Rule](), list[Rule]()
        for table, held in blocks.items():
            first, step = firsts.get(table.name), len(held)
            for number, block in enumerate(held):
                found = range(number, len(self.devices), step)
                devices = tuple(found) if first is None else (first + number,)
                why = f"{table.name}: in blocks of rows"
                pinned.append(Rule("on", (block.name,), devices, why))
            # Over fewer devices, blocks may be in slices of columns (a grid).
            if first is not None or step == len(self.devices):
                whole.append(Rule("whole", tuple(block.name for block in held)))
        rules = (*(rule for rule in kept if rule is not None), *pinned, *whole)
        beside = (*self.beside, *sorted(counts))
        return replace(self, tables=tuple(tables), rules=rules, beside=beside)

    def row_blocks(self, table: EmbeddingTable, count: int) -> tuple[EmbeddingTable, ...]:
        """Returns a table in `count` blocks of rows on as many of the devices."""
        link = self.objective.link
        share = 1.0 if link is None else link.block_share(len(self.devices), count)
        return row_blocks(table, count, share)

    def with_hot_rows(self, counts: Mapping[str, int]) -> "ShardingTask":
        """Returns the task in which the hot rows of these tables are tables of their own, copied.

        Cold rows keep the table's name and rules.

        Args:
            counts: Number of hot rows of each table whose cold rows are numbered anew; maybe 0.
        """
        if not counts:
            return self
        from autoshard.workload.hot_rows import cold_rows, hot_and_cold  # other tasks do without

        tables, hot_tables = list[EmbeddingTable](), list[str]()
        names, size = {table.name for table in self.tables}, self.hot_ids_bytes(counts)
        for table in self.tables:
            if not counts.get(table.name):
                numbered = table.name in counts
                tables.append(cold_rows(table, 0, self.batch_size) if numbered else table)
                continue
            hot, cold = hot_and_cold(table, counts[table.name], self.batch_size)
            if hot.name in names:
                problem = f"of table {table.name} would be table {hot.name}, which there is already"
                raise FieldError("hot_rows", f"{problem}: rename it")
            tables += [cold, hot]
            hot_tables.append(hot.name)
        if not hot_tables:
            return replace(self, tables=tuple(tables))
        copied = Rule("copied", tuple(hot_tables), name="hot rows")
        devices = tuple(replace(d, reserved_bytes=d.reserved_bytes + size) for d in self.devices)
        rules = (*self.rules, copied)
        return replace(self, tables=tuple(tables), devices=devices, rules=rules)

    def with_cached_rows(self, counts: Mapping[str, int]) -> "ShardingTask":
        """Returns the task in which these tables are in host memory, of which no device has copies.

        Args:
            counts: Rows that caches in device memory have room for, of each such table.
        """
        if not counts:
            return self
        tables = tuple(
            replace(table, cached_rows=counts[table.name]) if table.name in counts else table
            for table in self.tables
        )
        rule = Rule("not_copied", tuple(counts), name="caches")
        return replace(self, tables=tables, rules=(*self.rules, rule))

    def hot_ids_bytes(self, counts: Mapping[str, int]) -> int:
        """Returns the memory on each device in which it finds so many hot rows of tables."""
        return sum(_HOT_ID_BYTES * table.rows for table in self.tables if counts.get(table.name))

    def copies_memory(self, copied: Collection[str]) -> MemoryParts:
        """Returns the memory of copies of these tables on each device."""
        names = frozenset(copied)
        tables = [table for table in self.tables if table.name in names]
        return self.operator.copies_memory(tables, self.batch_size, len(self.devices))

    def rules_of_device(self, number: int) -> tuple[Rule, ...]:
        """Returns the rules that name this device."""
        return tuple(rule for rule in self.rules if rule.of_devices and number in rule.numbers)

    def piece_bytes(self, piece: Piece) -> int:
        """Returns the bytes of a piece, with those that a batch needs for it."""
        return self.bytes_of((piece,))

    def bytes_of(self, pieces: Iterable[Piece]) -> int:
        """Returns the bytes of pieces on one device, with those that a batch needs."""
        return self.operator.memory(pieces, self.batch_size).total

    def table_bytes(self, table: EmbeddingTable) -> int:
        """Returns the bytes of the whole table, with those that a batch needs for it."""
        return self.piece_bytes(table.whole())

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON document with its schema version."""
        return TASK_SCHEMA.stamp(
            {
                "batch_size": self.batch_size,
                "operator": self.operator.to_json(),
                "devices": [device.to_json() for device in self.devices],
                "tables": [table.to_json() for table in self.tables],
                "rules": [rule.to_json() for rule in self.rules],
                "objective": self.objective.to_json(),
            }
        )

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> "ShardingTask":
        """Returns the task that `to_json` wrote."""
        TASK_SCHEMA.check(document)
        with documents.fields_of("task"):
            return ShardingTask(
                tables=tuple(EmbeddingTable.from_json(t) for t in document["tables"]),
                devices=tuple(Device(**device) for device in document["devices"]),
                batch_size=document["batch_size"],
                operator=OperatorOptions(**document["operator"]),
                rules=tuple(Rule.from_json(rule) for rule in document["rules"]),
                objective=Objective.from_json(document["objective"]),
            )

    def save(self, path: Path | str) -> None:
        """Writes the task as JSON."""
        documents.write(path, self.to_json())

    @staticmethod
    def load(path: Path | str) -> "ShardingTask":
        """Reads a task; UserError names the file and the fault."""
        with documents.naming(path):
            return ShardingTask.from_json(documents.read(path))


def check_devices(count: int) -> int:
    """Returns the number of devices; FieldError if there are no plans for so many."""
    check_whole("num_devices", count, 1, MAX_DEVICES)
    return count


def check_unique_names(tables: tuple[EmbeddingTable, ...]) -> None:
    """Raises UserError if two tables share a name."""
    seen: set[str] = set()
    for table in tables:
        if table.name in seen:
            raise UserError(f"table name {table.name!r} occurs twice: names must be unique")
        seen.add(table.name)
