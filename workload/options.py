"""Sharding options: how the rows and columns of one table are spread over devices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from autoshard.workload.placements import Placement
from autoshard.workload.plans import ShardingPlan
from autoshard.workload.tables import EmbeddingTable, Piece
from autoshard.workload.tasks import ShardingTask


@dataclass(frozen=True)
class ShardingOption:
    """How a table is sharded, but for the devices of its columns.

    Args:
        copied: Whether each device has a copy (data-parallel).
        row_blocks: Number of blocks of rows, on as many devices (row-wise, table-row-wise); 1 where
            the table is whole or in slices of columns.
        first: First device of the blocks.
    """

    copied: bool = False
    row_blocks: int = 1
    first: int = 0

    @property
    def by_columns(self) -> bool:
        """Whether any device may have any columns of the table."""
        return not self.copied and self.row_blocks == 1


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
        """Returns a plan that has no hot rows and no caches."""
        options, tables = options_of(plan), {table.name: table for table in task.tables}
        placed = [
            (Piece(tables[each.table], each.start, each.width), each.device)
            for each in plan.placements
            if each.table not in options
        ]
        return Sharded(placed, options)

    @staticmethod
    def of_columns(
        task: ShardingTask, placed: Sequence[tuple[Piece, int]], options: Options
    ) -> "Sharded":
        """Returns the plan with these options, given what single devices hold by them."""
        names = {table.name for table in task.tables}
        return Sharded([pair for pair in placed if pair[0].table.name in names], options)

    def plan(self, task: ShardingTask) -> ShardingPlan:
        """Returns the plan; columns of a table that meet on a device are one piece."""
        return plan_of(task, self.options, list(self.placed))

    def columns_placed(self, task: ShardingTask) -> list[tuple[Piece, int]]:
        """Returns what the task of single devices places (`columns_task`): blocks of rows, too."""
        blocks = [
            block
            for table in task.tables
            if table.name in self.options
            for block in blocks_of(task, table, self.options[table.name])
        ]
        return [*self.placed, *blocks]


def options_of(plan: ShardingPlan) -> dict[str, ShardingOption]:
    """Returns the options of a plan's tables that are not in columns alone.

    Of a table in several slices of columns, each in blocks of rows (a grid), that of one slice.
    """
    found = dict.fromkeys(plan.copied, DATA_PARALLEL)
    for placement in plan.placements:
        if placement.row_blocks > 1:
            blocks = ShardingOption(row_blocks=placement.row_blocks, first=placement.device)
            found[placement.table] = blocks
    return found


def plan_of(task: ShardingTask, options: Options, placed: list[tuple[Piece, int]]) -> ShardingPlan:
    """Returns the plan with these options.

    Args:
        task: Task of the plan.
        options: Options of tables that are not in columns alone.
        placed: Pieces of the other tables, and their devices. Columns are assigned anew, so that a
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
    return ShardingPlan((*columns.placements, *blocks), len(task.devices), copied)


def blocks_of(
    task: ShardingTask, table: EmbeddingTable, option: ShardingOption
) -> list[tuple[Piece, int]]:
    """Returns the blocks of rows of a table as pieces, with their devices; none without blocks."""
    if option.row_blocks == 1:
        return []
    blocks = task.row_blocks(table, option.row_blocks)
    return [(block.whole(), option.first + number) for number, block in enumerate(blocks)]


def tables_of_blocks(task: ShardingTask, options: Options) -> dict[str, str]:
    """Returns the access digest of the table of each block of rows, by the block's."""
    return {
        block.table.access_digest: table.access_digest
        for table in task.tables
        for block, _ in blocks_of(task, table, options.get(table.name, COLUMN_WISE))
    }


def columns_task(task: ShardingTask, options: Options) -> ShardingTask:
    """Returns the task of what single devices hold: columns of tables, and blocks of rows that have
    their devices. The memory of copies is reserved.

    Raises:
        FieldError: A device has no memory for the copies and more.
    """
    rest = task.without([name for name, option in options.items() if option.copied])
    counts = {n: option.row_blocks for n, option in options.items() if option.row_blocks > 1}
    ranks = len(task.devices)
    firsts = {name: options[name].first for name, count in counts.items() if count < ranks}
    return rest.with_row_blocks(counts, firsts)
