"""Sharding options: how the rows and columns of one table are spread over devices and memories."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from autoshard.workload.placements import Placement
from autoshard.workload.plans import ShardingPlan
from autoshard.workload.tables import EmbeddingTable, Piece, hot_name
from autoshard.workload.tasks import ShardingTask


@dataclass(frozen=True)
class ShardingOption:
    """How a table is sharded, but for the devices of its columns.

    Args:
        copied: Whether each device has a copy (data-parallel).
        row_blocks: Number of blocks of rows, on as many devices (row-wise, table-row-wise); 1 where
            the table is whole or in slices of columns.
        first: First device of the blocks.
        hot_rows: Number of the most used rows of which each device has a copy. The others are cold,
            in columns or in blocks of rows, and numbered by a hash of their ids. 0: all rows are
            numbered so. None: rows are as they come.
        cached_rows: Rows for which caches in device memory have room, if the table is in host
            memory; None if it is in device memory.
    """

    copied: bool = False
    row_blocks: int = 1
    first: int = 0
    hot_rows: int | None = None
    cached_rows: int | None = None

    @property
    def by_columns(self) -> bool:
        """Whether any device may have any columns of the table, or of its cold rows."""
        return not self.copied and self.row_blocks == 1

    def held(self, table: EmbeddingTable, batch_size: int) -> EmbeddingTable:
        """Returns the table whose columns or blocks single devices hold: with its cache, or with
        cold rows alone. It keeps the table's name.
        """
        if self.cached_rows is not None:
            table = replace(table, cached_rows=self.cached_rows)
        if self.hot_rows is None:
            return table
        from autoshard.workload.hot_rows import cold_rows  # few tasks need its sums

        return cold_rows(table, self.hot_rows, batch_size)

    def copies(self, table: EmbeddingTable, batch_size: int) -> tuple[EmbeddingTable, ...]:
        """Returns the tables of which each device has a copy: this one, or that of its hot rows."""
        if self.copied:
            return (table,)
        if not self.hot_rows:
            return ()
        from autoshard.workload.hot_rows import hot_and_cold

        return hot_and_cold(table, self.hot_rows, batch_size)[:1]

    def copies_bytes(self, table: EmbeddingTable, task: ShardingTask) -> int:
        """Returns the bytes that copies of a table take on each device."""
        copies = self.copies(table, task.batch_size)
        if not copies:
            return 0
        memory = task.operator.copies_memory(copies, task.batch_size, len(task.devices))
        return memory.total + (
            task.hot_ids_bytes({table.name: self.hot_rows}) if self.hot_rows else 0
        )


COLUMN_WISE = ShardingOption()
DATA_PARALLEL = ShardingOption(copied=True)

Options = Mapping[str, ShardingOption]  # of tables that are not `COLUMN_WISE`, by name


class Sharded(NamedTuple):
    """A plan as searches have it.

    Args:
        placed: Pieces of tables in columns, and their devices.
        options: Options of the other tables.
    """

    placed: Sequence[tuple[Piece, int]]
    options: Options = MappingProxyType({})

    @staticmethod
    def of(plan: ShardingPlan, task: ShardingTask) -> "Sharded":
        """Returns a plan."""
        options = options_of(plan)
        held = {t.name: _of(options, t.name).held(t, task.batch_size) for t in task.tables}
        placed = [
            (Piece(held[each.table], each.start, each.width), each.device)
            for each in plan.placements
            if _of(options, each.table).by_columns
        ]
        return Sharded(placed, options)

    @staticmethod
    def of_columns(
        task: ShardingTask, placed: Sequence[tuple[Piece, int]], options: Options
    ) -> "Sharded":
        """Returns the plan with these options, given what single devices hold by them."""
        names = {t.name for t in task.tables if _of(options, t.name).by_columns}
        return Sharded([pair for pair in placed if pair[0].table.name in names], options)

    def plan(self, task: ShardingTask) -> ShardingPlan:
        """Returns the plan; columns of a table that meet on a device are one piece."""
        return plan_of(task, self.options, list(self.placed))

    def columns_placed(self, task: ShardingTask) -> list[tuple[Piece, int]]:
        """Returns what the task of single devices places (`columns_task`): blocks of rows, too."""
        blocks = [
            block
            for table in task.tables
            for block in blocks_of(task, table, _of(self.options, table.name))
        ]
        return [*self.placed, *blocks]


def options_of(plan: ShardingPlan) -> dict[str, ShardingOption]:
    """Returns the options of a plan's tables that are not `COLUMN_WISE`.

    Of a table in several slices of columns, each in blocks of rows (a grid), that of one slice.
    """
    found = dict.fromkeys(plan.copied, DATA_PARALLEL)
    for placement in plan.placements:
        if placement.row_blocks > 1:
            blocks = ShardingOption(row_blocks=placement.row_blocks, first=placement.device)
            found[placement.table] = blocks
    for name, count in plan.hot_rows:
        found[name] = replace(_of(found, name), hot_rows=count)
    for name, count in plan.cached_rows:
        found[name] = replace(_of(found, name), cached_rows=count)
    return found


def plan_of(task: ShardingTask, options: Options, placed: list[tuple[Piece, int]]) -> ShardingPlan:
    """Returns the plan with these options.

    Args:
        task: Task of the plan.
        options: Options of tables that are not `COLUMN_WISE`.
        placed: Pieces of tables in columns, and their devices. Columns are assigned anew, so that a
            device has one piece of a table.
    """
    tables = {table.name: table for table in task.tables}
    columns = ShardingPlan.of_pieces(task, placed)
    blocks = (
        Placement(name, 0, tables[name].dim, option.first, option.row_blocks)
        for name, option in options.items()
        if option.row_blocks > 1
    )
    copied = tuple(name for name, option in options.items() if option.copied)
    return ShardingPlan(
        (*columns.placements, *blocks),
        len(task.devices),
        copied,
        hot_rows=tuple(_hot_rows(options).items()),
        cached_rows=tuple(_cached_rows(options).items()),
    )


def blocks_of(
    task: ShardingTask, table: EmbeddingTable, option: ShardingOption
) -> list[tuple[Piece, int]]:
    """Returns the blocks of rows of a table as pieces, with their devices; none without blocks."""
    if option.row_blocks == 1:
        return []
    blocks = task.row_blocks(option.held(table, task.batch_size), option.row_blocks)
    return [(block.whole(), option.first + number) for number, block in enumerate(blocks)]


def tables_of_parts(task: ShardingTask, options: Options) -> dict[str, str]:
    """Returns the access digest of the table of each block of rows, and of cold rows and tables
    with caches, by that of the part.
    """
    found = dict[str, str]()
    for table in task.tables:
        option = _of(options, table.name)
        held = option.held(table, task.batch_size)
        parts = (held, *(block.table for block, _ in blocks_of(task, table, option)))
        found.update(dict.fromkeys((part.access_digest for part in parts), table.access_digest))
    return found


def columns_task(task: ShardingTask, options: Options) -> ShardingTask:
    """Returns the task of what single devices hold: columns of tables, and blocks of rows that have
    their devices. The memory of copies is reserved.

    Raises:
        FieldError: A device has no memory for the copies and more.
    """
    hot = _hot_rows(options)
    task = task.with_cached_rows(_cached_rows(options)).with_hot_rows(hot)
    copied = [name for name, option in options.items() if option.copied]
    rest = task.without([*copied, *(hot_name(name) for name, count in hot.items() if count)])
    counts = {n: option.row_blocks for n, option in options.items() if option.row_blocks > 1}
    ranks = len(task.devices)
    firsts = {name: options[name].first for name, count in counts.items() if count < ranks}
    return rest.with_row_blocks(counts, firsts)


def _of(options: Options, table: str) -> ShardingOption:
    return options.get(table, COLUMN_WISE)


def _hot_rows(options: Options) -> dict[str, int]:
    return {n: o.hot_rows for n, o in options.items() if o.hot_rows is not None}


def _cached_rows(options: Options) -> dict[str, int]:
    return {n: o.cached_rows for n, o in options.items() if o.cached_rows is not None}
