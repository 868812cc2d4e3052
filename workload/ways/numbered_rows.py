"""Rows that are numbered by a hash of their ids, of which the most used ones may be copied.

A table's rows get new numbers by a hash, so that blocks of rows get equal shares of lookups
whatever the order of ids. Those that are used most may be hot: each device has a copy of them, as
of a data-parallel table, and the others are cold.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from autoshard.workload.sizes import format_bytes
from autoshard.workload.tables.table import EmbeddingTable, can_be_blocks, hot_name
from autoshard.workload.tasks.task import ShardingTask
from autoshard.workload.ways.option import ShardingOption, common_memory
from autoshard.workload.ways.way import OptionLimits, Way, names_of

if TYPE_CHECKING:
    from autoshard.workload.plans.plan import ShardingPlan


class HotRows(Way):
    """Each device has a copy of the most used rows."""

    name = "hot rows"
    actions = ("hot_rows",)
    forbidden_by = frozenset(("together", "apart", "on", "not_on", "not_copied", "copied"))

    def taken_by(self, option: ShardingOption) -> bool:
        """Returns whether rows are copied."""
        return bool(option.hot_rows)

    def rows_of(self, option: ShardingOption) -> int | None:
        """Returns the number of hot rows."""
        return option.hot_rows

    def says(self, table: str, yes: bool = True) -> str:
        """Returns the clause for messages."""
        return f"hot rows of {table} are {'' if yes else 'not '}copied to all devices"

    def words(self, option: ShardingOption, slices: int, ranks: int) -> str:
        """Returns the number of hot rows."""
        return f"{option.hot_rows:,} hot rows data-parallel"

    def where(self, option: ShardingOption, homes: str) -> str:
        """Returns where hot and cold rows are."""
        return f"{option.hot_rows:,} hot rows: all devices; others: {homes}"

    def options(
        self, table: EmbeddingTable, known: Sequence[ShardingOption], limits: OptionLimits
    ) -> list[ShardingOption]:
        """Returns known options, but for hot rows, where blocks of cold rows have some."""
        hot, tables = limits.hot_rows.get(table.name, 0), limits.task.tables
        if not hot or any(other.name == hot_name(table.name) for other in tables):
            return []
        return [
            replace(option, hot_rows=hot)
            for option in known
            if option.by_columns
            or (option.row_blocks > 1 and can_be_blocks(table.rows - hot, option.row_blocks))
        ]

    def fault(
        self, table: EmbeddingTable, option: ShardingOption, task: ShardingTask
    ) -> str | None:
        """Returns that there are not so many rows, or a table already of that of hot rows' name."""
        hot, count = hot_name(table.name), option.hot_rows or 0
        if not 0 <= count < table.rows:
            most = table.rows - 1
            return f"table {table.name}: hot_rows must lie between 0 and {most}, got {count}"
        if not count or all(other.name != hot for other in task.tables):
            return None
        return (
            f"hot rows of table {table.name} would be table {hot}, which there is already: "
            "rename it"
        )

    def notes(self, plan: "ShardingPlan", task: ShardingTask) -> Iterator[str]:
        """Yields which tables have hot rows, and how many lookups these get."""
        if not (counts := plan.copied_hot_rows):
            return
        tables, held = {table.name: table for table in task.tables}, plan.held_tables(task)
        size = format_bytes(common_memory(task, {n: plan.options[n] for n in counts}).total)
        lookups = sum(tables[name].pooling_factor for name in counts)
        share = 1 - sum(held[name].pooling_factor for name in counts) / lookups if lookups else 0.0
        profiled = all(tables[name].access is not None for name in counts)
        known = "" if profiled else " (estimated: profile_tables.py counts them)"
        yield (
            f"hot rows copied to all devices: {sum(counts.values()):,} of {len(counts)} tables, "
            f"{size} on each, {names_of(list(counts))}, with {share:.0%} of their lookups{known}: "
            "make the model's collections by with_hot_rows and the file of --hot-ids; the "
            "optimizer of the dense layers must train them"
        )


class HashedIds(Way):
    """No rows are hot. `Rows` offers it with blocks of rows, which alone gain by it."""

    name = "hashed ids"

    def taken_by(self, option: ShardingOption) -> bool:
        """Returns whether rows are numbered by a hash, and none is copied."""
        return option.hot_rows == 0

    def says(self, table: str, yes: bool = True) -> str:
        """Returns the clause for messages."""
        return f"rows of {table} are {'' if yes else 'not '}numbered by a hash of their ids"

    def words(self, option: ShardingOption, slices: int, ranks: int) -> str:
        """Returns how rows are numbered."""
        return "hashed ids"

    def where(self, option: ShardingOption, homes: str) -> str:
        """Returns where rows are, and how they are numbered."""
        return f"hashed ids: {homes}"

    def options(
        self, table: EmbeddingTable, known: Sequence[ShardingOption], limits: OptionLimits
    ) -> list[ShardingOption]:
        """Returns none beside those of blocks of rows."""
        return []

    def notes(self, plan: "ShardingPlan", task: ShardingTask) -> Iterator[str]:
        """Yields which tables have their rows numbered so."""
        if not (hashed := [name for name, count in plan.hot_rows.items() if not count]):
            return
        yield (
            f"rows numbered by a hash of their ids: {len(hashed)} of {len(task.tables)} tables, "
            f"{names_of(hashed)}, whose blocks get equal shares of lookups whatever the order of "
            "ids: make the model's collections by with_hot_rows"
        )
