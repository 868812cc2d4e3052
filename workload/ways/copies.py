"""Copies of a table on all devices (data-parallel)."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from autoshard.workload.sizes import format_bytes
from autoshard.workload.tables.table import EmbeddingTable
from autoshard.workload.tasks.task import ShardingTask
from autoshard.workload.ways.option import DATA_PARALLEL, ShardingOption, common_memory
from autoshard.workload.ways.way import OptionLimits, Way, names_of

if TYPE_CHECKING:
    from autoshard.workload.plans.plan import ShardingPlan


class Copies(Way):
    """Each device has a copy of the table, and looks up its own samples."""

    name = "copies"
    demanded_by = "copied"
    actions = ("data_parallel",)
    forbidden_by = frozenset(("together", "apart", "on", "not_on", "not_copied", "row_wise"))

    def taken_by(self, option: ShardingOption) -> bool:
        """Returns whether each device has a copy."""
        return option.copied

    def says(self, table: str, yes: bool = True) -> str:
        """Returns the clause for messages."""
        return f"{table} is {'' if yes else 'not '}copied to all devices"

    def words(self, option: ShardingOption, slices: int, ranks: int) -> str:
        """Returns TorchRec's sharding type."""
        return "data-parallel"

    def where(self, option: ShardingOption, homes: str) -> str:
        """Returns that rows are everywhere."""
        return "all devices"

    def options(
        self, table: EmbeddingTable, known: Sequence[ShardingOption], limits: OptionLimits
    ) -> list[ShardingOption]:
        """Returns the copy, where there are several devices and it has a price."""
        return [DATA_PARALLEL] if limits.copies and len(limits.task.devices) > 1 else []

    def demanded(self, table: EmbeddingTable, limits: OptionLimits) -> ShardingOption:
        """Returns the copy."""
        return DATA_PARALLEL

    def fault(
        self, table: EmbeddingTable, option: ShardingOption, task: ShardingTask
    ) -> str | None:
        """Returns that rows of a copied table are numbered, too."""
        if not option.copied or option.hot_rows is None:
            return None
        return (
            f"table {table.name} is copied to all devices, and has a number of hot rows: take "
            "either out of the plan"
        )

    def notes(self, plan: "ShardingPlan", task: ShardingTask) -> Iterator[str]:
        """Yields which tables are copied, and who trains them."""
        if not (copied := plan.copied):
            return
        size = format_bytes(common_memory(task, dict.fromkeys(copied, DATA_PARALLEL)).total)
        yield (
            f"copied to all devices (data-parallel): {len(copied)} of {len(task.tables)} "
            f"tables, {size} on each, {names_of(copied)}: the optimizer of the dense layers "
            "must train them (constraint ways: [table_wise, column_wise, row_wise] forbids copies)"
        )
