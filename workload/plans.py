"""Sharding plans: where columns, blocks of rows and copies of tables are, and validation."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autoshard.workload import documents
from autoshard.workload.errors import FieldError, UserError
from autoshard.workload.operators import MemoryParts
from autoshard.workload.placements import Placement, merged_by_device
from autoshard.workload.plan_faults import fault_of_blocks, fault_of_memory, fault_of_rule
from autoshard.workload.replicas import ReplicaGroups
from autoshard.workload.tables import EmbeddingTable, Piece, Shard, hot_name
from autoshard.workload.tasks import ShardingTask, check_devices

PLAN_SCHEMA = documents.Schema("autoshard.plan", 3)


class PlanError(UserError):
    """A plan is not valid for its task, or none was found."""


@dataclass(frozen=True)
class ShardingPlan:
    """Pieces of tables and their devices. A table-wise plan has one piece per table.

    Args:
        placements: Pieces, each on one device, or in blocks of rows on several.
        num_devices: Number of devices.
        copied: Names of tables of which each device has a copy (data-parallel).
        hot_rows: Names of tables of which each device has a copy of the most used rows, and how
            many these are, maybe 0; placements are those of the other rows, which are numbered by a
            hash of their ids.
        replicas: Groups of so many devices that each train a copy of all tables; None if alone.
        cached_rows: Names of tables in host memory, and how many of their rows caches in device
            memory have room for.
    """

    placements: tuple[Placement, ...]
    num_devices: int
    copied: tuple[str, ...] = ()
    hot_rows: tuple[tuple[str, int], ...] = ()
    replicas: ReplicaGroups | None = None
    cached_rows: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        for name in ("copied", "hot_rows", "cached_rows"):
            object.__setattr__(self, name, tuple(sorted(getattr(self, name))))

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

    @property
    def row_wise(self) -> dict[str, int]:
        """Returns the number of row blocks of each table that is sharded by rows."""
        return {p.table: p.row_blocks for p in self.placements if p.row_blocks > 1}

    @property
    def has_copies(self) -> bool:
        """Returns whether devices have copies of tables, or of hot rows."""
        return bool(self.copied or self.copied_hot_rows)

    @property
    def copied_hot_rows(self) -> dict[str, int]:
        """Returns how many hot rows of a table each device has a copy of, where there are any."""
        return {name: count for name, count in self.hot_rows if count}

    @property
    def is_plain(self) -> bool:
        """Returns whether each table is on single devices, whole or in slices of columns, and in
        their memory.
        """
        return not (self.copied or self.hot_rows or self.cached_rows or self.row_wise)

    def resolved(self, task: ShardingTask) -> tuple["ShardingPlan", ShardingTask]:
        """Returns the same plan, and the task, in which hot rows are tables of their own, and
        tables in host memory have their caches.
        """
        if not self.hot_rows and not self.cached_rows:
            return self, task
        tables = {table.name for table in task.tables}
        for what, parts in (("copies hot", self.hot_rows), ("caches", self.cached_rows)):
            for name, _ in parts:
                if name not in tables:
                    raise PlanError(f"table {name}, of which the plan {what} rows, is not sharded")
        task = task.with_cached_rows(dict(self.cached_rows))
        plan = replace(self.with_hot_tables(), cached_rows=())
        return plan, task.with_hot_rows(dict(self.hot_rows))

    def with_hot_tables(self) -> "ShardingPlan":
        """Returns the same plan for a model in which hot rows are tables of their own."""
        copied = (*self.copied, *map(hot_name, self.copied_hot_rows))
        return replace(self, copied=copied, hot_rows=())

    def with_hot_rows(self, counts: Mapping[str, int]) -> "ShardingPlan":
        """Returns the plan of a task whose `with_hot_rows` this plan is for."""
        hot_tables = set(map(hot_name, counts))
        kept = tuple(name for name in self.copied if name not in hot_tables)
        return replace(self, copied=kept, hot_rows=tuple(counts.items()))

    @property
    def has_grids(self) -> bool:
        """Returns whether a table is in slices of columns, each in blocks of rows."""
        names = [p.table for p in self.placements if p.row_blocks > 1]
        return len(names) > len(set(names))

    def blocks(self, task: ShardingTask) -> dict[EmbeddingTable, tuple[EmbeddingTable, ...]]:
        """Returns the blocks of each table that is sharded by rows, in the task's order."""
        counts, (_, task) = self.row_wise, self.resolved(task)
        return {t: task.row_blocks(t, counts[t.name]) for t in task.tables if t.name in counts}

    def on_single_devices(
        self, task: ShardingTask, reserve: bool = False
    ) -> tuple["ShardingPlan", ShardingTask]:
        """Returns the plan of what each device holds alone, and its task.

        There are no copies, and each block of rows is a table of its own. Of a table with hot rows
        it has the cold ones.

        Args:
            task: Task of this plan.
            reserve: Whether the memory of copies is reserved, to plan anew; plans are priced
                without.
        """
        if self.hot_rows or self.cached_rows:
            plan, task = self.resolved(task)
            return plan.on_single_devices(task, reserve)
        if self.is_plain:
            return self, task
        firsts = {p.table: p.device for p in self.placements if 1 < p.row_blocks < self.num_devices}
        nodes = None if self.has_grids else firsts
        rest = task.without(self.copied, reserve).with_row_blocks(self.row_wise, nodes)
        placements = (
            Placement(piece.table.name, piece.start, piece.width, device)
            for piece, device in self.placed(task)
        )
        return ShardingPlan(tuple(placements), self.num_devices), rest

    def with_ways_of(self, other: "ShardingPlan", task: ShardingTask) -> "ShardingPlan":
        """Returns this plan of a task `on_single_devices` with another plan's copies and blocks."""
        blocks = {block.name for held in other.blocks(task).values() for block in held}
        own = (placement for placement in self.placements if placement.table not in blocks)
        shared = (placement for placement in other.placements if placement.row_blocks > 1)
        return replace(other, placements=(*own, *shared))

    def placed(self, task: ShardingTask) -> list[tuple[Piece, int]]:
        """Returns pieces with their devices; of a table by rows, pieces of its blocks."""
        _, task = self.resolved(task)
        tables = {table.name: table for table in task.tables}
        found = []
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
        for rule in task.rules:
            hot = [name for name in self.copied_hot_rows if name in rule.tables]
            if hot and not rule.allows_hot_rows:
                raise PlanError(
                    f"the plan breaks the constraint {rule.name!r}: hot rows of {hot[0]} are "
                    "copied to all devices"
                )
        if self.hot_rows or self.cached_rows:
            self._check_caches()
            plan, task = self.resolved(task)
            plan.check(task)
            return
        self.check_places(task)
        widths = self._widths(task)
        for rule in task.rules:
            _refuse(fault_of_rule(rule, widths, self.copied, self.row_wise))
        _refuse(fault_of_memory(self.device_memory(task), task.devices))

    def _check_caches(self) -> None:
        """Raises PlanError if copies of tables, or of hot rows, are in host memory."""
        for name, _ in self.cached_rows:
            if name in self.copied or name in self.copied_hot_rows:
                what = "hot rows of it are" if name in self.copied_hot_rows else "it is"
                raise PlanError(
                    f"table {name} is in host memory, and {what} copied to all devices: take "
                    "either out of the plan"
                )

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
        for name in (*(placement.table for placement in self.placements), *self.copied):
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
            _refuse(fault_of_blocks(table, pieces[table.name], self.num_devices))

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
        ids = MemoryParts(inputs=task.hot_ids_bytes(dict(self.hot_rows)))
        plan, task = self.resolved(task)
        copies = task.copies_memory(plan.copied).plus(ids)
        held = plan.pieces(task)
        return tuple(task.operator.memory(some, task.batch_size).plus(copies) for some in held)

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
        if self.copied:
            body["copied"] = list(self.copied)
        if self.hot_rows:
            body["hot_rows"] = dict(self.hot_rows)
        if self.replicas is not None:
            body["replicas"] = self.replicas.to_json()
        if self.cached_rows:
            body["cached_rows"] = dict(self.cached_rows)
        return PLAN_SCHEMA.stamp(body)

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> "ShardingPlan":
        """Returns the plan that `to_json` wrote."""
        PLAN_SCHEMA.check(document)
        with documents.fields_of("plan"):
            placements: list[Mapping[str, Any]] = document["placements"]
            copied = document.get("copied", [])
            if not isinstance(copied, list) or len(set(map(str, copied))) < len(copied):
                raise FieldError("copied", "must be a list of different tables")
            return ShardingPlan(
                tuple(map(Placement.from_json, placements)),
                check_devices(int(document["num_devices"])),
                tuple(map(str, copied)),
                _rows_by_table(document, "hot_rows"),
                ReplicaGroups.from_json(document.get("replicas")),
                _rows_by_table(document, "cached_rows"),
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


def _rows_by_table(document: Mapping[str, Any], field: str) -> tuple[tuple[str, int], ...]:
    found = document.get(field, {})
    if not (isinstance(found, dict) and all(type(n) is int for n in found.values())):
        raise FieldError(field, "must give numbers of rows by table")
    return tuple(found.items())
