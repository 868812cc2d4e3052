"""Which options each table of a task may take, as far as rules, rows and the cost model allow.

`RequiredOptions` makes plans of sharders that know columns alone obey rules for copies and rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from autoshard.workload import EmbeddingTable, PlanError, Sharder, ShardingPlan, ShardingTask
from autoshard.workload.errors import FieldError
from autoshard.workload.options import (
    COLUMN_WISE,
    DATA_PARALLEL,
    Options,
    Sharded,
    ShardingOption,
    columns_task,
)
from autoshard.workload.packing import pack
from autoshard.workload.rules import Kind
from autoshard.workload.sizes import format_bytes
from autoshard.workload.tables import can_be_blocks

_COUNTS = (1, 4, 16)  # of tables by rows that are tried where no plan fits without


class TableOptions:
    """The options that the tables of a task may take.

    Args:
        task: The task.
        copies: Whether tables may be copied that need not be: that has a price.
        rows: Whether tables may be in blocks of rows that need not be.

    Attributes:
        required: Options of tables to which rules leave no other.

    Raises:
        PlanError: Rules that cannot be kept together.
    """

    def __init__(self, task: ShardingTask, copies: bool = True, rows: bool = True) -> None:
        self.task, self._ranks = task, len(task.devices)
        self._may_copy, self._may_have_rows = copies, rows
        everywhere = ShardingOption(row_blocks=self._ranks)
        kinds: Mapping[Kind, ShardingOption] = {"copied": DATA_PARALLEL, "row_wise": everywhere}
        self.required: dict[str, ShardingOption] = {}
        for kind, option in kinds.items():
            for name in self._required(kind):
                self.required[name] = option

    def of(self, table: EmbeddingTable) -> tuple[ShardingOption, ...]:
        """Returns the options of a table, columns first; one if rules leave no other."""
        return self._of_each[table.name]

    @property
    def any_choice(self) -> bool:
        """Whether any table may take several options."""
        return any(len(options) > 1 for options in self._of_each.values())

    def columns_task(self, options: Options) -> ShardingTask:
        """Returns the task of what single devices hold (`workload.options.columns_task`).

        Raises:
            PlanError: There is no memory for the copies.
        """
        try:
            return columns_task(self.task, options)
        except FieldError:
            copied = [name for name, option in options.items() if option.copied]
            size = self.task.copies_memory(copied).total
            free = self.task.usable_bytes
            raise PlanError(
                f"copies of {len(copied)} tables take {format_bytes(size)} on each device, and "
                f"device {free.argmin()} has {format_bytes(int(free.min()))}: allow copies of fewer"
            ) from None

    def within_memory(self) -> Iterator[Options]:
        """Yields sets in which few of the largest tables are by rows, for tasks of short memory."""
        rows, task = ShardingOption(row_blocks=self._ranks), self.task
        names = [
            table.name
            for table in sorted(task.tables, key=lambda table: -task.table_bytes(table))
            if table.name not in self.required and rows in self._rows_of(table)
        ]
        for count in sorted({min(count, len(names)) for count in _COUNTS} - {0}):
            yield {**self.required, **dict.fromkeys(names[:count], rows)}

    def sharded(self, sharder: Sharder, options: Options) -> Sharded:
        """Returns the plan in which a sharder places the columns of the other tables.

        Raises:
            PlanError: There is no memory for copies, or the sharder finds no plan.
        """
        task = self.columns_task(options)
        placed = sharder.shard(task).placed(task) if task.tables else []
        return Sharded.of_columns(self.task, placed, options)

    def any_plan(self, rows: bool = True) -> Sharded:
        """Returns any plan that fits into memory.

        Args:
            rows: Whether large tables may be by rows where no plan fits without.

        Raises:
            PlanError: There is none, by the required options.
        """
        lack: PlanError | None = None
        for some in (self.required, *(self.within_memory() if rows else ())):
            try:
                task = self.columns_task(some)
                return Sharded.of_columns(
                    self.task, pack(task, split=True) if task.tables else [], some
                )
            except PlanError as error:
                lack = lack or error
        assert lack is not None
        raise lack

    @cached_property
    def _of_each(self) -> Mapping[str, tuple[ShardingOption, ...]]:
        rules = self.task.rules
        kept = {name for rule in rules if not rule.allows_copies for name in rule.tables}
        found = dict[str, tuple[ShardingOption, ...]]()
        for table in self.task.tables:
            if table.name in self.required:
                found[table.name] = (self.required[table.name],)
                continue
            options = [COLUMN_WISE]
            if self._may_copy and self._ranks > 1 and table.name not in kept:
                options.append(DATA_PARALLEL)
            if self._may_have_rows:
                options += self._rows_of(table)
            found[table.name] = tuple(options)
        return found

    @cached_property
    def _in_columns(self) -> frozenset[str]:
        """Tables that no rule allows by rows."""
        rules = self.task.rules
        return frozenset(name for rule in rules if not rule.allows_rows for name in rule.tables)

    def _rows_of(self, table: EmbeddingTable) -> Sequence[ShardingOption]:
        """Returns blocks of rows on all devices, and on those of each node."""
        if table.name in self._in_columns:
            return ()
        ranks, nodes = self._ranks, self.task.nodes
        of_node, found = ranks // nodes, list[ShardingOption]()
        if ranks > 1 and can_be_blocks(table.rows, ranks):
            found.append(ShardingOption(row_blocks=ranks))
        if 1 < of_node < ranks and can_be_blocks(table.rows, of_node):
            found += [ShardingOption(row_blocks=of_node, first=n * of_node) for n in range(nodes)]
        return found

    def _required(self, kind: Kind) -> Sequence[str]:
        """Returns the tables that rules of a kind name; PlanError if others forbid that."""
        required = {
            name: rule for rule in self.task.rules if rule.kind == kind for name in rule.tables
        }
        for other in self.task.rules:
            allows = other.allows_copies if kind == "copied" else other.allows_rows
            for name in () if allows else other.tables:
                if name in required:
                    raise PlanError(
                        f"the constraints {required[name].name!r} and {other.name!r} cannot be "
                        f"kept together for table {name}: drop one"
                    )
        if kind == "row_wise":
            for table in self.task.tables:
                if table.name in required and not (
                    self._ranks > 1 and can_be_blocks(table.rows, self._ranks)
                ):
                    why = f"{table.rows} rows in {self._ranks} even blocks leave a device empty"
                    raise PlanError(
                        f"the constraint {required[table.name].name!r} cannot be kept for table "
                        f"{table.name}: {why if self._ranks > 1 else 'rows need two devices'}"
                    )
        return list(required)


class RequiredOptions:
    """Copies tables and shards them by rows where rules say so; a sharder places the others.

    Args:
        sharder: Places columns of tables.
    """

    def __init__(self, sharder: Sharder) -> None:
        self._sharder = sharder

    def shard(self, task: ShardingTask) -> ShardingPlan:
        """Returns a valid plan; raises PlanError if none is found."""
        options = TableOptions(task, copies=False, rows=False)
        return options.sharded(self._sharder, options.required).plan(task)
