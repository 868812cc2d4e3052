"""Sharding plans: where columns, blocks of rows and copies of tables are, and validation."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from autoshard.workload import documents
from autoshard.workload.errors import FieldError, UserError
from autoshard.workload.plans.faults import fault_of_memory, fault_of_options, fault_of_rule
from autoshard.workload.plans.placements import Placement, merged_by_device
from autoshard.workload.plans.replicas import ReplicaGroups
from autoshard.workload.tables.operators import MemoryParts
from autoshard.workload.tables.table import EmbeddingTable, Piece, Shard
from autoshard.workload.tasks.task import ShardingTask, check_devices
from autoshard.workload.ways.option import (
    COLUMN_WISE,
    Options,
    ShardingOption,
    columns_task,
    common_memory,
    option_of,
)
from autoshard.workload.ways.rows import fault_of_blocks

PLAN_SCHEMA = documents.Schema("autoshard.plan", 4)
_FIELDS = {"schema", "version", "num_devices", "placements", "options", "replicas"}


class PlanError(UserError):
    """A plan is not valid for its task, or none was found."""


@dataclass(frozen=True)
class ShardingPlan:
    """How each table is sharded, and the devices of its parts. A table-wise plan has one piece per
    table.

    Args:
        placements: Pieces, each on one device, or in blocks of rows on several.
        num_devices: Number of devices.
        options: Options of tables that are not just in columns or blocks of rows, which placements
            say: copies, hot rows, caches.
        replicas: Groups of so many devices that each train a copy of all tables; None if alone.
    """

    placements: tuple[Placement, ...]
    num_devices: int
    options: Options = field(default_factory=dict, hash=False)
    replicas: ReplicaGroups | None = None

    def __post_init__(self) -> None:
        own = {name: option.without_blocks for name, option in sorted(self.options.items())}
        kept = {name: option for name, option in own.items() if option != COLUMN_WISE}
        object.__setattr__(self, "options", kept)

    @staticmethod
    def table_wise(task: ShardingTask, devices: Sequence[int]) -> "ShardingPlan":
        """Returns the plan that places table i of the task whole on device `devices[i]`."""
        if len(devices) != len(task.tables):
            raise PlanError(f"{len(devices)} devices are given for {len(task.tables)} tables")
        pairs = zip(task.tables, devices, strict=True)
        placements = tuple(Placement(table.name, 0, table.dim, int(d)) for table, d in pairs)
        return ShardingPlan(placements, len(task.devices))

    @staticmethod
    def of_pieces(task: ShardingTask, placed: Iterable[tuple[Piece, int]]) -> "ShardingPlan":
        """Returns the plan with as many columns of each table on each device.

        Columns are assigned anew, so that a device holds at most one piece of a table. Costs do not
        depend on which columns these are.
        """
        placements = (
            Placement(piece.table.name, piece.start, piece.width, device)
            for piece, device in merged_by_device(placed)
        )
        return ShardingPlan(tuple(placements), len(task.devices))

    @staticmethod
    def of_placed(placed: Iterable[tuple[Piece, int]], num_devices: int) -> "ShardingPlan":
        """Returns the plan with exactly these columns on these devices, adjacent pieces merged."""
        placements = (Placement(p.table.name, p.start, p.width, int(d)) for p, d in placed)
        found: list[Placement] = []
        for new in sorted(placements):
            last = found[-1] if found else None
            if last and replace(last, start=last.start + last.width, width=new.width) == new:
                found[-1] = replace(last, width=last.width + new.width)
            else:
                found.append(new)
        return ShardingPlan(tuple(found), num_devices)

    @staticmethod
    def in_place(task: ShardingTask, placed: Iterable[tuple[Piece, int]]) -> "ShardingPlan":
        """Returns `of_placed`, but with the columns of tables assigned anew of which a device would
        hold several pieces.
        """
        placed = list(placed)
        plan = ShardingPlan.of_placed(placed, len(task.devices))
        homes = Counter((placement.table, placement.device) for placement in plan.placements)
        anew = {table for (table, _), pieces in homes.items() if pieces > 1}
        if not anew:
            return plan
        merged = ShardingPlan.of_pieces(task, (p for p in placed if p[0].table.name in anew))
        kept = (placement for placement in plan.placements if placement.table not in anew)
        return replace(merged, placements=(*kept, *merged.placements))

    def by_table(self) -> dict[str, list[Placement]]:
        """Returns the placements of each table, in the order of columns."""
        found: dict[str, list[Placement]] = {}
        for placement in sorted(self.placements):
            found.setdefault(placement.table, []).append(placement)
        return found

    @cached_property
    def row_wise(self) -> dict[str, int]:
        """Returns the number of row blocks of each table that is sharded by rows."""
        return {p.table: p.row_blocks for p in self.placements if p.row_blocks > 1}

    @cached_property
    def copied(self) -> tuple[str, ...]:
        """Returns the names of tables of which each device has a copy."""
        return tuple(name for name, option in self.options.items() if option.copied)

    @cached_property
    def hot_rows(self) -> dict[str, int]:
        """Returns the number of hot rows, maybe 0, of tables whose rows are numbered by a hash."""
        counts = ((name, option.hot_rows) for name, option in self.options.items())
        return {name: count for name, count in counts if count is not None}

    @cached_property
    def cached_rows(self) -> dict[str, int]:
        """Returns the rows that caches have room for, of tables in host memory."""
        counts = ((name, option.cached_rows) for name, option in self.options.items())
        return {name: count for name, count in counts if count is not None}

    @property
    def has_copies(self) -> bool:
        """Returns whether devices have copies of tables, or of hot rows."""
        return any(option.has_copies for option in self.options.values())

    @cached_property
    def copied_hot_rows(self) -> dict[str, int]:
        """Returns how many hot rows of a table each device has a copy of, where there are any."""
        return {name: count for name, count in self.hot_rows.items() if count}

    @property
    def is_plain(self) -> bool:
        """Returns whether each table is on single devices, whole or in slices of columns, and in
        their memory.
        """
        return not (self.options or self.row_wise)

    @property
    def has_grids(self) -> bool:
        """Returns whether a table is in slices of columns, each in blocks of rows."""
        names = [p.table for p in self.placements if p.row_blocks > 1]
        return len(names) > len(set(names))

    def all_options(self) -> dict[str, ShardingOption]:
        """Returns the options of tables that are not in columns alone, with blocks of rows.

        Of a table in several slices of columns, each in blocks of rows (a grid), that of the first.
        """
        found = dict(self.options)
        blocks = (each for each in self.placements if each.row_blocks > 1)
        for each in sorted(blocks, reverse=True):
            option = option_of(self.options, each.table)
            found[each.table] = replace(option, row_blocks=each.row_blocks, first=each.device)
        return found

    def with_options(self, task: ShardingTask, options: Options) -> "ShardingPlan":
        """Returns this plan with tables that take these options: columns are where they were."""
        columns = (each for each in self.placements if option_of(options, each.table).by_columns)
        pinned = (
            Placement(table.name, 0, table.dim, homes[0], len(homes))
            for table in task.tables
            if (homes := option_of(options, table.name).homes)
        )
        return replace(self, placements=(*columns, *pinned), options={**self.options, **options})

    def with_columns(self, columns: "ShardingPlan") -> "ShardingPlan":
        """Returns this plan with another plan's columns; blocks of rows and copies stay."""
        blocks = (each for each in self.placements if each.row_blocks > 1)
        return replace(self, placements=(*columns.placements, *blocks))

    def columns_task(self, task: ShardingTask, reserve: bool = False) -> ShardingTask:
        """Returns the task of what single devices hold by this plan (`ways.option.columns_task`).

        Args:
            task: Task of this plan.
            reserve: Whether the memory of copies is reserved, to plan anew; plans are priced
                without.
        """
        grids = self.row_wise if self.has_grids else ()
        return columns_task(task, self.all_options(), grids, reserve)

    def held_tables(self, task: ShardingTask) -> dict[str, EmbeddingTable]:
        """Returns the tables whose columns or blocks devices hold, by name."""
        if not self.options:
            return {table.name: table for table in task.tables}
        return {
            table.name: option_of(self.options, table.name).held(table, task.batch_size)
            for table in task.tables
        }

    def blocks(self, task: ShardingTask) -> dict[str, tuple[EmbeddingTable, ...]]:
        """Returns the blocks of each table that is sharded by rows, in the task's order."""
        counts, held = self.row_wise, self.held_tables(task)
        return {n: task.row_blocks(t, counts[n]) for n, t in held.items() if n in counts}

    def placed(self, task: ShardingTask) -> list[tuple[Piece, int]]:
        """Returns pieces with their devices; of a table by rows, pieces of its blocks."""
        tables, found = self.held_tables(task), list[tuple[Piece, int]]()
        for p in self.placements:
            table = tables[p.table]
            held = (table,) if p.row_blocks == 1 else task.row_blocks(table, p.row_blocks)
            found += [
                (Piece(part, p.start, p.width), device)
                for part, device in zip(held, p.devices, strict=True)
            ]
        return found

    def check(self, task: ShardingTask) -> None:
        """Raises PlanError unless every column is placed once, within memory and by all rules."""
        self.check_places(task)
        self.check_options(task)
        self.check_rules(task)
        _refuse(fault_of_memory(self.device_memory(task), task.devices))

    def check_rules(self, task: ShardingTask) -> None:
        """Raises PlanError unless the plan keeps the task's rules."""
        options, widths = self.all_options(), self._widths(task)
        for rule in task.rules:
            _refuse(fault_of_rule(rule, options, widths, self.num_devices))

    def check_options(self, task: ShardingTask) -> None:
        """Raises PlanError unless the task's tables can have their options."""
        _refuse(fault_of_options(self.all_options(), task))

    def check_places(self, task: ShardingTask) -> None:
        """Raises PlanError unless every column is placed once, on a device of the task."""
        if self.num_devices != len(task.devices):
            raise PlanError(
                f"the plan is for {self.num_devices} devices, the task has {len(task.devices)}"
            )
        self.check_columns(task.tables)

    def _check_devices(self) -> None:
        for placement in self.placements:
            last = placement.device + max(0, placement.row_blocks - 1)
            if not 0 <= placement.device <= last < self.num_devices:
                raise PlanError(
                    f"table {placement.table} is on device {last}, "
                    f"devices are numbered 0 to {self.num_devices - 1}"
                )

    def check_columns(self, tables: Sequence[EmbeddingTable]) -> None:
        """Raises PlanError unless exactly the columns of these tables are placed, each once, with
        blocks of rows as TorchRec makes them.
        """
        self._check_devices()
        pieces: dict[str, list[Placement]] = {table.name: [] for table in tables}
        for name in (*(placement.table for placement in self.placements), *self.options):
            if name not in pieces:
                raise PlanError(
                    f"table {name} of the plan is not among the {len(tables)} tables that are "
                    f"sharded, of which {tables[0].name if tables else None} is the first"
                )
        for placement in self.placements:
            pieces[placement.table].append(placement)
        for name in self.copied:
            if pieces[name]:
                raise PlanError(
                    f"table {name} is copied to all devices, and columns of it are on one: "
                    "take either out of the plan"
                )
        copied = frozenset(self.copied)
        for table in tables:
            if table.name in copied:
                continue
            covered = 0
            for placement in sorted(pieces[table.name]):
                if placement.start != covered:
                    fault = "twice" if placement.start < covered else "nowhere"
                    first, last = sorted((placement.start, covered))
                    raise PlanError(f"columns {first} to {last} of table {table.name} are {fault}")
                Piece(table, placement.start, placement.width)
                covered += placement.width
            if covered != table.dim:
                raise PlanError(
                    f"columns {covered} to {table.dim} of table {table.name} are nowhere"
                )
            homes = [placement.devices for placement in pieces[table.name]]
            _refuse(fault_of_blocks(table, homes, self.num_devices))

    def _widths(self, task: ShardingTask) -> dict[str, dict[int, int]]:
        """Returns the number of columns of each table, by device."""
        widths: dict[str, dict[int, int]] = {table.name: {} for table in task.tables}
        for placement in self.placements:
            held = widths[placement.table]
            for device in placement.devices:
                held[device] = held.get(device, 0) + placement.width
        return widths

    def shards(self, task: ShardingTask) -> tuple[Shard | None, ...]:
        """Returns the shard of each device; None for a device without tables."""
        return tuple(Shard(tuple(pieces)) if pieces else None for pieces in self.pieces(task))

    def columns(self, task: ShardingTask) -> tuple[int, ...]:
        """Returns the output columns of each device, which it sends in all-to-alls."""
        return tuple(sum(p.output_width for p in pieces) for pieces in self.pieces(task))

    def exchanged_columns(self, task: ShardingTask) -> tuple[float, ...]:
        """Returns the columns that exchanges of each device's outputs count for."""
        return tuple(
            float(sum(piece.exchanged_columns for piece in pieces)) for pieces in self.pieces(task)
        )

    def device_bytes(self, task: ShardingTask) -> tuple[int, ...]:
        """Returns the bytes that each device needs."""
        return tuple(parts.total for parts in self.device_memory(task))

    def host_bytes(self, task: ShardingTask) -> tuple[int, ...]:
        """Returns the host memory that the tables of each device need."""
        held = self.pieces(task)
        return tuple(sum(map(task.operator.host_bytes, pieces)) for pieces in held)

    def device_memory(self, task: ShardingTask) -> tuple[MemoryParts, ...]:
        """Returns the bytes that each device needs, by use."""
        copies = common_memory(task, self.options)
        held = self.pieces(task)
        return tuple(task.operator.memory(some, task.batch_size).plus(copies) for some in held)

    def num_tables(self) -> tuple[int, ...]:
        """Returns of how many tables each device holds a part or a copy."""
        held: list[set[str]] = [set(self.copied) for _ in range(self.num_devices)]
        for placement in self.placements:
            for device in placement.devices:
                held[device].add(placement.table)
        return tuple(map(len, held))

    def pieces(self, task: ShardingTask) -> list[list[Piece]]:
        """Returns the pieces of each device, as `placed` has them."""
        held: list[list[Piece]] = [[] for _ in range(self.num_devices)]
        for piece, device in self.placed(task):
            held[device].append(piece)
        return held

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON document with its schema version."""
        placements = [placement.to_json() for placement in self.placements]
        body: dict[str, Any] = {"num_devices": self.num_devices, "placements": placements}
        if self.options:
            body["options"] = {name: option.to_json() for name, option in self.options.items()}
        if self.replicas is not None:
            body["replicas"] = self.replicas.to_json()
        return PLAN_SCHEMA.stamp(body)

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> "ShardingPlan":
        """Returns the plan that `to_json` wrote."""
        PLAN_SCHEMA.check(document)
        if unknown := sorted(set(document) - _FIELDS):
            raise FieldError(unknown[0], "is not a field of a plan")
        with documents.fields_of("plan"):
            placements: list[Mapping[str, Any]] = document["placements"]
            options = document.get("options", {})
            if not isinstance(options, dict) or not all(map(_is_object, options.values())):
                raise FieldError("options", "must give an object by table")
            return ShardingPlan(
                tuple(map(Placement.from_json, placements)),
                check_devices(document["num_devices"]),
                {name: ShardingOption.from_json(name, option) for name, option in options.items()},
                ReplicaGroups.from_json(document.get("replicas")),
            )

    def save(self, path: Path | str) -> None:
        """Writes the plan as JSON."""
        documents.write(path, self.to_json())

    @staticmethod
    def load(path: Path | str) -> "ShardingPlan":
        """Reads a plan; UserError names the file and the fault."""
        with documents.naming(path):
            return ShardingPlan.from_json(documents.read(path))


def _refuse(fault: str | None) -> None:
    if fault is not None:
        raise PlanError(fault)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)
