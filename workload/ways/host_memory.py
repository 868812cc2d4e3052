"""Tables in host memory, some of whose rows are in a cache in device memory."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from autoshard.workload.sizes import format_bytes
from autoshard.workload.tables.table import EmbeddingTable
from autoshard.workload.tasks.task import ShardingTask
from autoshard.workload.ways.option import ShardingOption, option_of
from autoshard.workload.ways.way import OptionLimits, Way, names_of

if TYPE_CHECKING:
    from autoshard.workload.plans.plan import ShardingPlan


class HostMemory(Way):
    """Weights are in the host's memory, and a cache, or none, is on the device."""

    name = "host memory"
    actions = ("host_memory",)
    unmeasured = "shards are measured in device memory alone: price the plan by a data sheet"

    def taken_by(self, option: ShardingOption) -> bool:
        """Returns whether the table is in host memory."""
        return option.cached_rows is not None

    def rows_of(self, option: ShardingOption) -> int | None:
        """Returns the rows that the cache has room for."""
        return option.cached_rows

    def says(self, table: str, yes: bool = True) -> str:
        """Returns the clause for messages."""
        return f"{table} is {'' if yes else 'not '}in host memory"

    def words(self, option: ShardingOption, slices: int, ranks: int) -> str:
        """Returns the rows of the cache."""
        rows = option.cached_rows
        return "in host memory (UVM), " + (f"cache of {rows:,} rows" if rows else "no cache")

    def options(
        self, table: EmbeddingTable, known: Sequence[ShardingOption], limits: OptionLimits
    ) -> list[ShardingOption]:
        """Returns known options without copies, but for caches."""
        shared = [option for option in known if not option.has_copies]
        cached = (option_of(some, table.name).cached_rows for some in limits.in_host_memory)
        counts = dict.fromkeys(count for count in cached if count is not None)
        return [replace(option, cached_rows=count) for option in shared for count in counts]

    def after(
        self,
        action: str,
        option: ShardingOption,
        known: Sequence[ShardingOption],
        limits: OptionLimits,
    ) -> ShardingOption | None:
        """Returns the option with the largest cache that is smaller than the present one."""
        counts = [other.cached_rows for other in known if other.cached_rows is not None]
        if option.cached_rows is not None:
            counts = [count for count in counts if count < option.cached_rows]
        return replace(option, cached_rows=max(counts)) if counts else None

    def fault(
        self, table: EmbeddingTable, option: ShardingOption, task: ShardingTask
    ) -> str | None:
        """Returns that a cache is of more rows than there are, or that there are copies, too."""
        if option.cached_rows is not None and not 0 <= option.cached_rows <= table.rows:
            must = f"cached_rows must lie between 0 and {table.rows}"
            return f"table {table.name}: {must}, got {option.cached_rows}"
        copied = "it is" if option.copied else "hot rows of it are" if option.hot_rows else ""
        if option.cached_rows is None or not copied:
            return None
        return (
            f"table {table.name} is in host memory, and {copied} copied to all devices: take "
            "either out of the plan"
        )

    def notes(self, plan: "ShardingPlan", task: ShardingTask) -> Iterator[str]:
        """Yields which tables are in host memory, and what their caches hold."""
        if not (counts := plan.cached_rows):
            return
        from autoshard.workload.access.caches import lfu_hits  # other plans do without

        tables = [table for table in task.tables if table.name in counts]
        found = [
            lfu_hits(table, np.array([counts[table.name]], float), task.batch_size)
            for table in tables
        ]
        used = sum(distinct for distinct, _ in found)
        held = sum(float(hits[0]) for _, hits in found)
        size = format_bytes(max(plan.host_bytes(task)))
        yield (
            f"in host memory: {len(counts)} of {len(task.tables)} tables, at most {size} for a "
            f"device, {names_of(list(counts))}; caches on devices have {sum(counts.values()):,} of "
            f"their {sum(table.rows for table in tables):,} rows, and "
            f"{held / used if used else 1:.1%} of the rows that a batch uses (kernels "
            "fused_uvm_caching and fused_uvm, never measured here)"
        )
