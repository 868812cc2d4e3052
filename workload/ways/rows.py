"""Blocks of rows: on all devices (row-wise), on those of a node (table-row-wise), and of each slice
of columns (a grid).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from autoshard.workload.errors import FieldError
from autoshard.workload.tables.table import EmbeddingTable, can_be_blocks
from autoshard.workload.tasks.rules import Kind
from autoshard.workload.tasks.task import ShardingTask
from autoshard.workload.ways.option import COLUMN_WISE, ShardingOption
from autoshard.workload.ways.way import OptionLimits, Way, names_of

if TYPE_CHECKING:
    from autoshard.workload.plans.plan import ShardingPlan

_UNEVEN = 1.1  # lookups of a block over its even share that are worth a line


class Rows(Way):
    """Even blocks of rows, each on a device of its own, whose partial sums are added up."""

    name = "row-wise"
    demanded_by = "row_wise"
    actions = ("row_wise", "table_row_wise")
    forbidden_by = frozenset(
        ("together", "apart", "on", "not_on", "whole", "max_slices", "copied", "not_row_wise")
    )

    def forbids(self, kind: Kind, option: ShardingOption, devices: int) -> bool:
        """Returns whether rules forbid blocks of rows, or those on the devices of a node."""
        on_a_node = kind == "not_on_a_node" and option.row_blocks < devices
        return on_a_node or super().forbids(kind, option, devices)

    def taken_by(self, option: ShardingOption) -> bool:
        """Returns whether the table is in blocks of rows."""
        return option.row_blocks > 1

    def says(self, table: str, yes: bool = True) -> str:
        """Returns the clause for messages."""
        return f"{table} is {'' if yes else 'not '}in blocks of rows"

    def words(self, option: ShardingOption, slices: int, ranks: int) -> str:
        """Returns TorchRec's sharding type, and the number of blocks."""
        blocks = option.row_blocks
        if slices > 1:
            return f"grid, {slices} slices x {blocks} blocks"
        return f"{'row-wise' if blocks == ranks else 'table-row-wise'}, {blocks} blocks"

    def where(self, option: ShardingOption, homes: str) -> str:
        """Returns the devices, each of which has a block."""
        return f"by rows: {homes}"

    def options(
        self, table: EmbeddingTable, known: Sequence[ShardingOption], limits: OptionLimits
    ) -> list[ShardingOption]:
        """Returns blocks of rows on all devices, and on those of each node."""
        if not limits.rows:
            return []
        ranks, nodes = len(limits.task.devices), limits.task.nodes
        of_node, found = ranks // nodes, list[ShardingOption]()
        if ranks > 1 and can_be_blocks(table.rows, ranks):
            found.append(in_blocks(COLUMN_WISE, ranks, 0, limits))
        if 1 < of_node < ranks and can_be_blocks(table.rows, of_node):
            firsts = range(0, ranks, of_node)
            found += [in_blocks(COLUMN_WISE, of_node, n, limits) for n in firsts]
        return found

    def after(
        self,
        action: str,
        option: ShardingOption,
        known: Sequence[ShardingOption],
        limits: OptionLimits,
    ) -> ShardingOption | None:
        """Returns blocks on all devices, or on those of one node, if there are several."""
        ranks, nodes = len(limits.task.devices), limits.task.nodes
        if action == "row_wise":
            return in_blocks(option, ranks, 0, limits)
        return in_blocks(option, ranks // nodes, 0, limits) if nodes > 1 else None

    def demanded(self, table: EmbeddingTable, limits: OptionLimits) -> ShardingOption:
        """Returns blocks on all devices; FieldError if there are too few rows, or devices."""
        ranks = len(limits.task.devices)
        if ranks == 1:
            raise FieldError("row_wise", "rows need two devices")
        if not can_be_blocks(table.rows, ranks):
            problem = f"{table.rows} rows in {ranks} even blocks leave a device empty"
            raise FieldError("row_wise", problem)
        return in_blocks(COLUMN_WISE, ranks, 0, limits)

    def fault(
        self, table: EmbeddingTable, option: ShardingOption, task: ShardingTask
    ) -> str | None:
        """Returns why blocks of a table's cold rows leave a device without any."""
        if option.row_blocks == 1:
            return None
        rows = option.held(table, task.batch_size).rows
        return _fault_of_even_blocks(table.name, rows, option.row_blocks)

    def notes(self, plan: "ShardingPlan", task: ShardingTask) -> Iterator[str]:
        """Yields which tables are in blocks of rows, and how evenly blocks are used."""
        if not (row_wise := plan.row_wise):
            return
        yield (
            f"row-wise (in blocks of rows): {len(row_wise)} of {len(task.tables)} tables, "
            f"{names_of([*row_wise])}: the fused optimizer trains them (constraint ways: "
            "[table_wise, column_wise, data_parallel] forbids rows)"
        )
        yield from _use_of_blocks(plan, task)


def in_blocks(
    option: ShardingOption, count: int, first: int, limits: OptionLimits
) -> ShardingOption:
    """Returns an option in columns, but for `count` blocks of rows from device `first` on."""
    hot_rows = 0 if option.hot_rows is None and limits.hash_ids else option.hot_rows
    return replace(option, row_blocks=count, first=first, hot_rows=hot_rows)


def fault_of_blocks(table: EmbeddingTable, homes: Sequence[range], num_devices: int) -> str | None:
    """Returns why a table's blocks of rows are not even, over all devices or those of a node.

    Args:
        table: The table.
        homes: Devices of each slice of columns, at least one; one device has all rows of a slice.
        num_devices: Number of devices of the plan.
    """
    count = len(homes[0])
    if any(len(devices) != count for devices in homes):
        return f"table {table.name} has pieces of different row_blocks: all need the same number"
    if count == 1:
        return None
    if count < 1 or num_devices % count or any(devices.start % count for devices in homes):
        return (
            f"table {table.name} is in {count} blocks of rows from device {homes[0].start} "
            f"on: take all {num_devices} devices, or those of a node (row_blocks divides "
            "the number of devices, and the first device is a multiple of it)"
        )
    if count == num_devices and len(homes) > 1:
        return (
            f"table {table.name} is in blocks of rows on all devices and in slices of "
            "columns: take either"
        )
    return _fault_of_even_blocks(table.name, table.rows, count)


def _fault_of_even_blocks(table: str, rows: int, count: int) -> str | None:
    if can_be_blocks(rows, count):
        return None
    return (
        f"table {table}: {rows} rows in {count} even blocks leave a device without rows: shard it "
        "otherwise"
    )


def _use_of_blocks(plan: "ShardingPlan", task: ShardingTask) -> Iterator[str]:
    """Yields which row-wise tables have unevenly used blocks, and of which that is not known."""
    tables = {table.name: table for table in task.tables}
    spread = plan.hot_rows  # by a hash of ids
    row_wise = {tables[n]: blocks for n, blocks in plan.blocks(task).items() if n not in spread}
    unknown = [table.name for table in row_wise if table.access is None]
    if unknown:
        yield (
            f"  blocks of {names_of(unknown)} are taken to get equal shares of lookups: if ids are "
            "sorted by use, the first device gets most (profile_tables.py counts them, --hash-ids "
            "spreads them)"
        )
    uneven = {}
    for table, blocks in row_wise.items():
        if table.access is not None and table.pooling_factor:
            busiest = max(block.pooling_factor for block in blocks)
            uneven[table.name] = busiest * len(blocks) / table.pooling_factor
    if uneven and max(uneven.values()) > _UNEVEN:
        name = max(uneven, key=lambda name: uneven[name])
        yield (
            f"  the busiest block of {name} gets {uneven[name]:.2f} times the mean lookups: "
            "with --hot-ids of profile_tables.py and shard.py a plan copies its most used rows "
            "and spreads the others where that pays; --hash-ids of shard.py spreads all"
        )
