"""Sharding tasks: tables, devices, batch size, operator, rules and objective."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from autoshard.workload import documents
from autoshard.workload.bounds import MAX_BATCH_SIZE, MAX_DEVICES, MAX_GB
from autoshard.workload.errors import FieldError, UserError
from autoshard.workload.tables.operators import OperatorOptions
from autoshard.workload.tables.table import EmbeddingTable, Piece, check_whole, row_blocks
from autoshard.workload.tasks.objective import Objective
from autoshard.workload.tasks.rules import Rule

TASK_SCHEMA = documents.Schema("autoshard.task", 1)


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
        beside: Names of tables that are no tables of this task, since each device has a copy, or a
            block of rows (`ways.option.columns_task`).
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

    def row_blocks(self, table: EmbeddingTable, count: int) -> tuple[EmbeddingTable, ...]:
        """Returns a table in `count` blocks of rows on as many of the devices."""
        return row_blocks(table, count, self.block_share(table, count))

    def block_share(self, table: EmbeddingTable, count: int) -> float:
        """Returns what exchanging a column of one of a table's `count` blocks of rows takes, over
        one of the whole table (`links.Network.block_share`).
        """
        if not table.pooled:
            return 1 / count  # a block has outputs of its own lookups alone
        link = self.objective.link
        return 1.0 if link is None else link.block_share(len(self.devices), count)

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
